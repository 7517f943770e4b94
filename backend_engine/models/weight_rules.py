"""Weight rules: which checkpoint tensors fill which parameters. Data of the model families.

``{i}``-like placeholders stand for one name segment and are the same on both sides of a rule. Several rules may be
about one parameter: the first whose tensors the checkpoint has is taken, so that spellings live side by side.
``weight_plan.py`` applies them; nothing here reads a file.
"""

import bisect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from backend_engine.quantization.quant_method import WeightedLayer
from backend_engine.quantization.weight_format import FLOAT_DTYPES


class LoadTarget(NamedTuple):
    """A parameter to fill: the tensor, or the layer whose weight it is, which takes the form that the checkpoint has;
    and the rows (dimension 0) of the parts it is fused from, of which ``head_dim`` belong to one attention head.
    """

    tensor: Tensor | None
    part_sizes: tuple[int, ...]
    head_dim: int = 1
    layer: WeightedLayer | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        if self.layer is not None:
            return self.layer.weight_shape
        assert self.tensor is not None, "a target of nothing"
        return tuple(self.tensor.shape)


class Source(NamedTuple):
    """A checkpoint tensor, with the shape and the dtypes (as safetensors spells them) that it has to have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES


class Copy(NamedTuple):
    """``rows`` rows of ``parameter`` from ``start`` on are what ``pick`` takes out of the tensor ``source``.

    packed_shape: the weight's shape, ``[..., out_features, in_features]``, where the checkpoint packs it (packed
    weights are never stored transposed). pick_packed: takes the rows out of a component ``[..., out_features, n]``.
    """

    parameter: str
    source: Source
    start: int
    rows: int
    pick: Callable[[Tensor], Tensor]
    packed_shape: tuple[int, ...]
    pick_packed: Callable[[Tensor], Tensor]


class FillRule(ABC):
    """Says which checkpoint tensors fill some parameters."""

    @property
    @abstractmethod
    def templates(self) -> tuple[str, ...]:
        """The parameters it fills."""

    @abstractmethod
    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        """How it fills ``parameter``, which matched one of ``templates`` with these placeholders."""


class OneParameterRule(FillRule):
    """Says it of one kind of parameter, ``parameter``."""

    parameter: str

    @property
    def templates(self) -> tuple[str, ...]:
        return (self.parameter,)


class IgnoreRule(ABC):
    """Says which checkpoint tensors are not needed."""

    @abstractmethod
    def ignored(self, stored: Collection[str]) -> list[re.Pattern[str]]:
        """Patterns of tensors that may exist, given all that the checkpoint holds."""


Rule = FillRule | IgnoreRule


def pattern(template: str) -> re.Pattern[str]:
    """Regular expression for a template; a placeholder matches one segment."""
    pieces = re.split(r"\{(\w+)\}", template)
    text = "".join(re.escape(piece) if i % 2 == 0 else f"(?P<{piece}>[^.]+)" for i, piece in enumerate(pieces))
    return re.compile(text)


@dataclass(frozen=True)
class Rename(OneParameterRule):
    """``parameter`` is the checkpoint's ``source``."""

    source: str
    parameter: str

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        shape = targets[parameter].shape
        return [_copy(parameter, Source(self.source.format(**names), shape), 0, shape[0], _whole)]


@dataclass(frozen=True)
class Transpose(OneParameterRule):
    """``parameter`` is the checkpoint's two-dimensional ``source`` with rows and columns swapped."""

    source: str
    parameter: str

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        rows, columns = targets[parameter].shape
        source = Source(self.source.format(**names), (columns, rows))
        return [Copy(parameter, source, 0, rows, _transposed, (rows, columns), _whole)]


@dataclass(frozen=True)
class Fuse(OneParameterRule):
    """``parameter`` is the ``sources`` one below the other."""

    sources: tuple[str, ...]
    parameter: str

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        target = targets[parameter]
        assert len(self.sources) == len(target.part_sizes), (self, target.part_sizes)
        found, start = [], 0
        for source, size in zip(self.sources, target.part_sizes, strict=True):
            shape = (size, *target.shape[1:])
            found.append(_copy(parameter, Source(source.format(**names), shape), start, size, _whole))
            start += size
        return found


@dataclass(frozen=True)
class FuseInterleaved(OneParameterRule):
    """``source`` holds the parts of the fused ``parameter`` head by head: each head's rows of the first part, then its
    rows of the second, and so on. All parts have the same number of heads.
    """

    source: str
    parameter: str

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        target = targets[parameter]
        shape, num_parts = target.shape, len(target.part_sizes)
        assert len(set(target.part_sizes)) == 1, f"{parameter} has parts of different sizes: {target.part_sizes}"

        def by_part(source: Tensor) -> Tensor:
            heads = source.reshape(-1, num_parts, target.head_dim, *source.shape[1:])
            return heads.transpose(0, 1).reshape(source.shape)

        return [_copy(parameter, Source(self.source.format(**names), shape), 0, shape[0], by_part)]


@dataclass(frozen=True)
class Split(FillRule):
    """The ``parameters``, one below the other, are the checkpoint's ``source``."""

    source: str
    parameters: tuple[str, ...]

    @property
    def templates(self) -> tuple[str, ...]:
        return self.parameters

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        siblings = [name.format(**names) for name in self.parameters]
        sizes = [targets[name].shape[0] for name in siblings]
        first, rows = sum(sizes[: siblings.index(parameter)]), targets[parameter].shape[0]
        source = Source(self.source.format(**names), (sum(sizes), *targets[parameter].shape[1:]))
        return [_copy(parameter, source, 0, rows, lambda tensor: tensor[first : first + rows])]


@dataclass(frozen=True)
class Unstack(OneParameterRule):
    """``parameter``, one per expert ``{e}``, is entry ``e`` of the checkpoint's stacked ``source``.

    is_transposed: each entry has rows and columns swapped. is_interleaved: the rows of the fused parts alternate.
    """

    source: str
    parameter: str
    is_transposed: bool = False
    is_interleaved: bool = False

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        target, expert = targets[parameter], int(names["e"])
        shape, num_experts = target.shape, _num_experts(self.parameter, names, targets)
        stored = shape[::-1] if self.is_transposed else shape
        source = Source(self.source.format(**names), (num_experts, *stored))

        def pick_packed(stacked: Tensor) -> Tensor:
            entry = stacked[expert]
            return _by_part(entry, len(target.part_sizes)) if self.is_interleaved else entry

        def pick(stacked: Tensor) -> Tensor:
            return pick_packed(stacked.transpose(1, 2)) if self.is_transposed else pick_packed(stacked)

        return [Copy(parameter, source, 0, shape[0], pick, (num_experts, *shape), pick_packed)]


@dataclass(frozen=True)
class Tie(OneParameterRule):
    """``parameter``, where the model has it, is the checkpoint's ``source``. Where it shares the tensor of
    ``shared_with``, the checkpoint may leave ``source`` out; if present it must hold the same values.
    """

    source: str
    parameter: str
    shared_with: str

    def copies(self, parameter: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> list[Copy]:
        return Rename(self.source, self.parameter).copies(parameter, names, targets)


@dataclass(frozen=True)
class Ignore(IgnoreRule):
    """Checkpoint tensors that carry nothing the model needs."""

    source: str

    def ignored(self, stored: Collection[str]) -> list[re.Pattern[str]]:
        return [pattern(self.source)]


@dataclass(frozen=True)
class IgnoreUnder(IgnoreRule):
    """Checkpoint tensors whose names begin with ``prefix``: of a part of the checkpoint that is not this model."""

    prefix: str

    def ignored(self, stored: Collection[str]) -> list[re.Pattern[str]]:
        return [re.compile(re.escape(self.prefix) + ".*")]


@dataclass(frozen=True)
class IgnoreBeside(IgnoreRule):
    """Checkpoint tensors whose names begin with ``prefix``, where the checkpoint also holds ``marker``: a layer that is
    no part of the model.
    """

    prefix: str
    marker: str

    def ignored(self, stored: Collection[str]) -> list[re.Pattern[str]]:
        marked = (pattern(self.marker).fullmatch(name) for name in stored)
        prefixes = (self.prefix.format(**match.groupdict()) for match in marked if match)
        return [re.compile(re.escape(prefix) + ".*") for prefix in prefixes]


def _num_experts(template: str, names: Mapping[str, str], targets: Mapping[str, LoadTarget]) -> int:
    """How many experts share the stacked tensor that ``template`` with these placeholders comes from."""
    # They are numbered without gaps, so the first number that is missing can be searched for.
    every = range(len(targets) + 1)
    return bisect.bisect_left(every, True, key=lambda e: template.format(**{**names, "e": str(e)}) not in targets)


def _copy(parameter: str, source: Source, start: int, rows: int, pick: Callable[[Tensor], Tensor]) -> Copy:
    """A copy that takes the same rows out of a plain and a packed weight."""
    return Copy(parameter, source, start, rows, pick, source.shape, pick)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.T


def _by_part(rows: Tensor, num_parts: int) -> Tensor:
    """Rows of ``num_parts`` parts that alternate -> the parts one below the other."""
    return rows.reshape(-1, num_parts, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
