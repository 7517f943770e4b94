"""``ModelOptInt4`` and ``ModelOptInt8``: integer weights as ModelOpt's exports have them.

Used by ``modelopt.py``. Layouts as ``modelopt.torch.export`` writes them. Pure data and arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.formats.packed_ints import row_chunks
from backend_engine.quantization.schemes.grouped import pack_nibbles
from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

# A signed integer of so many bits and this bit flipped is the unsigned one plus half of the range.
_SIGN4, _SIGN8 = 0x88, 0x80


@dataclass(frozen=True)
class ModelOptInt4(WeightFormat):
    """Signed integers and a float32 scale for each ``group_size`` columns. A byte holds the same column of two rows,
    the upper row in its lower half. unused: endings of tensors that are not needed (the scale of a second rounding of
    the weights, to eight-bit floats), with their shapes.
    """

    group_size: int
    unused: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def scheme(self) -> WeightScheme:
        return GroupwiseInt(4, self.group_size, scale_dtype=torch.float32)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        *stack, num_rows, num_columns = shape
        if num_rows % 2 or num_columns % 2 or num_columns % self.group_size:
            needs = f"even numbers of rows and columns and groups of {self.group_size}"
            raise ValueError(f"ModelOpt's four-bit integers need {needs}, not {num_rows} x {num_columns}")
        found = {
            ".weight": Leaf((*stack, num_rows // 2, num_columns), ("U8",)),
            ".weight_scale": Leaf((*stack, num_rows, num_columns // self.group_size), FLOAT_DTYPES),
        }
        return found | {ending: Leaf(size, FLOAT_DTYPES, is_optional=True) for ending, size in self.unused}

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        pairs = leaves[".weight"].reshape(-1, shape[-1])
        codes = torch.empty(pairs.shape[0], 2, shape[-1] // 2, dtype=torch.uint8, device=pairs.device)
        for rows in row_chunks(pairs.shape[0], shape[-1]):
            chunk = pairs[rows] ^ _SIGN4
            codes[rows, 0] = pack_nibbles(chunk & 15)
            codes[rows, 1] = pack_nibbles(chunk >> 4)
        scales = leaves[".weight_scale"].to(torch.float32)
        return {"codes": codes.view(*shape[:-1], shape[-1] // 2), "scales": scales}


@dataclass(frozen=True)
class ModelOptInt8(WeightFormat):
    """Signed integers and a float32 scale for each row."""

    @property
    def scheme(self) -> WeightScheme:
        return GroupwiseInt(8, None, scale_dtype=torch.float32)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        return {".weight": Leaf(shape, ("I8",)), ".weight_scale": Leaf(shape[:-1], FLOAT_DTYPES)}

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        codes = leaves[".weight"].view(torch.uint8) ^ _SIGN8
        return {"codes": codes, "scales": leaves[".weight_scale"].to(torch.float32).unsqueeze(-1)}
