"""``ParameterReader``: typed access to the parameters of one model's config, by ``parameter_table``.

The readers of ``parameters.py`` use it. A value that is empty or still a ``${placeholder}`` counts as unset; problems
are collected and raised together.
"""

from collections.abc import Mapping
from typing import Any

from backend_engine.errors import ConfigError
from backend_engine.logger import get_logger
from backend_engine.triton_io.parameter_guard import MAX_EDITS, edit_distance
from backend_engine.triton_io.parameter_table import Parameter, Status, parameters_of

_log = get_logger(__name__)

_TRUE = frozenset({"true", "t", "1", "yes", "y"})
_FALSE = frozenset({"false", "f", "0", "no", "n"})


class ParameterReader:
    """Typed access to one model's parameters. Problems are collected; ``check`` raises them together."""

    def __init__(self, model: str, model_config: Mapping[str, Any]) -> None:
        self._model = model
        self._table = {parameter.key: parameter for parameter in parameters_of(model)}
        self._problems: list[str] = []
        self._values: dict[str, Any] = {}
        self._without_effect: list[str] = []
        for key, entry in (model_config.get("parameters") or {}).items():
            raw = str(entry.get("string_value", "") if isinstance(entry, Mapping) else entry)
            if raw.strip() and not raw.strip().startswith("${"):
                self._take(key, raw)
        if self._without_effect:
            _log.warning("%s: parameters without effect here: %s", model, " ".join(self._without_effect))

    def _take(self, key: str, raw: str) -> None:
        parameter = self._table.get(key)
        if parameter is None:
            near = min(self._table, key=lambda known: edit_distance(key, known))
            if edit_distance(key, near) <= MAX_EDITS:
                self._problems.append(f"unknown parameter {key!r}; did you mean {near!r}?")
            else:
                _log.warning("%s: unknown parameter %r is ignored", self._model, key)
            return
        if parameter.status is Status.NO_EFFECT:
            self._without_effect.append(f"{key}={raw}: {parameter.help}")
            return
        if parameter.status is Status.NOT_BUILT:
            if raw.strip().lower() not in parameter.neutral:
                self._problems.append(f"{_shown(parameter)} {raw!r} is not built yet: {parameter.help}")
            return
        try:
            self._values[key] = _convert(parameter, raw.strip() if parameter.kind != "path" else raw)
        except ValueError as error:
            self._problems.append(f"{_shown(parameter)} {raw!r} is not allowed; it must be {error}")

    def get(self, key: str, default: Any = None) -> Any:
        """The converted value, or ``default`` when unset."""
        assert key in self._table, f"{self._model} has no parameter {key}"
        return self._values.get(key, default)

    def require(self, key: str) -> str:
        """The value of a parameter that must be set; its absence is a problem for ``check``."""
        if key not in self._values and not any(key in problem for problem in self._problems):
            self.refuse(f"{_shown(self._table[key])} is not set")
        return str(self._values.get(key, ""))

    def refuse(self, problem: str) -> None:
        """Add a problem."""
        self._problems.append(problem)

    def check(self) -> None:
        """Raise ``ConfigError`` with every problem found, in one line."""
        if self._problems:
            raise ConfigError(f"{self._model}: {'; '.join(self._problems)}")


def _shown(parameter: Parameter) -> str:
    return (
        parameter.key if parameter.placeholder in ("", parameter.key) else f"{parameter.key} ({parameter.placeholder})"
    )


def _convert(parameter: Parameter, raw: str) -> Any:
    """The value of kind ``parameter.kind``; ``ValueError`` whose text says what is allowed."""
    kind = parameter.kind
    if isinstance(kind, tuple):
        if raw.lower() not in {word.lower() for word in kind}:
            raise ValueError(f"one of {', '.join(kind)}")
        return raw.lower()
    if kind == "bool":
        if raw.lower() not in _TRUE | _FALSE:
            raise ValueError("true or false")
        return raw.lower() in _TRUE
    if kind == "ids":
        return _id_lists(raw)
    if kind == "ints":
        one = parameter._replace(kind="int")
        try:
            return tuple(_number(one, part) for part in raw.split(","))
        except ValueError as error:
            raise ValueError(f"numbers separated by commas, each {error}") from None
    if kind in ("int", "float"):
        return _number(parameter, raw)
    return raw


def _number(parameter: Parameter, raw: str) -> int | float:
    allowed = f"a whole number{_bounds(parameter)}" if parameter.kind == "int" else f"a number{_bounds(parameter)}"
    try:
        value = int(raw) if parameter.kind == "int" else float(raw)
    except ValueError:
        raise ValueError(allowed) from None
    low, high = parameter.low, parameter.high
    if not ((low is None or value >= low) and (high is None or value <= high)):
        raise ValueError(allowed)
    return value


def _bounds(parameter: Parameter) -> str:
    if parameter.high is not None:
        return f" from {parameter.low:g} to {parameter.high:g}"
    return "" if parameter.low is None else f" of {parameter.low:g} or more"


def _id_lists(raw: str) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(int(number) for number in part.split(",")) for part in raw.split(";"))
    except ValueError:
        raise ValueError("lists of token ids such as 1,2,3;4,5") from None
