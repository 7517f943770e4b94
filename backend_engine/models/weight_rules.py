"""Weight rules: which checkpoint tensors fill which parameters. Data of the model families.

``{i}``-like placeholders stand for one name segment and are the same on both sides of a rule. ``plan`` turns
rules and parameters into copies for ``checkpoint/loader.py``; nothing here reads a file or a tensor's values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LoadTarget(NamedTuple):
    """A parameter to fill: the tensor, and the rows (dimension 0) of the parts it is fused from."""

    tensor: Tensor
    part_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Rename:
    """``parameter`` is the checkpoint's ``source``."""

    source: str
    parameter: str


@dataclass(frozen=True)
class Transpose:
    """``parameter`` is the checkpoint's two-dimensional ``source`` with rows and columns swapped."""

    source: str
    parameter: str


@dataclass(frozen=True)
class Fuse:
    """``parameter`` is the ``sources`` one below the other."""

    sources: tuple[str, ...]
    parameter: str


@dataclass(frozen=True)
class Split:
    """The ``parameters``, one below the other, are the checkpoint's ``source``."""

    source: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Tie:
    """``parameter``, where the model has it, is the checkpoint's ``source``. Where it shares the tensor of
    ``shared_with``, the checkpoint may leave ``source`` out; if present it must hold the same values.
    """

    source: str
    parameter: str
    shared_with: str


@dataclass(frozen=True)
class Ignore:
    """Checkpoint tensors that carry nothing the model needs."""

    source: str


Rule = Rename | Transpose | Fuse | Split | Tie | Ignore


class Copy(NamedTuple):
    """One copy: ``shape`` is what the source has to have, ``source_start`` the first row of it that is taken
    (of the transposed source with ``is_transposed``), ``start`` and ``rows`` where it goes in the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    source_start: int
    start: int
    rows: int
    is_transposed: bool = False


class Plan(NamedTuple):
    """``copies`` by checkpoint tensor, all of which must exist. ``duplicates``: tensors that may exist and must
    then equal the named parameter. ``ignored``: patterns of tensors that may exist.
    """

    copies: dict[str, list[Copy]]
    duplicates: dict[str, str]
    ignored: tuple[re.Pattern[str], ...]


def plan(rules: Sequence[Rule], targets: Mapping[str, LoadTarget]) -> Plan:
    """Find the sources of every target. A target without a rule is a mistake of the family, hence an assertion."""
    result = Plan({}, {}, tuple(_pattern(rule.source) for rule in rules if isinstance(rule, Ignore)))
    for parameter in targets:
        matches = (_expand(rule, parameter, targets) for rule in rules)
        found = next((match for match in matches if match), None)
        assert found is not None, f"no weight rule fills parameter {parameter}"
        for source, copy in found:
            result.copies.setdefault(source, []).append(copy)
    for rule in rules:
        if isinstance(rule, Tie) and rule.parameter not in targets:
            result.duplicates[rule.source] = rule.shared_with
    return result


def _pattern(template: str) -> re.Pattern[str]:
    """Regular expression for a template; a placeholder matches one segment."""
    pieces = re.split(r"\{(\w+)\}", template)
    text = "".join(re.escape(piece) if i % 2 == 0 else f"(?P<{piece}>[^.]+)" for i, piece in enumerate(pieces))
    return re.compile(text)


def _expand(rule: Rule, parameter: str, targets: Mapping[str, LoadTarget]) -> list[tuple[str, Copy]]:
    """The copies by which ``rule`` fills ``parameter``; empty when it is not about it."""
    if isinstance(rule, Ignore):
        return []
    templates = rule.parameters if isinstance(rule, Split) else (rule.parameter,)
    found = ((i, _pattern(template).fullmatch(parameter)) for i, template in enumerate(templates))
    index, match = next(((i, match) for i, match in found if match), (0, None))
    if match is None:
        return []
    names = match.groupdict()
    target = targets[parameter]
    rows, *rest = target.tensor.shape
    if isinstance(rule, Fuse):
        assert len(rule.sources) == len(target.part_sizes), (rule, target.part_sizes)
        copies, start = [], 0
        for source, size in zip(rule.sources, target.part_sizes, strict=True):
            copies.append((source.format(**names), Copy(parameter, (size, *rest), 0, start, size)))
            start += size
        return copies
    source = rule.source.format(**names)
    if isinstance(rule, Split):
        sizes = [targets[name.format(**names)].tensor.shape[0] for name in rule.parameters]
        return [(source, Copy(parameter, (sum(sizes), *rest), sum(sizes[:index]), 0, rows))]
    is_transposed = isinstance(rule, Transpose)
    shape = (*rest, rows) if is_transposed else (rows, *rest)
    return [(source, Copy(parameter, shape, 0, 0, rows, is_transposed))]
