"""``Float8``: weights as eight-bit floats with a scale for each row or group of columns (Micikevicius et al., 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.ops.packed_products import Codes, PackedWeight, multiply_packed, packed_products
from backend_engine.quantization.schemes.grouped import check_borders, cut_groups, num_groups, scale_groups
from backend_engine.quantization.weight_scheme import Component, WeightScheme

FLOAT8_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""By the name that safetensors has for them."""


@dataclass(frozen=True)
class Float8(WeightScheme):
    """dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``. group_size: columns that share a scale (float32),
    ``None`` = the row. A scale for a whole tensor is repeated for its rows, one for a block of rows and columns too.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    group_size: int | None = None

    def components(self, in_features: int) -> dict[str, Component]:
        groups = num_groups(in_features, self.group_size)
        return {"codes": Component((in_features,), self.dtype), "scales": Component((groups,), torch.float32)}

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return scale_groups(tensors["codes"].to(torch.float32), tensors["scales"], self.group_size)

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return tensors["codes"].shape[-1]

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        check_borders(start, stop, self.num_columns(tensors), self.group_size or 1, "group")
        codes = tensors["codes"][..., start:stop]
        return {"codes": codes, **cut_groups(tensors, start, stop, self.group_size, ("scales",))}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if tensors["codes"].device.type == "cpu":
            packed_products()  # compiled now rather than in a request
        return dict(tensors)

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        kind = Codes.E4M3 if self.dtype == torch.float8_e4m3fn else Codes.E5M2
        product = multiply_packed(PackedWeight(kind, tensors["codes"], tensors["scales"], self.group_size), x)
        return super().multiply(tensors, x) if product is None else product
