"""``Nvfp4Grid``: NVIDIA's four-bit floats, E2M1 with an E4M3 scale for sixteen columns and one number for the tensor.

NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. Stored as compressed-tensors'
``nvfp4-pack-quantized``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backend_engine.quantization.formats.nvfp4 import GROUP_SIZE
from backend_engine.quantization.formats.packed_ints import row_chunks
from backend_engine.quantization.grids.scale_search import Candidate, largest_number, search_scales
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid, per_group
from backend_engine.quantization.schemes.codebook4 import E2M1
from backend_engine.quantization.schemes.grouped import pack_nibbles

LARGEST = 6.0
# E4M3 is in the order of its bits from 2 ** -9, bits 1, to 448, bits 126.
_SMALLEST_BITS, _LARGEST_BITS = 1, 126
# Scales that are tried: so many places away from that of the whole range, which is first. Eight places are a factor of
# two; five upwards the largest number becomes 4 instead of 6, next to which steps are smaller.
_PLACES = (0, *(sign * step for step in range(1, 6) for sign in (-1, 1)))
_LARGEST_E4M3 = 448.0
# At most the scale of the group with the largest number: room for the places upwards.
_AIMED_AT = 256.0
# Of ``tensor_scale``: that its reciprocal and the largest weight are finite.
_EXPONENTS = (-126, 116)


@dataclass(frozen=True)
class Nvfp4Grid(WeightGrid):
    """A weight is ``E2M1[code] * scale``, where ``scale`` is an E4M3 number times ``tensor_scale``.

    ``tensor_scale`` is a power of two, which costs nothing, since E4M3 numbers are spaced alike in each of them. So
    multiplying by it is exact, and a weight the same number whether a reader divides by what is stored, as the library
    does, or multiplies by its reciprocal. What is stored, ``weight_global_scale``, is the divisor.
    """

    @property
    def group_size(self) -> int | None:
        return GROUP_SIZE

    @property
    def bits(self) -> float:
        return 4

    def problem_with(self, in_features: int) -> str | None:
        return (
            f"NVFP4 needs a multiple of {GROUP_SIZE} columns, not {in_features}" if in_features % GROUP_SIZE else None
        )

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Scales:
        """Raises ``ValueError`` (a phrase) for numbers that are not finite."""
        tensor_scale = _tensor_scale(largest_number(weight))

        def propose(grouped: Tensor) -> Iterator[Candidate]:
            widest = grouped.abs().amax(-1, keepdim=True) / LARGEST / tensor_scale
            bits = widest.clamp_(0, _LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
            for places in _PLACES:
                near = (bits + places).clamp_(_SMALLEST_BITS, _LARGEST_BITS).to(torch.uint8)
                yield Candidate(near.view(torch.float8_e4m3fn).to(torch.float32) * tensor_scale)

        scale = search_scales(weight, GROUP_SIZE, importance, propose, _nearest).scale
        return Scales(scale, tensor_scale=torch.tensor([tensor_scale], device=weight.device))

    def round(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        assert zero is None, self
        # Adding 0 makes a 0 of -0.
        return _nearest(weight / scale, None).mul_(scale).add_(0)

    def leaves(self, rounded: Tensor, scales: Scales) -> dict[str, Tensor]:
        assert scales.tensor_scale is not None, self
        rows, columns = rounded.shape
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=rounded.device)
        # By twice the number: codes from 0 on.
        table = torch.zeros(int(2 * LARGEST) + 1, dtype=torch.uint8, device=rounded.device)
        for code in range(8):
            table[int(2 * E2M1[code])] = code
        for chunk in row_chunks(rows, columns):
            scale = per_group(scales.scale[chunk], GROUP_SIZE, columns)
            steps = _nearest(rounded[chunk] / scale, None)
            assert torch.equal(steps * scale, rounded[chunk]), "the weight has numbers that are not of the grid"
            sign = (steps < 0).to(torch.uint8) << 3
            packed[chunk] = pack_nibbles(table[steps.abs_().mul_(2).to(torch.int32)] | sign)
        return {
            ".weight_packed": packed,
            ".weight_scale": (scales.scale / scales.tensor_scale).to(torch.float8_e4m3fn),
            ".weight_global_scale": 1 / scales.tensor_scale,
        }

    def weights_config(self) -> dict[str, Any]:
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": GROUP_SIZE,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        }

    @property
    def packing(self) -> str:
        return "nvfp4-pack-quantized"


def _tensor_scale(largest: float) -> float:
    """The least power of two with which a group up to ``largest`` has a scale of at most ``_AIMED_AT``."""
    if largest == 0:
        return 1.0
    exponent = math.frexp(largest / (LARGEST * _AIMED_AT))[1]
    return math.ldexp(1.0, min(max(exponent, _EXPONENTS[0]), _EXPONENTS[1]))


def _nearest(steps: Tensor, zero: Tensor | None) -> Tensor:
    """E2M1: steps of a half below 2, of 1 below 4, of 2 above; halfway to the even code."""
    within = steps.clamp(-LARGEST, LARGEST)
    size = within.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return within.div_(step).round_().mul_(step)
