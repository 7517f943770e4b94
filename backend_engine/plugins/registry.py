"""``Registry``: named implementations of one kind, with errors that list what is known and say who owns what.

Values may be the object itself or a lazy ``"module:attribute"`` string, imported on first use, so that a
registry can name torch code without importing it. A registry never guesses a name.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from backend_engine.errors import ConfigError
from backend_engine.plugins.foreign_code import call_foreign

T = TypeVar("T")
OURSELVES = "Inflight itself"


class Held(NamedTuple):
    """What a registry holds. base: ``"module:attribute"`` of a class, ``None`` = anything that can be called. Entries
    are concrete subclasses of it, or with ``instances`` instances.
    """

    words: str
    base: str | None = None
    instances: bool = False

    def problem(self, value: object) -> str | None:
        """What is wrong with ``value`` as an entry, ``None`` when it is one."""
        if self.base is None:
            return None if callable(value) else f"is {_what(value)}; it must be {self.words}"
        base = import_named(self.base)
        if self.instances:
            return None if isinstance(value, base) else f"is {_what(value)}; it must be {self.words}"
        if not isinstance(value, type) or not issubclass(value, base):
            return f"is {_what(value)}; it must be {self.words}"
        missing = sorted(getattr(value, "__abstractmethods__", ())) if inspect.isabstract(value) else []
        return f"is {_what(value)} without {', '.join(missing)}; it must be {self.words}" if missing else None


class Registry(Generic[T]):
    """Name to implementation. ``kind`` is the word used in error messages; ``held`` says what an entry is."""

    def __init__(self, kind: str, entries: dict[str, T | str] | None = None, held: Held | None = None) -> None:
        self.kind = kind
        self._held = held or Held("something that can be called")
        self._entries: dict[str, T | str] = dict(entries or {})
        self._owners: dict[str, str] = {}
        self._imported: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an entry and returns it unchanged. A name taken already is a ``ConfigError``."""

        def add(value: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = value
            return value

        return add

    def check_free(self, name: str, owner: str) -> None:
        """Raise ``ConfigError`` for a name that is taken; it says whose it is."""
        if name in self._entries:
            raise ConfigError(f"{owner}: {self.kind} {name!r} belongs to {self.owner_of(name)} already; choose another")

    def add(self, name: str, value: Any, owner: str) -> None:
        """Add an entry of a plugin under a name that is free."""
        self.check_free(name, owner)
        self._entries[name] = value
        self._owners[name] = owner

    def owner_of(self, name: str) -> str:
        """Whose an entry is: a plugin as it is named in messages, or ourselves."""
        return self._owners.get(name, OURSELVES)

    def checked(self, name: str, value: Any, owner: str) -> Any:
        """``value`` itself, or what a lazy one names. ``ConfigError`` when that cannot be imported or is no entry."""
        what = f"{self.kind} {name!r}"
        found = value
        if isinstance(value, str):
            found = call_foreign(owner, f"{what} ({value}) cannot be imported", lambda: import_named(value))
        problem = self._held.problem(found)
        if problem is not None:
            raise ConfigError(f"{owner}: {what} {problem}")
        return found

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
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names()) or 'none'}{hint}")
        value = self._entries[name]
        if not isinstance(value, str):
            return value
        if name not in self._imported:
            self._imported[name] = import_named(value)
        return self._imported[name]

    def module_of(self, name: str) -> str | None:
        """Name of the module that a lazy entry lies in; ``None`` for one that was registered as an object."""
        value = self._entries.get(name)
        return value.partition(":")[0] if isinstance(value, str) else None


def import_named(name: str) -> Any:
    """What ``"module:attribute"`` names. Raises ``ValueError`` for another form, and what importing raises."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{name!r} is not of the form module:attribute")
    return getattr(importlib.import_module(module), attribute)


def _what(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    return f"of type {type(value).__name__}"
