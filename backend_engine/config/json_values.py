"""Checks of values of a JSON file of our own, in which every key is known and nothing is long.

Used by ``engine_manifest.py``. Every refusal is a ``ModelLoadError`` of one line: the place, the value and what is
allowed. Opens no file.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from backend_engine.errors import ModelLoadError, shown

_MAX_CHARS = 500
_ALWAYS_BOUNDED = frozenset((int, bool, type(None)))


def refusal(where: str, value: Any, allowed: str) -> ModelLoadError:
    """The error for a value that is not allowed; the caller raises it."""
    return ModelLoadError(f"{where} is {shown(value)}; expected {allowed}")


def check_keys(values: Any, keys: frozenset[str], where: str) -> None:
    """``values`` must be an object with all of ``keys`` and no other."""
    if not isinstance(values, dict):
        raise refusal(where, values, f"an object with {', '.join(sorted(keys))}")
    if values.keys() == keys:  # the usual case, of which there are many
        return
    for key in sorted(keys ^ values.keys()):
        fault = f"{key} is missing" if key in keys else f"the key {shown(key)} is not known"
        raise ModelLoadError(f"{where}: {fault}; expected {', '.join(sorted(keys))}")


def mapping(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The object under a key that is there."""
    value = values[key]
    if not isinstance(value, dict):
        raise refusal(f"{where}: {key}", value, "an object")
    return value


def is_text(value: object) -> bool:
    """Whether it is a text that fits in a message."""
    return isinstance(value, str) and 1 <= len(value) <= _MAX_CHARS and value.isprintable()


def text(value: Any, where: str) -> str:
    """A text that fits in a message."""
    if not is_text(value):
        raise refusal(where, value, f"1 to {_MAX_CHARS} printable characters")
    return str(value)


def check_bounded(value: Any, where: str, depth: int) -> None:
    """Any JSON value of at most ``depth`` levels, in which texts fit in a message and numbers are finite."""
    children: Sequence[Any] = ()
    if isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        children = value
    elif isinstance(value, str) and value and not is_text(value):
        raise refusal(where, value, f"texts of at most {_MAX_CHARS} printable characters")
    elif isinstance(value, float) and not math.isfinite(value):
        raise refusal(where, value, "finite numbers")
    if children and depth == 0:
        raise ModelLoadError(f"{where} is nested too deeply; expected a few levels")
    for child in children:
        if type(child) not in _ALWAYS_BOUNDED:
            check_bounded(child, where, depth - 1)
