"""What a checkpoint does to a layer's input before the product: another order of columns, factors, rounding.

Each wraps the scheme of the weight, so that every form of weight can have every treatment of its input. None of it
looks at more than one token at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.weight_scheme import Component, WeightScheme

INT8_LARGEST = 127.0
FP8_LARGEST = 448.0


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

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**self.weight.prepare(tensors), "factors": tensors["factors"]}

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.weight.multiply(tensors, x * tensors["factors"].to(x.dtype))


@dataclass(frozen=True)
class RoundedInput(WeightScheme):
    """Every token is rounded to ``kind``, ``int8`` or ``fp8`` (E4M3), and back before the product. is_static: with the
    checkpoint's ``input_scale``, otherwise with a scale of the token's own, from its largest number.
    """

    weight: WeightScheme
    kind: str
    is_static: bool

    def __post_init__(self) -> None:
        assert self.kind in ("int8", "fp8"), self

    def components(self, in_features: int) -> dict[str, Component]:
        found = self.weight.components(in_features)
        if self.is_static:
            found["input_scale"] = Component((1,), torch.float32, per_row=False)
        return found

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.weight.decode(tensors)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {"input_scale": tensors["input_scale"]} if self.is_static else {}
        return {**self.weight.prepare(tensors), **kept}

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.weight.multiply(tensors, round_tokens(x, self.kind, tensors.get("input_scale")))


def round_tokens(x: Tensor, kind: str, scale: Tensor | None) -> Tensor:
    """``x [num_tokens, size]`` rounded to ``kind`` and back, with one ``scale`` or, without it, one a token."""
    largest = INT8_LARGEST if kind == "int8" else FP8_LARGEST
    wide = x.to(torch.float32)
    if scale is None:
        scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    steps = wide / scale
    if kind == "int8":
        steps = steps.round_().clamp_(-INT8_LARGEST - 1, INT8_LARGEST)
    else:
        steps = steps.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).to(torch.float32)
    return (steps * scale).to(x.dtype)
