"""``Deferred``: a weight that has no form yet, since only the checkpoint tells which.

Models are built with it; while the checkpoint is loaded every layer is told its form. It computes nothing.
"""

from torch import Tensor

from backend_engine.quantization.quant_method import QuantMethod, WeightedLayer


class Deferred(QuantMethod):
    """``plain``: the method for weights that turn out plain."""

    def __init__(self, plain: QuantMethod) -> None:
        self._plain = plain

    def for_plain_weights(self) -> QuantMethod:
        return self._plain

    def create_weights(self, layer: WeightedLayer) -> None:
        """None until the form is known."""

    def after_loading(self, layer: WeightedLayer) -> None:
        raise AssertionError(f"a weight of shape {layer.weight_shape} was never loaded")

    def apply(self, layer: WeightedLayer, x: Tensor) -> Tensor:
        raise AssertionError(f"a weight of shape {layer.weight_shape} was used before it was loaded")

    def dequantize(self, layer: WeightedLayer) -> Tensor:
        raise AssertionError(f"a weight of shape {layer.weight_shape} was read before it was loaded")
