"""``TreatedInput``: a weight in any format, with what its checkpoint holds for the input of the product beside it.

Factors for its columns and the scale that it is rounded with (``schemes/inputs.py``). Pure data and arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_engine.quantization.schemes.inputs import FactoredInput, RoundedInput
from backend_engine.quantization.weight_format import FLOAT_DTYPES, Leaf, WeightFormat
from backend_engine.quantization.weight_scheme import WeightScheme


@dataclass(frozen=True)
class TreatedInput(WeightFormat):
    """The input's columns are multiplied by factors, then rounded to ``rounding`` (``int8``, ``fp8``, ``None`` = not).

    factors: ending of the factors' name, ``None`` = none. input_scale: ending of the scale's name, ``None`` = each
    token has its own; without rounding it may be stored and is not needed. input_scale_shape: ``()`` or ``(1,)``.
    """

    weight: WeightFormat
    rounding: str | None = None
    input_scale: str | None = None
    input_scale_shape: tuple[int, ...] = ()
    factors: str | None = None

    @property
    def scheme(self) -> WeightScheme:
        found = self.weight.scheme
        if self.rounding is not None:
            found = RoundedInput(found, self.rounding, is_static=self.input_scale is not None)
        return found if self.factors is None else FactoredInput(found)

    def leaves(self, shape: tuple[int, ...]) -> dict[str, Leaf]:
        found = self.weight.leaves(shape)
        if self.input_scale is not None:
            found[self.input_scale] = Leaf(self.input_scale_shape, FLOAT_DTYPES, is_optional=self.rounding is None)
        if self.factors is not None:
            found[self.factors] = Leaf((shape[-1],), FLOAT_DTYPES)
        return found

    def unpack(self, leaves: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        found = self.weight.unpack(leaves, shape)
        if self.rounding is not None and self.input_scale is not None:
            scale = leaves[self.input_scale].to(torch.float32).reshape(1)
            if not 0 < float(scale) < float("inf"):
                raise ValueError(f"{self.input_scale} is {float(scale)}, and must be above 0")
            found["input_scale"] = scale
        if self.factors is not None:
            found["factors"] = leaves[self.factors].to(torch.float32)
        return found
