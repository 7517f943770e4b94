"""What a checkpoint does to a layer's input before the product: another order of columns, factors, rounding.

Each wraps the scheme of the weight, so that every form of weight can have every treatment of its input. None of it
looks at more than one token at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.schemes.grouped import check_borders
from backend_engine.quantization.schemes.rounding import KINDS, round_tokens, round_tokens_between
from backend_engine.quantization.weight_scheme import Component, WeightScheme


@dataclass(frozen=True)
class ReorderedInput(WeightScheme):
    """Column j of the stored weight belongs to column ``order[j]`` of the input (act-order of GPTQ)."""

    weight: WeightScheme

    def components(self, in_features: int) -> dict[str, Component]:
        order = Component((in_features,), torch.int64, per_row=False)
        return {**self.weight.components(in_features), "order": order}

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        stored = self.weight.decode(tensors)
        return torch.empty_like(stored).index_copy_(-1, tensors["order"], stored)

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return tensors["order"].shape[0]

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        order = tensors["order"][start:stop] - start
        if not torch.equal(order.sort().values, torch.arange(stop - start, device=order.device)):
            raise ValueError(f"the order of columns moves some across the borders of columns {start} to {stop}")
        return {**self.weight.columns(tensors, start, stop), "order": order}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**self.weight.prepare(tensors), "order": tensors["order"]}

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.weight.multiply(tensors, x.index_select(1, tensors["order"]))


@dataclass(frozen=True)
class FactoredInput(WeightScheme):
    """The input's columns are multiplied by ``factors`` first (SmoothQuant, Xiao et al., 2022; AWQ's pre-scales)."""

    weight: WeightScheme

    def components(self, in_features: int) -> dict[str, Component]:
        factors = Component((in_features,), torch.float32, per_row=False)
        return {**self.weight.components(in_features), "factors": factors}

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.weight.decode(tensors) * tensors["factors"]

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return tensors["factors"].shape[0]

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        return {**self.weight.columns(tensors, start, stop), "factors": tensors["factors"][start:stop]}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**self.weight.prepare(tensors), "factors": tensors["factors"]}

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.weight.multiply(tensors, x * tensors["factors"].to(x.dtype))


@dataclass(frozen=True)
class RoundedInput(WeightScheme):
    """Every token is rounded to ``kind``, a key of ``rounding.KINDS``, and back before the product. is_static: with the
    checkpoint's ``input_scale`` (and, where it is not symmetric, the integer ``input_zero`` that stands for 0),
    otherwise with a scale of the token's own, or one for each ``group_size`` columns.
    """

    weight: WeightScheme
    kind: str
    is_static: bool
    group_size: int | None = None
    is_symmetric: bool = True

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self
        assert self.group_size is None or self.is_symmetric, self
        assert self.is_static or self.kind != "nvfp4", self

    def components(self, in_features: int) -> dict[str, Component]:
        number = Component((1,), torch.float32, per_row=False)
        return {**self.weight.components(in_features), **dict.fromkeys(self._own_names(), number)}

    def _own_names(self) -> tuple[str, ...]:
        names = ("input_scale", "input_zero") if self.is_static else ()
        return names[:1] if self.is_symmetric else names

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.weight.decode(tensors)

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return self.weight.num_columns(tensors)

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        num_columns = self.num_columns(tensors)
        # NVFP4 has scales of the token's own even where the checkpoint brings a number.
        has_own_scales = not self.is_static or KINDS[self.kind].scales == "e4m3"
        if has_own_scales and self.group_size is not None:
            check_borders(start, stop, num_columns, self.group_size, "group of the input")
        elif has_own_scales and stop - start < num_columns:
            raise ValueError(f"a token's scale is that of all {num_columns} columns, not of columns {start} to {stop}")
        own = {name: tensors[name] for name in self._own_names()}
        return {**self.weight.columns(tensors, start, stop), **own}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**self.weight.prepare(tensors), **{name: tensors[name] for name in self._own_names()}}

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if self.is_static or self.is_symmetric:
            scale, zero = tensors.get("input_scale"), tensors.get("input_zero")
            rounded = round_tokens(x, self.kind, scale, zero, self.group_size)
        else:
            rounded = round_tokens_between(x, self.kind)
        return self.weight.multiply(tensors, rounded)
