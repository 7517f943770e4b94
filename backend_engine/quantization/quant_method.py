"""``QuantMethod``: how a linear layer stores and multiplies its weight. One scheme a file.

``layers/linear.py`` calls it; a method keeps its tensors on the layer it is handed and owns none itself.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn


class TensorOptions(NamedTuple):
    """Where and in which dtype weights are created and activations computed."""

    dtype: torch.dtype
    device: torch.device


class WeightedLayer(nn.Module):
    """What a scheme keeps its tensors on: the plain weight and bias, and the weight in the scheme's own form."""

    weight: Tensor | None
    bias: Tensor | None
    packed_weight: Tensor | None


class QuantMethod(ABC):
    """A weight scheme; every method is handed the layer it works on."""

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
