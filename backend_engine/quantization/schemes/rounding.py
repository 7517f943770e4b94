"""``round_tokens``: numbers rounded to few bits and back, as quantized checkpoints ask for it before a product.

Used by ``inputs.py``. Nothing here looks at more than one token at a time. Scales are those of compressed-tensors, of
the Microscaling formats (OCP, version 1.0, 2023) and of NVFP4.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_LARGEST = 127.0
FP8_LARGEST = 448.0
FP4_LARGEST = 6.0
# Where the scale of a group comes out as zero.
_E4M3_SMALLEST_SCALE = 0.125


class Kind(NamedTuple):
    """grid: ``int``, ``fp8`` (E4M3) or ``fp4`` (E2M1). low, high: its ends. span: steps between zero and the largest
    number. scales: ``float``; ``e8m0``, powers of two; ``e4m3``, with a number from the checkpoint that they are
    multiplied by before they are rounded, and divided by afterwards.
    """

    grid: str
    low: float
    high: float
    span: float
    scales: str = "float"


KINDS = {
    "int8": Kind("int", -128, 127, INT8_LARGEST),
    "int8_wide": Kind("int", -128, 127, 127.5),
    "int4_wide": Kind("int", -8, 7, 7.5),
    "fp8": Kind("fp8", -FP8_LARGEST, FP8_LARGEST, FP8_LARGEST),
    "mxfp8": Kind("fp8", -FP8_LARGEST, FP8_LARGEST, FP8_LARGEST, "e8m0"),
    "mxfp4": Kind("fp4", -FP4_LARGEST, FP4_LARGEST, FP4_LARGEST, "e8m0"),
    "nvfp4": Kind("fp4", -FP4_LARGEST, FP4_LARGEST, FP4_LARGEST, "e4m3"),
}
"""``wide``: half a step more, so that all integers cover the numbers' range, as compressed-tensors has it."""


def round_tokens(
    x: Tensor, kind: str, scale: Tensor | None, zero: Tensor | None = None, group_size: int | None = None
) -> Tensor:
    """``x [num_tokens, size]`` rounded to ``KINDS[kind]`` and back. scale, zero: of the checkpoint; without them a
    token, or ``group_size`` columns of it (the last ones may be fewer), has a scale of its own. For ``nvfp4``, scale is
    the number beside those.
    """
    chosen = KINDS[kind]
    wide = x.to(torch.float32)
    if group_size is not None:
        wide = F.pad(wide, (0, -x.shape[-1] % group_size)).view(*x.shape[:-1], -1, group_size)
    if scale is None or chosen.scales == "e4m3":
        scale = _own_scale(wide, chosen, scale)
    steps = wide / scale
    if zero is not None:
        steps += zero
    steps = _to_grid(steps, chosen)
    if zero is not None:
        steps -= zero
    rounded = (steps * scale).to(x.dtype)
    return rounded.view(x.shape) if group_size is None else rounded.flatten(-2)[..., : x.shape[-1]]


def round_tokens_between(x: Tensor, kind: str) -> Tensor:
    """``round_tokens`` to integers that cover the range of a token's own numbers, and zero."""
    chosen = KINDS[kind]
    assert chosen.grid == "int", kind
    wide = x.to(torch.float32)
    lowest = wide.amin(-1, keepdim=True).clamp_max_(0)
    scale = (wide.amax(-1, keepdim=True).clamp_min_(0) - lowest) / (chosen.high - chosen.low)
    zero = (chosen.low - lowest / scale).clamp_(chosen.low, chosen.high).round_().nan_to_num_(0)
    return round_tokens(x, kind, _without_zeros(scale, torch.finfo(torch.float32).eps), zero)


def _own_scale(wide: Tensor, kind: Kind, tensor_scale: Tensor | None) -> Tensor:
    """The scale of each token or group of ``wide``, whose last dimension that is."""
    largest = wide.abs().amax(-1, keepdim=True)
    if kind.scales == "e8m0":
        return _power_of_two(largest, kind.span)
    scale = largest / kind.span
    if kind.scales == "float":
        return _without_zeros(scale, torch.finfo(torch.float32).eps)
    assert tensor_scale is not None, kind
    scaled = (scale * tensor_scale).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).to(torch.float32)
    return _without_zeros(scaled, _E4M3_SMALLEST_SCALE) / tensor_scale


def _without_zeros(scale: Tensor, smallest: float) -> Tensor:
    return torch.where(scale == 0, smallest, scale)


def _power_of_two(largest: Tensor, span: float) -> Tensor:
    """At which a group's largest number has the exponent of the grid's; a mantissa from 1.75 on counts as 2."""
    mantissa, exponent = torch.frexp(largest)
    offset = int(torch.frexp(torch.tensor(span)).exponent) - 1
    # ``frexp`` has mantissas from a half to one.
    exponent = exponent - 1 + (mantissa >= 0.875).to(exponent.dtype) - offset
    exponent = exponent.masked_fill_(largest == 0, -127).clamp_(-127, 127)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _to_grid(steps: Tensor, kind: Kind) -> Tensor:
    steps = steps.clamp_(kind.low, kind.high)
    if kind.grid == "int":
        return steps.round_()
    if kind.grid == "fp8":
        return steps.to(torch.float8_e4m3fn).to(torch.float32)
    # E2M1: steps of a half below 2, of one below 4, of two above; halfway to the even code.
    size = steps.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (steps / step).round_().mul_(step)
