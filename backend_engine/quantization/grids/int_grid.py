"""``IntGrid``: integers of 4 or 8 bits with a scale, and perhaps a zero point, for each row or group of columns.

What GPTQ and AWQ round to, and 8-bit weights; stored as compressed-tensors' ``pack-quantized`` and ``int-quantized``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.quantization.formats.packed_ints import WORD_BITS, num_words, pack_codes, row_chunks
from backend_engine.quantization.grids.scale_search import SHRUNK, Candidate, largest_number, search_scales
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid, per_group

SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class IntGrid(WeightGrid):
    """A weight is ``code * scale`` with codes from ``-2 ** (bits - 1)`` on (``is_symmetric``), or ``(code - zero) *
    scale`` with codes from 0 on.

    is_packed: codes are stored in int32 words, otherwise one by one in int8. clip_search: whether ``fit`` looks for
    a clipped range, or takes the whole one. scale_dtype: in which scales are stored, and hence rounded to; a range that
    float16 cannot hold is clipped.
    """

    bits: int = 8
    group_size: int | None = None
    is_symmetric: bool = True
    is_packed: bool = True
    clip_search: bool = True
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.scale_dtype in SCALE_DTYPES, self
        assert self.group_size is None or self.group_size > 0, self

    @property
    def _midpoint(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _levels(self) -> int:
        return (1 << self.bits) - 1

    @property
    def _widest(self) -> float:
        """The largest number of a range: the code half a step above it must not be infinite in ``scale_dtype``."""
        return torch.finfo(self.scale_dtype).max * 7 / 8

    def problem_with(self, in_features: int) -> str | None:
        if self.group_size is not None and in_features % self.group_size:
            return f"groups of {self.group_size} columns do not divide its {in_features}"
        if self.bits == 4 and in_features % 2:
            return f"4 bits need an even number of columns, not {in_features}"
        return None

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Scales:
        """Raises ``ValueError`` (a phrase) for numbers that are not finite."""
        largest_number(weight)
        return Scales(*search_scales(weight, self.group_size, importance, self._propose, self._nearest))

    def _propose(self, grouped: Tensor) -> Iterator[Candidate]:
        low, high = torch.aminmax(grouped, dim=-1, keepdim=True)
        low.clamp_(-self._widest, 0)
        high.clamp_(0, self._widest)
        if self.is_symmetric:
            # Half a step more than the largest code, so that all codes cover the range, as the library has it.
            half = torch.maximum(-low, high)
        else:
            half = high / 2 - low / 2
        step = half / (self._levels / 2)
        for part in SHRUNK if self.clip_search else SHRUNK[:1]:
            scale = self._storable(step * part)
            if self.is_symmetric:
                yield Candidate(scale)
            else:
                yield Candidate(scale, (low * -part / scale).round_().clamp_(0, self._levels))

    def _storable(self, step: Tensor) -> Tensor:
        """Rounded to ``scale_dtype``, above 0; 1 for a group of zeros."""
        info = torch.finfo(self.scale_dtype)
        smallest = max(info.tiny * info.eps, _SMALLEST_NORMAL)
        stored = step.clamp(smallest, self._widest / (self._levels / 2)).to(self.scale_dtype).to(torch.float32)
        return stored.masked_fill_(step == 0, 1)

    def _nearest(self, steps: Tensor, zero: Tensor | None) -> Tensor:
        if zero is None:
            return steps.round().clamp_(-self._midpoint, self._midpoint - 1)
        return (steps + zero).round_().clamp_(0, self._levels).sub_(zero)

    def round(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        assert (zero is None) == self.is_symmetric, self
        # Adding 0 makes a 0 of -0, which codes do not have.
        return self._nearest(weight / scale, zero).mul_(scale).add_(0)

    def leaves(self, rounded: Tensor, scales: Scales) -> dict[str, Tensor]:
        codes = self._codes(rounded, scales)
        if self.is_packed:
            found = {".weight_packed": self._words(codes), ".weight_shape": torch.tensor(rounded.shape)}
        else:
            found = {".weight": self._signed(codes)}
        found[".weight_scale"] = scales.scale.to(self.scale_dtype)
        if scales.zero is not None:
            zeros = scales.zero.to(torch.uint8)
            packed = self._words(zeros.mT).mT.contiguous() if self.is_packed else self._signed(zeros)
            found[".weight_zero_point"] = packed
        return found

    def _codes(self, rounded: Tensor, scales: Scales) -> Tensor:
        """uint8 ``[rows, in_features]``, from 0 on."""
        columns = rounded.shape[1]
        codes = torch.empty(rounded.shape, dtype=torch.uint8, device=rounded.device)
        for chunk in row_chunks(*rounded.shape):
            scale = per_group(scales.scale[chunk], self.group_size, columns)
            zero = None if scales.zero is None else per_group(scales.zero[chunk], self.group_size, columns)
            steps = self._nearest(rounded[chunk] / scale, zero)
            assert torch.equal(steps * scale, rounded[chunk]), "the weight has numbers that are not of the grid"
            codes[chunk] = steps.add_(self._midpoint if zero is None else zero).to(torch.uint8)
        return codes

    def _signed(self, codes: Tensor) -> Tensor:
        return codes.sub(self._midpoint).view(torch.int8) if self.bits == 8 else codes.view(torch.int8) - self._midpoint

    def _words(self, codes: Tensor) -> Tensor:
        """int32, the first code in the lowest bits of a word, rows filled up with 0."""
        rows, columns = codes.shape
        num_bytes = num_words(columns, self.bits) * WORD_BITS // 8
        packed = torch.empty(rows, num_bytes, dtype=torch.uint8, device=codes.device)
        packed[:] = pack_codes(F.pad(codes, (0, num_bytes * 8 // self.bits - columns)), self.bits)
        return packed.view(torch.int32)

    def weights_config(self) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "dynamic": False,
        }

    @property
    def packing(self) -> str:
        return "pack-quantized" if self.is_packed else "int-quantized"
