"""Request parameters: which of them mean something, which are refused, and which are ignored with one log line.

The adapters of preprocessing, the engine and the BLS check each request's parameters here before they read them.
Everything that Triton Server does not take for an input (an unknown key of /generate above all) arrives as one.
"""

from collections.abc import Iterable
from typing import Any

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.feature_table import feature_names
from backend_engine.triton_io.option_table import SHARED_PARAMETERS
from backend_engine.triton_io.request_view import RequestView
from backend_engine.triton_io.unbuilt import refuse_disaggregation

# What known clients and front ends send along; never taken for a misspelt field.
KNOWN_PARAMETERS = frozenset({"Streaming", "accumulate_tokens", "request_type", "id", "timeout", "binary_data_output"})
_KNOWN_PREFIX = "triton_"
MAX_EDITS = 2


class ParameterGuard:
    """Judges request parameters that are no field: ignored and logged once, or refused when near a known field.

    ``names``: the fields a client of this model may mean. ``reject_unknown``: refuse every parameter that is not
    known. ``log`` gets one line a name. Safe for calls from several threads.
    """

    MAX_LOGGED = 1000

    def __init__(self, names: Iterable[str], reject_unknown: bool, log: Any) -> None:
        self._names = tuple(dict.fromkeys([*names, *sorted(SHARED_PARAMETERS)]))
        self._features = feature_names()
        self._reject_unknown = reject_unknown
        self._log = log
        self._logged: set[str] = set()

    def check(self, view: RequestView) -> None:
        """Raise ``InvalidRequestError`` for a parameter that must not be ignored."""
        refuse_disaggregation(view.parameters)
        for name in view.parameters:
            if name in SHARED_PARAMETERS or name in KNOWN_PARAMETERS or name.startswith(_KNOWN_PREFIX):
                continue
            if name in self._names:
                raise InvalidRequestError(f"{name} is an input of the model and cannot be sent as a request parameter")
            if name in self._features:
                raise InvalidRequestError(f"{name} is not an input of this model, nor built yet: leave it out")
            near = min(self._names, key=lambda known: edit_distance(name, known))
            if edit_distance(name, near) <= MAX_EDITS:
                raise InvalidRequestError(f"unknown parameter {name[:64]!r}; did you mean {near!r}?")
            if self._reject_unknown:
                raise InvalidRequestError(
                    f"unknown parameter {name[:64]!r}; this model refuses parameters it does not know"
                )
            self._log_once(name, "unknown request parameter %r is ignored")

    def _log_once(self, name: str, message: str) -> None:
        if name not in self._logged and len(self._logged) < self.MAX_LOGGED:
            self._logged.add(name)
            self._log.warning(message, name[:64])


def edit_distance(first: str, second: str, limit: int = MAX_EDITS) -> int:
    """Levenshtein distance, or ``limit + 1`` when it is more than ``limit``."""
    if abs(len(first) - len(second)) > limit:
        return limit + 1
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
        if min(row) > limit:
            return limit + 1
    return row[-1]
