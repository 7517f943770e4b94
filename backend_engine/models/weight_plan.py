"""``plan``: a family's weight rules, applied to a model's parameters and a checkpoint's names.

Turns them into copies for ``checkpoint/loader.py``; reads no file and no tensor's values.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from backend_engine.models.weight_rules import Copy, FillRule, IgnoreRule, LoadTarget, Rule, Tie, pattern


class Plan(NamedTuple):
    """``copies`` by their checkpoint tensor. ``duplicates``: tensors that may exist and must then equal
    the named parameter. ``ignored``: patterns of tensors that may exist.
    """

    copies: dict[str, list[Copy]]
    duplicates: dict[str, str]
    ignored: tuple[re.Pattern[str], ...]


def plan(rules: Sequence[Rule], targets: Mapping[str, LoadTarget], stored: Collection[str]) -> Plan:
    """Find the sources of every target among the ``stored`` names.

    Where no rule finds all of its tensors, one that is about the target is taken, for the loader to tell what is
    missing. A target without a rule is a mistake of the family, hence an assertion.
    """
    ignored = [found for rule in rules if isinstance(rule, IgnoreRule) for found in rule.ignored(stored)]
    result = Plan({}, {}, tuple(ignored))
    fills = [rule for rule in rules if isinstance(rule, FillRule)]
    patterns = [(pattern(template), rule) for rule in fills for template in rule.templates]
    is_incomplete = False
    for parameter in targets:
        matches = ((rule, template.fullmatch(parameter)) for template, rule in patterns)
        candidates = [rule.copies(parameter, match.groupdict(), targets) for rule, match in matches if match]
        assert candidates, f"no weight rule fills parameter {parameter}"
        complete = (found for found in candidates if all(copy.source.name in stored for copy in found))
        chosen = next(complete, None)
        if chosen is None:
            # The first missing tensor is the one that is told: in the spelling that this checkpoint has.
            chosen = candidates[0] if is_incomplete else max(candidates, key=lambda found: _likeness(found, stored))
            is_incomplete = True
        for copy in chosen:
            result.copies.setdefault(copy.source.name, []).append(copy)
    for rule in rules:
        if isinstance(rule, Tie) and rule.parameter not in targets:
            result.duplicates[rule.source] = rule.shared_with
    return result


def _likeness(copies: list[Copy], stored: Collection[str]) -> int:
    """How many characters the name of the first source shares with the beginning of one that is stored."""
    name = copies[0].source.name
    pairs = (zip(name, other, strict=False) for other in stored)
    return max((sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], pair)) for pair in pairs), default=0)
