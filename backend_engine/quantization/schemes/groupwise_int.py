"""``GroupwiseInt``: unsigned integers of 4 or 8 bits, a scale and perhaps a zero point for each group of columns.

What GPTQ (Frantar et al., 2022), AWQ (Lin et al., 2023), most of GGUF's types and weight-only int8 come to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.ops.packed_products import Codes, PackedWeight, multiply_packed, packed_products
from backend_engine.quantization.schemes.grouped import (
    check_borders,
    cut_groups,
    num_groups,
    per_column,
    scale_groups,
    unpack_nibbles,
)
from backend_engine.quantization.weight_scheme import Component, WeightScheme

ZEROS = ("midpoint", "codes", "offsets")
_ZERO_COMPONENTS: dict[str, tuple[str, ...]] = {"midpoint": (), "codes": ("zeros",), "offsets": ("offsets",)}


@dataclass(frozen=True)
class GroupwiseInt(WeightScheme):
    """bits: 4 (two codes a byte, the first in the lower half) or 8. group_size: columns that share a scale, ``None`` =
    the row. scale_dtype: of ``scales``. zero: a weight is ``(code - z) * scale`` with z ``2 ** (bits - 1)``
    (``midpoint``) or the group's own integer (``codes``), or ``code * scale + offset`` (``offsets``, float32).
    """

    bits: int
    group_size: int | None
    zero: str = "midpoint"
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.zero in ZEROS, self

    def components(self, in_features: int) -> dict[str, Component]:
        groups = num_groups(in_features, self.group_size)
        found = {
            "codes": Component((in_features // 2 if self.bits == 4 else in_features,), torch.uint8),
            "scales": Component((groups,), self.scale_dtype),
        }
        if self.zero == "codes":
            found["zeros"] = Component((groups,), torch.uint8)
        elif self.zero == "offsets":
            found["offsets"] = Component((groups,), torch.float32)
        return found

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        codes = unpack_nibbles(tensors["codes"]) if self.bits == 4 else tensors["codes"]
        values = codes.to(torch.float32)
        if self.zero == "midpoint":
            values -= 1 << (self.bits - 1)
        elif self.zero == "codes":
            values -= per_column(tensors["zeros"].to(torch.float32), self.group_size, values.shape[-1])
        values = scale_groups(values, tensors["scales"].to(torch.float32), self.group_size)
        if self.zero == "offsets":
            values += per_column(tensors["offsets"], self.group_size, values.shape[-1])
        return values

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return tensors["codes"].shape[-1] * (8 // self.bits)

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        check_borders(start, stop, self.num_columns(tensors), self.group_size or 1, "group")
        check_borders(start, stop, self.num_columns(tensors), 8 // self.bits, "byte")
        codes = tensors["codes"][..., start * self.bits // 8 : stop * self.bits // 8]
        by_group = ("scales", *_ZERO_COMPONENTS[self.zero])
        return {"codes": codes, **cut_groups(tensors, start, stop, self.group_size, by_group)}

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if tensors["codes"].device.type == "cpu":
            packed_products()  # compiled now rather than in a request
        return dict(tensors)

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        kind, midpoint = (Codes.INT4, 8.0) if self.bits == 4 else (Codes.INT8, 128.0)
        if self.zero == "offsets":
            midpoint = 0.0
        weight = PackedWeight(
            kind, tensors["codes"], tensors["scales"], self.group_size, midpoint,
            zeros=tensors.get("zeros"), offsets=tensors.get("offsets"),
        )  # fmt: skip
        product = multiply_packed(weight, x)
        return super().multiply(tensors, x) if product is None else product
