"""``Codebook4``: four-bit indices into sixteen values, with a scale for each group of columns.

NVFP4 and MXFP4 (E2M1 values; OCP Microscaling Formats, version 1.0, 2023), bitsandbytes' NF4 and FP4 (Dettmers et al.,
2023), IQ4_NL of GGUF.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.ops.packed_products import Codes, PackedWeight, multiply_packed, packed_products
from backend_engine.quantization.schemes.grouped import check_borders, cut_groups, num_groups, scale_groups
from backend_engine.quantization.weight_scheme import Component, WeightScheme

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))
"""Sign, two bits of exponent, one of mantissa."""

_E8M0_BIAS = 127
_E8M0_NAN = 255
SCALES = {"float32": torch.float32, "float16": torch.float16, "e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8}


@dataclass(frozen=True)
class Codebook4(WeightScheme):
    """values: what the sixteen codes stand for. Two codes a byte, the first in the lower half. scales: a key of
    ``SCALES``; ``e8m0`` are powers of two, stored with bias 127, of which 255 is NaN. has_row_scale: rows are
    multiplied by a float32 number as well.
    """

    values: tuple[float, ...]
    group_size: int
    scales: str = "float32"
    has_row_scale: bool = False

    def __post_init__(self) -> None:
        assert len(self.values) == 16 and self.scales in SCALES, self

    def components(self, in_features: int) -> dict[str, Component]:
        found = {
            "codes": Component((in_features // 2,), torch.uint8),
            "scales": Component((num_groups(in_features, self.group_size),), SCALES[self.scales]),
        }
        if self.has_row_scale:
            found["row_scale"] = Component((1,), torch.float32)
        return found

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        codes = tensors["codes"]
        table = torch.tensor(self.values, dtype=torch.float32, device=codes.device)
        # Both values of a byte are looked up at once.
        pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)
        weight = F.embedding(codes.to(torch.int32), pairs).flatten(-2)
        weight = scale_groups(weight, self._factors(tensors["scales"]), self.group_size)
        return weight.mul_(tensors["row_scale"]) if self.has_row_scale else weight

    def _factors(self, scales: Tensor) -> Tensor:
        if self.scales != "e8m0":
            return scales.to(torch.float32)
        powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - _E8M0_BIAS)
        return powers.masked_fill_(scales == _E8M0_NAN, float("nan"))

    def num_columns(self, tensors: Mapping[str, Tensor]) -> int:
        return 2 * tensors["codes"].shape[-1]

    def columns(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        check_borders(start, stop, self.num_columns(tensors), self.group_size, "group")
        check_borders(start, stop, self.num_columns(tensors), 2, "byte")
        found = {"codes": tensors["codes"][..., start // 2 : stop // 2]}
        found |= cut_groups(tensors, start, stop, self.group_size, ("scales",))
        return {**found, "row_scale": tensors["row_scale"]} if self.has_row_scale else found

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if tensors["codes"].device.type == "cpu":
            packed_products()  # compiled now rather than in a request
        return dict(tensors)

    def multiply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        weight = PackedWeight(
            Codes.CODEBOOK4, tensors["codes"], tensors["scales"], self.group_size,
            row_scale=tensors.get("row_scale"), values=self.values,
        )  # fmt: skip
        product = multiply_packed(weight, x)
        return super().multiply(tensors, x) if product is None else product
