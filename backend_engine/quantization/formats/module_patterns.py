"""``ModulePatterns``: the lists of modules in quantization configs that were left alone, or that a rule is for.

Read by the formats; they say what being on a list means. Knows no format and looks at no tensors.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from backend_engine.config.hf_config import HfConfig
from backend_engine.quantization.formats.name_expression import NameExpression

_REGULAR_EXPRESSION = "re:"
_MAX_EXPRESSIONS = 1000
_WILDCARDS = {"*": ".*", "?": "."}


@dataclass(frozen=True)
class ModulePatterns:
    """A pattern is a module's name or the end of one (``lm_head``, ``mlp.gate``), with ``*`` and ``?`` as a shell has
    them, and means whatever lies in that module too; or, behind ``re:``, a regular expression that is matched from the
    start of the name, as compressed-tensors has them.
    """

    patterns: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: HfConfig, key: str) -> "ModulePatterns":
        """What the config has under ``key``; without it, nothing. Raises ``ModelLoadError`` for anything but a list of
        names and proper regular expressions.
        """
        patterns = config.get(key)
        if patterns is None:
            return cls()
        allowed = "a list of names of modules, or of regular expressions behind 're:'"
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise config.refuse(key, allowed)
        found = cls(tuple(patterns))
        try:
            num_expressions = len(found._expressions)
        except ValueError as error:
            raise config.refuse(key, f"{allowed} ({error})") from None
        if num_expressions > _MAX_EXPRESSIONS:
            raise config.refuse(key, f"at most {_MAX_EXPRESSIONS} patterns that are no names as they are")
        return found

    def __contains__(self, module: str) -> bool:
        """Whether a pattern is for ``module``, a name with dots (``model.layers.0.mlp.down_proj``)."""
        if any(literal in module and expression.match(module) for literal, expression in self._expressions):
            return True
        parts = module.split(".")
        starts = range(len(parts)) if self._names else ()
        return any(name in self._names for start in starts for name in accumulate(parts[start:], "{}.{}".format))

    @cached_property
    def _names(self) -> frozenset[str]:
        """The patterns that are names as they are: lists of thousands are looked up for thousands of modules."""
        return frozenset(pattern for pattern in self.patterns if _is_name(pattern))

    @cached_property
    def _expressions(self) -> tuple[tuple[str, NameExpression], ...]:
        """All others, and what has to be in a name for them: most names are told apart by that."""
        others = [pattern for pattern in self.patterns if not _is_name(pattern)]
        return tuple((_literal(pattern), NameExpression(_expression(pattern))) for pattern in dict.fromkeys(others))


def _is_name(pattern: str) -> bool:
    return not pattern.startswith(_REGULAR_EXPRESSION) and not any(sign in pattern for sign in _WILDCARDS)


def _literal(pattern: str) -> str:
    """What comes before the first wildcard; nothing for a regular expression."""
    return "" if pattern.startswith(_REGULAR_EXPRESSION) else re.split(r"[*?]", pattern)[0]


def _expression(pattern: str) -> str:
    """What is matched from the start of a module's name."""
    if pattern.startswith(_REGULAR_EXPRESSION):
        return pattern.removeprefix(_REGULAR_EXPRESSION)
    inner = "".join(_WILDCARDS.get(sign, re.escape(sign)) for sign in pattern)
    return rf"(?s:.*\.)?(?s:{inner})(?:\.|\Z)"
