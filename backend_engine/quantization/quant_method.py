"""``QuantMethod``: how a linear layer stores and multiplies its weight. ``Unquantized`` and ``Packed``.

``layers/linear.py`` calls it; a method keeps its tensors on the layer it is handed and owns none itself.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

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

    def __init__(self) -> None:
        super().__init__()
        self.packed_parts: list[PackedPart] = []


class QuantMethod(ABC):
    """Every method is handed the layer it works on."""

    @abstractmethod
    def create_weights(self, layer: WeightedLayer, shape: tuple[int, int], bias: bool, options: TensorOptions) -> None:
        """Register empty parameters for a weight of ``shape = (out_features, in_features)`` on ``layer``."""

    @abstractmethod
    def after_loading(self, layer: WeightedLayer) -> None:
        """Turn what the checkpoint filled into what ``apply`` reads; called once, after all parameters are filled."""

    @abstractmethod
    def apply(self, layer: WeightedLayer, x: Tensor) -> Tensor:
        """``x [num_tokens, in_features]`` -> ``[num_tokens, out_features]``."""

    @abstractmethod
    def dequantize(self, layer: WeightedLayer) -> Tensor:
        """The weight as the multiplication sees it, float32 ``[out_features, in_features]``."""
