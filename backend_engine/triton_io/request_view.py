"""``RequestView``: one request as plain data, and typed reading of its scalars.

Adapters make one of a Triton request; the parsers read it. It knows which spelling of a field the client used, so
that every refusal names the client's own word. Never imports Triton Server's module.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io import tensor_table
from backend_engine.triton_io.word_lists import decode_text

Array = npt.NDArray[Any]
Scalar = bool | int | float | str


@dataclass(frozen=True)
class RequestView:
    """Inputs by name, request parameters, the client's request id, and its timeout in microseconds (0 = none)."""

    inputs: Mapping[str, Array]
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    request_id: str = ""
    timeout_us: int = 0
    requested_outputs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, request: Any) -> "RequestView":
        """Read a Triton Python request. Parameters arrive from Triton Server as JSON text."""
        parameters = json.loads(request.parameters() or "{}")
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        outputs = frozenset(request.requested_output_names())
        return cls(inputs, parameters, request.request_id(), int(request.timeout()), outputs)

    def num_rows(self, name: str) -> int:
        """Rows of the request, read from input ``name``; at least 1.

        ``InvalidRequestError`` when there are none, or several and an input has not as many.
        """
        values = self.inputs[name]
        num_rows = int(values.shape[0]) if values.ndim > 0 else 1
        if num_rows == 0:
            raise InvalidRequestError(f"{name} has no rows")
        for other, values in self.inputs.items() if num_rows > 1 else ():
            if values.ndim == 0 or values.shape[0] != num_rows:
                raise InvalidRequestError(
                    f"{other} has {values.shape[0] if values.ndim else 1} rows and {name} {num_rows}; "
                    "they must be as many"
                )
        return num_rows

    def rows(self, name: str) -> "list[RequestView]":
        """A view a row, each a batch of one; refuses what ``num_rows`` refuses."""
        num_rows = self.num_rows(name)
        if num_rows == 1:
            return [self]
        return [
            replace(self, inputs={key: values[row : row + 1] for key, values in self.inputs.items()})
            for row in range(num_rows)
        ]


def first_text(tensors: Mapping[str, Array], name: str) -> str:
    """First element of a STRING tensor of ours; empty when it is not there."""
    values = tensors.get(name)
    return "" if values is None or not values.size else values.reshape(-1)[0].decode("utf-8", "replace")


class OptionReader:
    """Reads the ``OPTIONS`` of a request. ``text_names``: use and report the text models' names."""

    def __init__(self, view: RequestView, *, text_names: bool, reported_text_names: bool | None = None) -> None:
        self._view = view
        self._text = text_names
        self._reported_text = text_names if reported_text_names is None else reported_text_names
        self._used: dict[str, str] = {}

    def name(self, field_name: str) -> str:
        """How the client calls ``field_name``: the spelling it sent, else the oldest one."""
        return self._used.get(field_name) or tensor_table.spellings(field_name, text_model=self._reported_text)[0]

    def boolean(self, field_name: str, default: bool = False) -> bool:
        """A BOOL option."""
        value = self._value(field_name)
        if value is None:
            return default
        if not isinstance(value, bool | np.bool_):
            raise InvalidRequestError(f"{self.name(field_name)} must be true or false, got {value!r}")
        return bool(value)

    def integer(self, field_name: str) -> int | None:
        """An INT32 or UINT64 option, ``None`` when absent."""
        value = self._value(field_name)
        if value is None:
            return None
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise InvalidRequestError(f"{self.name(field_name)} must be an integer, got {value!r}")
        return int(value)

    def real(self, field_name: str) -> float | None:
        """An FP32 option, ``None`` when absent. Rounded to the digits that float32 holds, so that 0.7 reads 0.7."""
        value = self._value(field_name)
        if value is None:
            return None
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
            raise InvalidRequestError(f"{self.name(field_name)} must be a number, got {value!r}")
        return float(str(value)) if isinstance(value, np.float32) else float(value)

    def text(self, field_name: str, max_bytes: int) -> str | None:
        """A STRING option, ``None`` when absent."""
        value = self._value(field_name)
        return None if value is None else decode_text(value, self.name(field_name), max_bytes)

    def _value(self, field_name: str) -> Any:
        """The option's value from any of its spellings, or from the request parameters when that is allowed."""
        found: dict[str, Any] = {}
        for index, name in enumerate(tensor_table.spellings(field_name, text_model=self._text)):
            shown = tensor_table.spellings(field_name, text_model=self._reported_text)[index]
            if name in self._view.inputs:
                found[shown] = scalar(self._view.inputs[name], shown)
        if field_name in tensor_table.SHARED_PARAMETERS and field_name in self._view.parameters:
            found.setdefault(field_name, self._view.parameters[field_name])
            if found[field_name] != self._view.parameters[field_name]:
                raise InvalidRequestError(
                    f"{field_name} is sent twice with different values, as input and as parameter"
                )
        if not found:
            return None
        (name, value), *others = found.items()
        for other, other_value in others:
            if other_value != value:
                raise InvalidRequestError(
                    f"{name} {value} and {other} {other_value} are two names of one field and differ"
                )
        self._used[field_name] = name
        return value


def scalar(values: Array, name: str) -> Any:
    """The one value of ``values``; ``InvalidRequestError`` when there is not exactly one."""
    if values.size != 1:
        raise InvalidRequestError(f"{name} must be a single value, got {values.size} values")
    return values.reshape(-1)[0]
