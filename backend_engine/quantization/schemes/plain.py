"""``Plain``: floating point weights as they are; for parts of a fused layer whose other parts are packed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.quantization.weight_scheme import Component, WeightScheme


@dataclass(frozen=True)
class Plain(WeightScheme):
    """dtype: of the weight."""

    dtype: torch.dtype

    def components(self, in_features: int) -> dict[str, Component]:
        return {"weight": Component((in_features,), self.dtype)}

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].to(torch.float32)

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return tensors["weight"].shape[-1]

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        return {"weight": tensors["weight"][..., start:stop]}

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, tensors["weight"].to(x.dtype))
