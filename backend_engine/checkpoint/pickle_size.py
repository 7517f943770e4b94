"""``HashableSizes``: whether the tuples of a pickle are of a size that they can be hashed, before any is made.

Used by ``torch_pickle.py``. A pickle refers to what it has made already, hence a few hundred bytes can name a tuple
that holds itself 2 ** 100 times over, which takes for ever to be hashed; one that is nested a million deep breaks the
interpreter's stack. Walks the codes, makes nothing. Lists and dicts are not hashed and count as one value.
"""

import pickletools
from typing import NamedTuple

MAX_VALUES = 4096
"""Of a tuple with all tuples in it; the state of Python's random numbers has 628."""
MAX_DEPTH = 100
"""Of tuples in tuples; what torch writes has some five."""

_NOTES = {"PUT", "BINPUT", "LONG_BINPUT"}
_RECALLS = {"GET", "BINGET", "LONG_BINGET"}
# Codes that add what lies above the mark, or so many values, to the value below.
_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS"}
_ADDERS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_UNHASHABLE = {"LIST", "DICT"}


class _Size(NamedTuple):
    """Of a value: the values that are hashed with it, counted every time they occur, and how deep they lie."""

    num_values: int
    depth: int


_ONE = _Size(1, 0)


class HashableSizes:
    """One walk through a pickle, code by code."""

    def __init__(self) -> None:
        self._stack: list[_Size | None] = []  # ``None``: a mark
        self._notes: dict[int, _Size] = {}

    def step(self, code: pickletools.OpcodeInfo, argument: object) -> None:
        """Raises ``ValueError`` (a phrase) for a tuple that is too large, ``LookupError`` for codes that do not fit."""
        name = code.name
        if name in _NOTES or name == "MEMOIZE":
            self._notes[len(self._notes) if name == "MEMOIZE" else int(str(argument))] = self._top()
        elif name in _RECALLS:
            self._stack.append(self._notes[int(str(argument))])
        elif name in _TO_MARK:
            self._take_to_mark()
            self._top()
        elif name in _ADDERS:
            for _ in range(_ADDERS[name]):
                self._take()
            self._top()
        elif name == "DUP":
            self._stack.append(self._top())
        elif name == "POP":
            self._stack.pop()
        elif name == "POP_MARK":
            self._take_to_mark()
        else:
            self._make(code)

    def _make(self, code: pickletools.OpcodeInfo) -> None:
        """A code that takes values off the stack and puts what it makes of them there."""
        taken: list[_Size] = []
        if any(item is pickletools.markobject for item in code.stack_before):
            taken = self._take_to_mark()
        else:
            taken = [self._take() for _ in code.stack_before]
        for item in code.stack_after:
            is_mark, is_one = item is pickletools.markobject, code.name in _UNHASHABLE
            self._stack.append(None if is_mark else _ONE if is_one else self._joined(taken))

    def _joined(self, parts: list[_Size]) -> _Size:
        if not parts:
            return _ONE
        size = _Size(1 + sum(part.num_values for part in parts), 1 + max(part.depth for part in parts))
        if size.num_values > MAX_VALUES:
            raise ValueError(f"a tuple of more than {MAX_VALUES} values")
        if size.depth > MAX_DEPTH:
            raise ValueError(f"tuples nested more than {MAX_DEPTH} deep")
        return size

    def _top(self) -> _Size:
        top = self._stack[-1]
        if top is None:
            raise LookupError("a mark in place of a value")
        return top

    def _take(self) -> _Size:
        top = self._top()
        self._stack.pop()
        return top

    def _take_to_mark(self) -> list[_Size]:
        taken = []
        while self._stack[-1] is not None:
            taken.append(self._take())
        self._stack.pop()
        return taken
