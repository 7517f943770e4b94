"""``Nvfp4``: NVIDIA's four-bit floats, E2M1 with an E4M3 scale for sixteen columns and a float32 one for the tensor.

NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. ModelOpt and compressed-tensors
name the tensors differently; their readers make this format. Pure data and arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme

GROUP_SIZE = 16


@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """A weight is ``E2M1[code] * scale * tensor_scale``, or divided by the last (``is_divisor``, compressed-tensors).

    codes, scales, tensor_scale: endings of the tensors' names. Two codes a byte, the first in the lower half.
    tensor_scale_shape: ``()`` or ``(1,)``. unused: endings of tensors that belong to the weight and are not needed,
    with their shapes (an input's calibrated range, where inputs stay in the model's dtype).
    """

    codes: str = ".weight"
    scales: str = ".weight_scale"
    tensor_scale: str = ".weight_scale_2"
    is_divisor: bool = False
    tensor_scale_shape: tuple[int, ...] = ()
    unused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    group_size: int = GROUP_SIZE

    @property
    def scheme(self) -> WeightScheme:
        return Codebook4(E2M1, self.group_size, "e4m3", has_row_scale=True)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        if shape[-1] % self.group_size:
            raise ValueError(f"NVFP4 needs a multiple of {self.group_size} columns, not {shape[-1]}")
        found = {
            self.codes: Leaf((*shape[:-1], shape[-1] // 2), ("U8",)),
            self.scales: Leaf((*shape[:-1], shape[-1] // self.group_size), ("F8_E4M3",)),
            self.tensor_scale: Leaf(self.tensor_scale_shape, FLOAT_DTYPES),
        }
        return found | {ending: Leaf(size, FLOAT_DTYPES, is_optional=True) for ending, size in self.unused}

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        scale = leaves[self.tensor_scale].to(torch.float32).reshape(())
        if not bool(torch.isfinite(scale)) or (self.is_divisor and not bool(scale)):
            raise ValueError(f"{self.tensor_scale} is {float(scale)}")
        row_scale = 1 / scale if self.is_divisor else scale
        return {
            "codes": leaves[self.codes],
            "scales": leaves[self.scales],
            "row_scale": row_scale.expand(*shape[:-1], 1),
        }
