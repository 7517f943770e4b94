"""``Float8Grid``: eight-bit floats, E4M3, with a float32 scale for each row (Micikevicius et al., 2022).

Stored as compressed-tensors' ``float-quantized``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backend_engine.quantization.formats.packed_ints import row_chunks
from backend_engine.quantization.grids.scale_search import Candidate, largest_number, search_scales
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid

LARGEST = 448.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# With which no weight is infinite.
_LARGEST_SCALE = torch.finfo(torch.float32).max / 512
# Scales that are tried, as multiples of that of the whole range: wider ones, since there is range in plenty, while it
# matters where between two powers of two, at which steps double, a row's numbers come to lie.
_FACTORS = tuple(1 + step / 20 for step in range(20))


@dataclass(frozen=True)
class Float8Grid(WeightGrid):
    """A weight is ``code * scale``."""

    @property
    def group_size(self) -> int | None:
        return None

    @property
    def bits(self) -> float:
        return 8

    def problem_with(self, in_features: int) -> str | None:
        return None

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Scales:
        """Raises ``ValueError`` (a phrase) for numbers that are not finite."""
        largest_number(weight)
        return Scales(search_scales(weight, None, importance, _propose, _nearest).scale)

    def round(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        assert zero is None, self
        # Adding 0 makes a 0 of -0.
        return _nearest(weight / scale, None).mul_(scale).add_(0)

    def leaves(self, rounded: Tensor, scales: Scales) -> dict[str, Tensor]:
        codes = torch.empty(rounded.shape, dtype=torch.float8_e4m3fn, device=rounded.device)
        for chunk in row_chunks(*rounded.shape):
            scale = scales.scale[chunk]
            steps = _nearest(rounded[chunk] / scale, None)
            assert torch.equal(steps * scale, rounded[chunk]), "the weight has numbers that are not of the grid"
            codes[chunk] = steps.to(torch.float8_e4m3fn)
        return {".weight": codes, ".weight_scale": scales.scale}

    def weights_config(self) -> dict[str, Any]:
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
            "group_size": None,
            "dynamic": False,
        }

    @property
    def packing(self) -> str:
        return "float-quantized"


def _propose(grouped: Tensor) -> Iterator[Candidate]:
    widest = grouped.abs().amax(-1, keepdim=True) / LARGEST
    for factor in _FACTORS:
        scale = (widest * factor).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
        yield Candidate(scale.masked_fill_(widest == 0, 1))


def _nearest(steps: Tensor, zero: Tensor | None) -> Tensor:
    return steps.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(torch.float32)
