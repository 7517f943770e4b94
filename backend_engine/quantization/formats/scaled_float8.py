"""``ScaledFloat8``: eight-bit floats with a scale for the tensor, for each row or for each block of rows and columns.

Shared by the readers of fp8, fbgemm_fp8 and ModelOpt checkpoints; blocks as in DeepSeek-V3 (DeepSeek-AI, 2024), powers
of two as scales as in MXFP8 (OCP Microscaling Formats, version 1.0, 2023). Pure data and arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from backend_engine.quantization.formats.stored_shape import stored_shape
from backend_engine.quantization.formats.stored_weight import first_stored
from backend_engine.quantization.schemes.float8 import FLOAT8_DTYPES, Float8
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, StoredTensors, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

_E8M0_DTYPES = ("F8_E8M0", "U8")


@dataclass(frozen=True)
class ScaledFloat8(WeightFormat):
    """weight, scale: endings of the tensors' names; a weight is ``code * scale``. dtype: a key of ``FLOAT8_DTYPES``.
    block: rows and columns that share a scale, the last ones of a weight fewer; ``None`` = the row or the whole tensor.
    scale_shape: of the scales as stored.
    """

    weight: str
    scale: str
    dtype: str
    block: tuple[int, int] | None
    scale_shape: tuple[int, ...]

    @property
    def scheme(self) -> WeightScheme:
        return Float8(FLOAT8_DTYPES[self.dtype], self.block and self.block[1])

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        return {
            self.weight: Leaf(shape, (self.dtype,)),
            self.scale: Leaf(self.scale_shape, (*FLOAT_DTYPES, *_E8M0_DTYPES)),
        }

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        scales = _to_float32(leaves[self.scale])
        if not bool(torch.isfinite(scales).all()):
            raise ValueError(f"{self.scale} has numbers that are not finite")
        *stack, num_rows, num_columns = shape
        if self.block is not None:
            blocks = scales.reshape(*stack, *_num_blocks(num_rows, num_columns, self.block))
            scales = blocks.repeat_interleave(self.block[0], -2)[..., :num_rows, :]
        elif scales.numel() == prod(stack):
            scales = scales.reshape(*stack, 1, 1).expand(*stack, num_rows, 1)
        else:
            scales = scales.reshape(*stack, num_rows, 1)
        return {"codes": leaves[self.weight], "scales": scales}


def find_scaled_float8(
    stored: StoredTensors, module: str, scales: Sequence[str], block: tuple[int, int] | None
) -> ScaledFloat8:
    """The format of the weight of ``module``, whose scale has one of the endings ``scales``. block: where scales are
    said to be for blocks; what has one scale, or one for each row, is taken for that all the same.
    """
    is_bare = stored.has(module) and not stored.has(module + ".weight")
    weight = "" if is_bare else ".weight"
    # The scales of a stack of experts lie beside it, ``gate_up_proj_scale_inv``.
    scale = first_stored(stored, module, ["_" + s.removeprefix(".weight_") for s in scales] if is_bare else scales)
    found = stored.tensors.get(module + weight)
    if found is None or len(found.shape) < 2:
        return ScaledFloat8(weight, scale, "F8_E4M3", block, (1, 1) if block else ())
    dtype = found.dtype if found.dtype in FLOAT8_DTYPES else "F8_E4M3"
    *stack, num_rows, num_columns = found.shape
    wholes = [(*stack, *ones) for ones in ((), (1,), (1, 1))]
    rows = [(*stack, num_rows), (*stack, num_rows, 1)]
    if block is not None:
        high, wide = _num_blocks(num_rows, num_columns, block)
        blocks = [(*stack, high, wide), (*stack, high, 1, wide, 1)]
        shape = stored_shape(stored, module + scale, blocks + wholes + rows)
        return ScaledFloat8(weight, scale, dtype, block if shape in blocks else None, shape)
    return ScaledFloat8(weight, scale, dtype, None, stored_shape(stored, module + scale, wholes + rows))


def _num_blocks(num_rows: int, num_columns: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-num_rows // block[0]), -(-num_columns // block[1])


def _to_float32(scales: Tensor) -> Tensor:
    """Scales of any dtype; bytes are powers of two with bias 127, of which 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)
