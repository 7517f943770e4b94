"""``NameExpression``: a regular expression of a checkpoint, matched in time that grows with the name's length alone.

Python's ``re`` tries one way after another, which for some expressions takes longer than anybody waits. Those whose
number of ways is small are left to it; others become a set of states that are followed all at once (Thompson, 1968),
each step remembered. Knows no format.
"""

import math
import re
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_CHARS = 1000
"""Of an expression."""
MAX_NAME_CHARS = 500
"""Of what is matched; tensors have no longer names."""
_MAX_WAYS = 300_000
_MAX_STATES = 2000
_MAX_STEPS = 10_000
_FLAGS = int(re.DOTALL | re.IGNORECASE)
_SINGLE = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_ENDS = (codes.AT_END, codes.AT_END_STRING)
_STARTS = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)


class NameExpression:
    """Raises ``ValueError`` for what is no regular expression, or one that cannot be matched in bounded time."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise ValueError(f"an expression of {len(text)} characters")
        try:
            self._compiled = re.compile(text)
            parsed = parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"no regular expression: {error}") from None
        self._states = None if _ways(parsed) <= _MAX_WAYS else _States(parsed, self._compiled.flags)

    def match(self, name: str) -> bool:
        """Whether the expression is that of the beginning of ``name``."""
        if len(name) > MAX_NAME_CHARS:
            return False
        if self._states is None:
            return self._compiled.match(name) is not None
        return self._states.match(name)


def _ways(parsed: Any) -> float:
    """An upper bound of the ways in which ``re`` may try the expression."""
    ways = 1.0
    for code, argument in parsed:
        ways *= _ways_of(code, argument)
    return ways


def _ways_of(code: Any, argument: Any) -> float:
    if code in _SINGLE or code is codes.AT:
        return 1
    if code is codes.SUBPATTERN:
        return _ways(argument[3])
    if code is codes.BRANCH:
        return sum(_ways(branch) for branch in argument[1])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return _ways(argument[1])
    if code in _REPEATS:
        least, most, inner = argument
        most = min(int(most), MAX_NAME_CHARS)
        # Each time that it is repeated may end it, or go on in any of its ways.
        times: int = max(1, most - min(least, most) + 1)
        ways = _ways(inner)
        is_single = len(inner) == 1 and inner[0][0] in _SINGLE
        if ways == 1 and (is_single or most <= 1):
            return times
        # Any part of the name may be what it takes each time.
        exponent = most * math.log(2 * ways)
        return math.e**exponent if exponent < math.log(_MAX_WAYS) + 1 else math.inf
    return math.inf


class _Look:
    """What must follow a place or come before it, or must not. width: of what comes before, ``None``: it follows."""

    def __init__(self, states: "_States", width: int | None, is_negative: bool) -> None:
        self._states = states
        self._width = width
        self._is_negative = is_negative

    def is_open(self, name: str, at: int) -> bool:
        """Whether the place behind ``at`` characters is one."""
        if self._width is None:
            return self._states.match(name[at:], at) != self._is_negative
        has_room = self._width <= at
        return (has_room and self._states.match(name[at - self._width : at], 1)) != self._is_negative


class _States:
    """States are numbers. ``_moves``: from one by a character of a kind to another; ``_jumps``: without one."""

    def __init__(self, parsed: Any, flags: int) -> None:
        self._flags = flags
        self._kinds: dict[tuple[int, str, int], re.Pattern[str]] = {}
        self._moves: dict[int, tuple[re.Pattern[str], int]] = {}
        self._jumps: list[list[tuple[Any, int]]] = [[]]
        self._has_looks = False
        self._final = self._add(parsed, 0)
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def match(self, name: str, place: int = 0) -> bool:
        """Whether ``name``, what is left of one behind ``place`` characters, begins like that."""
        current = self._closure({0}, name, 0, place)
        for at, character in enumerate(name, start=1):
            if self._final in current or not current:
                break
            key = (current, character if at < len(name) else character + "$")
            known = self._steps.get(key)
            if known is None:
                moves = (self._moves[state] for state in current if state in self._moves)
                known = self._closure({end for kind, end in moves if kind.match(character)}, name, at, place)
                # What looks around depends on more than the character.
                if not self._has_looks:
                    if len(self._steps) > _MAX_STEPS:
                        self._steps.clear()
                    self._steps[key] = known
            current = known
        return self._final in current

    def _closure(self, states: set[int], name: str, at: int, place: int) -> frozenset[int]:
        """The states with all that need no character to be reached."""
        found, todo = set(states), list(states)
        while todo:
            for condition, state in self._jumps[todo.pop()]:
                if state not in found and self._is_open(condition, name, at, place):
                    found.add(state)
                    todo.append(state)
        return frozenset(found)

    def _is_open(self, condition: Any, name: str, at: int, place: int) -> bool:
        if isinstance(condition, _Look):
            return condition.is_open(name, at)
        is_start, is_end = at + place == 0, at == len(name)
        return condition is None or (condition in _ENDS and is_end) or (condition in _STARTS and is_start)

    def _new(self) -> int:
        if len(self._jumps) >= _MAX_STATES:
            raise ValueError("an expression with large numbers of repeats")
        self._jumps.append([])
        return len(self._jumps) - 1

    def _jump(self, start: int, end: int, place: Any = None) -> None:
        self._jumps[start].append((place, end))

    def _add(self, parsed: Any, start: int) -> int:
        """States for the expression behind ``start``; returns the one that it ends in."""
        for code, argument in parsed:
            start = self._add_one(code, argument, start)
        return start

    def _add_one(self, code: Any, argument: Any, start: int) -> int:
        if code in _SINGLE:
            end = self._new()
            kind = (int(code), repr(argument), self._flags)
            if kind not in self._kinds:
                self._kinds[kind] = _character(code, argument, self._flags)
            self._moves[start] = (self._kinds[kind], end)
            return end
        if code is codes.AT and argument in (*_ENDS, *_STARTS):
            end = self._new()
            self._jump(start, end, argument)
            return end
        if code is codes.SUBPATTERN and not argument[1] & ~_FLAGS and not argument[2]:
            flags, self._flags = self._flags, self._flags | argument[1]
            end = self._add(argument[3], start)
            self._flags = flags
            return end
        if code is codes.BRANCH:
            end = self._new()
            for branch in argument[1]:
                first = self._new()
                self._jump(start, first)
                self._jump(self._add(branch, first), end)
            return end
        if code in _REPEATS:
            return self._repeat(argument, start)
        if code in (codes.ASSERT, codes.ASSERT_NOT):
            return self._look(code is codes.ASSERT_NOT, argument, start)
        raise ValueError(f"an expression that cannot be matched in bounded time ({str(code).lower()})")

    def _look(self, is_negative: bool, argument: Any, start: int) -> int:
        direction, inner = argument
        least, most = inner.getwidth()
        if direction < 0 and any(code is codes.AT for code, _ in inner):
            raise ValueError("an expression that looks back for an end")
        assert direction > 0 or least == most, (least, most)
        self._has_looks = True
        end = self._new()
        self._jump(start, end, _Look(_States(inner, self._flags), None if direction > 0 else most, is_negative))
        return end

    def _repeat(self, argument: Any, start: int) -> int:
        least, most, inner = argument
        for _ in range(least):
            start = self._add(inner, start)
        end = self._new()
        if most is codes.MAXREPEAT:
            loop = self._new()
            self._jump(start, loop)
            self._jump(loop, end)
            first = self._new()
            self._jump(loop, first)
            self._jump(self._add(inner, first), loop)
            return end
        for _ in range(int(most) - least):
            self._jump(start, end)
            first = self._new()
            self._jump(start, first)
            start = self._add(inner, first)
        self._jump(start, end)
        return end


def _character(code: Any, argument: Any, flags: int) -> re.Pattern[str]:
    """An expression for the one character."""
    pattern = parser.SubPattern(parser.State(), [(code, argument)])
    pattern.state.flags, pattern.state.str = flags, ""
    compiled: re.Pattern[str] = compiler.compile(pattern, flags)
    return compiled
