"""Single fields of a request: priority, time limits, and ``SamplingParams`` in the client's own words.

The parser of the engine model and the BLS read them here. Everything out of range is refused by the name that the
client used.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import DEFAULT_PRIORITY, MAX_PRIORITY
from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.request_view import OptionReader, RequestView

# Fields of SamplingParams whose refusals are reworded to the client's name, longest first.
_REWORDED = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "max_tokens", "min_tokens",
    "end_id", "top_p_reset_ids", "top_p_decay", "top_p_min", "top_k", "top_p", "min_p", "seed", "n",
)  # fmt: skip

_MAX_PROCESSORS_BYTES = 1 << 16
_PROCESSORS_FORM = 'it must be an object of arguments for each name, such as {"name": {}}'


def read_priority(reader: OptionReader) -> int:
    """1 = most urgent, up to ``MAX_PRIORITY``; 0 and absent mean the middle."""
    value = reader.integer("priority")
    if value is not None and not 0 <= value <= MAX_PRIORITY:
        name = reader.name("priority")
        raise InvalidRequestError(
            f"{name} {value} is out of range; it must be 1 (most urgent) to {MAX_PRIORITY}, or 0 for the middle"
        )
    return value or DEFAULT_PRIORITY


def read_milliseconds(reader: OptionReader, name: str, default: int | None) -> int | None:
    """A time limit; 0 and absent mean the model's default."""
    value = reader.integer(name)
    if value is not None and value < 0:
        raise InvalidRequestError(f"{reader.name(name)} {value} is out of range; it must be 0 or more")
    return value or default


def request_timeout_ms(view: RequestView) -> float | None:
    """Triton's own request timeout (microseconds; a request parameter over /generate) in milliseconds, if set."""
    sent = view.parameters.get("timeout", 0)
    timeout_us = view.timeout_us or (sent if isinstance(sent, int) and not isinstance(sent, bool) else 0)
    return timeout_us / 1000 if timeout_us > 0 else None


def read_logits_processors(reader: OptionReader) -> dict[str, Any]:
    """What the request gives plugins' processors: arguments by name. ``SamplingParams`` checks the rest of its form."""
    text = reader.text("logits_processors", _MAX_PROCESSORS_BYTES)
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InvalidRequestError(f"logits_processors is not JSON ({reason}); {_PROCESSORS_FORM}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logits_processors is JSON but no object; {_PROCESSORS_FORM}")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def build_sampling_params(values: dict[str, Any], reader: OptionReader) -> SamplingParams:
    """``SamplingParams(**values)``; a refusal is reworded to the names that the client used."""
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise InvalidRequestError(_reword(str(error), _REWORDED, reader)) from None


def _reword(message: str, fields: Sequence[str], reader: OptionReader) -> str:
    pattern = r"\b(" + "|".join(fields) + r")\b"
    names = {"n": "num_return_sequences"}
    return re.sub(pattern, lambda match: reader.name(names.get(match[1], match[1])), message)
