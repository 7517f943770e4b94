"""``QuantMethod``: how a linear layer stores and multiplies its weight. ``Unquantized`` and ``Packed``.

``layers/linear.py`` calls it; a method keeps its tensors on the layer it is handed and owns none itself.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from backend_engine.ops.dense_products import DenseWeight

if TYPE_CHECKING:
    from backend_engine.quantization.packed import PackedPart


class TensorOptions(NamedTuple):
    """Where and in which dtype weights are created and activations computed."""

    dtype: torch.dtype
    device: torch.device


class WeightedLayer(nn.Module):
    """What a method keeps its tensors on: the plain weight and bias, the plain weight in a library's own form, and
    weights that stay in the checkpoint's form.
    """

    weight: Tensor | None
    bias: Tensor | None
    packed_weight: Tensor | None
    dense_weight: DenseWeight | None
    quant: "QuantMethod"

    def __init__(self, weight_shape: tuple[int, int], options: TensorOptions) -> None:
        super().__init__()
        self.weight_shape = weight_shape
        self.options = options
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.packed_weight = None
        self.dense_weight = None
        self.packed_parts: list[PackedPart] = []

    def store_as(self, quant: "QuantMethod") -> None:
        """Keep the weight as ``quant`` does from now on, and create empty tensors for it."""
        self.quant = quant
        quant.create_weights(self)

    def share_weight(self, other: "WeightedLayer") -> None:
        """Keep no weight but that of ``other``, before either is prepared for use."""
        self.quant = other.quant if other.packed_parts else self.quant.for_plain_weights()
        self.weight = other.weight
        self.packed_parts = [dataclasses.replace(part) for part in other.packed_parts]


class QuantMethod(ABC):
    """Every method is handed the layer it works on."""

    # Whether a checkpoint that packs a weight decides how it is kept; where not, the weight is decoded.
    gives_way: ClassVar[bool] = True

    def for_plain_weights(self) -> "QuantMethod":
        """The method to keep a weight with that the checkpoint has plain."""
        return self

    @abstractmethod
    def create_weights(self, layer: WeightedLayer) -> None:
        """Put empty tensors for a weight of ``layer.weight_shape`` on ``layer``."""

    def take(self, layer: WeightedLayer, weight: Tensor) -> bool:
        """Prepare ``weight``, all that the layer's plain one is to hold, of any float dtype, for use at once and keep
        nothing of it. ``False`` = nothing was done, it is to be copied into the layer's.
        """
        return False

    @abstractmethod
    def after_loading(self, layer: WeightedLayer) -> None:
        """Turn what the checkpoint filled into what ``apply`` reads; called once, after all parameters are filled."""

    @abstractmethod
    def apply(self, layer: WeightedLayer, x: Tensor) -> Tensor:
        """``x [num_tokens, in_features]`` -> ``[num_tokens, out_features]``."""

    @abstractmethod
    def dequantize(self, layer: WeightedLayer) -> Tensor:
        """The weight as the multiplication sees it, float32 ``[out_features, in_features]``."""
