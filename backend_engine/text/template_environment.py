"""The jinja2 sandbox that chat templates run in: what they may call, and how much they may do.

The filters and functions are those that chat templates on Hugging Face count on. Used by ``chat_template`` alone. A
template reaches plain data only, and a render that would run or grow without end is stopped by a budget.
"""

import contextlib
import contextvars
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_LOOP_STEPS = 1_000_000  # of ``range`` loops, in one render
MAX_REPEATED_ITEMS = 1_000_000  # of ``'x' * n`` and ``[0] * n``
MAX_EXPONENT = 64

_steps_left: contextvars.ContextVar[int] = contextvars.ContextVar("steps_left")


class BudgetError(jinja2.TemplateRuntimeError):
    """A template wants to do too much."""


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names that lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # ``self`` is not named, so that a template may store that name.
        self, *initial = args
        values = dict(*initial, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's part for training: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One sandbox. Thread-safe: each render brings its own ``budget``."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _to_json
        self.globals.clear()
        self.globals |= {
            "range": _range,
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make something huge out of little."""
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    _check_size("a repetition", len(items) * times, MAX_REPEATED_ITEMS)
        elif operator == "**" and isinstance(right, int | float):
            _check_size("an exponent", right, MAX_EXPONENT)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    @contextlib.contextmanager
    def budget() -> Iterator[None]:
        """What is rendered inside may take ``MAX_LOOP_STEPS`` steps of ``range`` loops."""
        token = _steps_left.set(MAX_LOOP_STEPS)
        try:
            yield
        finally:
            _steps_left.reset(token)


def _range(*bounds: int) -> range:
    steps = range(*bounds)
    _check_size("range loops", len(steps), _steps_left.get())
    _steps_left.set(_steps_left.get() - len(steps))
    return steps


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: nothing escaped for HTML, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_size(what: str, size: float, allowed: int) -> None:
    if size > allowed:
        raise BudgetError(f"{what} of {size} is more than the {allowed} allowed")


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold the name {name!r}")
