"""``Registry``: named implementations of one kind, with errors that list what is known.

Values may be the object itself or a lazy ``"module:attribute"`` string, imported on first use, so that a
registry can name torch code without importing it. A registry never guesses a name.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from backend_engine.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Name to implementation. ``kind`` is the word used in error messages."""

    def __init__(self, kind: str, entries: dict[str, T | str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = dict(entries or {})
        self._imported: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an entry and returns it unchanged. A name taken already is a ``ConfigError``."""

        def add(value: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = value
            return value

        return add

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> T:
        """The entry called ``name``; ``ConfigError`` with the known and the nearest names if there is none."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}{hint}")
        value = self._entries[name]
        if not isinstance(value, str):
            return value
        if name not in self._imported:
            module, _, attribute = value.partition(":")
            found: Any = getattr(importlib.import_module(module), attribute)
            self._imported[name] = found
        return self._imported[name]

    def module_of(self, name: str) -> str | None:
        """Name of the module that a lazy entry lies in; ``None`` for one that was registered as an object."""
        value = self._entries.get(name)
        return value.partition(":")[0] if isinstance(value, str) else None
