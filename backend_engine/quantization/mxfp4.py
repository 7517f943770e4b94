"""MXFP4: blocks of 32 four-bit floats that share a power of two (OCP Microscaling Formats, version 1.0, 2023).

Used by weight rules to read checkpoints; pure arithmetic.
"""

import torch
from torch import Tensor

BLOCK_SIZE = 32
"""Values that share a scale."""

_SCALE_BIAS = 127
_SCALE_NAN = 255
# E2M1: sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Weights, float32 ``[rows, num_blocks * 32]``.

    blocks: uint8 ``[rows, num_blocks, 16]``, two values a byte, the first in the lower half. scales: uint8
    ``[rows, num_blocks]``, E8M0 (a power of two, stored with bias 127; 255 is NaN).
    """
    table = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.float32, device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = table[pairs.to(torch.int64)]
    scales = scales.unsqueeze(-1)
    weight = torch.ldexp(values, scales.to(torch.int32) - _SCALE_BIAS)
    return weight.masked_fill_(scales == _SCALE_NAN, float("nan")).flatten(-2)
