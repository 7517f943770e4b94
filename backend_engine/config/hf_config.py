"""Reading values of a Hugging Face config.json with types and bounds, for the model families.

Every refusal is a ``ModelLoadError`` that names key, value and what is allowed. Opens no file.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from backend_engine.errors import ModelLoadError, shown

MAX_INTEGER = 2**31 - 1
_MAX_KEY_CHARS = 200
MAX_LAYERS = 10_000
"""What is made for each layer is made before it is known whether the files hold so many."""


class HfConfig:
    """Typed view of a config. ``where`` names the place in messages; ``null`` counts as absent. Remembers
    what was read.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def refuse(self, key: str, allowed: str) -> ModelLoadError:
        """The error for a value that is not allowed (or missing); the caller raises it."""
        value = self._values.get(key)
        found = "is missing" if value is None else f"is {shown(value)}"
        named = key if key.isprintable() and len(key) <= _MAX_KEY_CHARS else shown(key)
        return ModelLoadError(f"{self._where}: {named} {found}; expected {allowed}")

    def get(self, key: str) -> Any:
        """The value as it is; ``None`` when absent."""
        self._read.add(key)
        return self._values.get(key)

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, with ``null`` or any other value."""
        return key in self._values

    def has_read(self, key: str) -> bool:
        """Whether somebody has asked for the key."""
        return key in self._read

    def unread(self) -> list[str]:
        """Keys with a value that nobody has asked for, sorted."""
        return sorted(key for key, value in self._values.items() if key not in self._read and value is not None)

    def integer(self, key: str, default: int | None = None, at_most: int = MAX_INTEGER) -> int:
        """An integer of at least 1; without a default it must be there."""
        return self._integer(key, 1, default, at_most)

    def num_layers(self, default: int | None = None) -> int:
        """``num_hidden_layers``, of which there may be ``MAX_LAYERS``."""
        return self.integer("num_hidden_layers", default, MAX_LAYERS)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0; without a default it must be there."""
        return self._integer(key, 0, default, MAX_INTEGER)

    def _integer(self, key: str, low: int, default: int | None, high: int) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refuse(key, f"an integer of at least {low}")
        if value > high:
            raise self.refuse(key, f"an integer of at most {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 that a float can be; without a default it must be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_positive(value):
            raise self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """One of the names in ``allowed``; without a default it must be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(key, f"one of {', '.join(sorted(allowed))}")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of ``length`` numbers above 0; it must be there."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != length:
            raise self.refuse(key, f"a list of {length} numbers")
        if any(isinstance(v, bool) or not isinstance(v, int | float) or not _is_positive(v) for v in values):
            raise self.refuse(key, f"a list of {length} numbers above 0")
        return tuple(float(value) for value in values)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> "HfConfig | None":
        """A nested object; ``None`` when absent or empty. ``defaults``: what keys mean that are not in it."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        named = key if key.isprintable() and len(key) <= _MAX_KEY_CHARS else shown(key)
        return HfConfig({**(defaults or {}), **value}, f"{self._where}: {named}")

    def require_neutral(self, neutral: Mapping[str, Collection[Any]]) -> None:
        """Refuse keys that would change the maths in a way the family does not do: absent or one of the values."""
        for key, values in neutral.items():
            self._read.add(key)
            if self._values.get(key) is not None and not any(self._values[key] == value for value in values):
                allowed = " or ".join(repr(value) for value in values) if values else "no such key"
                raise self.refuse(key, allowed)


def _is_positive(value: float) -> bool:
    return 0 < value <= sys.float_info.max
