"""``Unquantized``: weights as the checkpoint has them; on a CPU in float32 packed for oneDNN.

Packing halves the time of a product with few rows and makes a row's result independent of how many rows
are multiplied with it. It uses a private operator of torch, so it is tried first and done without if it fails.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend_engine.quantization.quant_method import QuantMethod, WeightedLayer

# Up to this many rows: rounded up to a multiple of so many.
_ROW_MULTIPLES = ((16, 1), (64, 8), (512, 16))
_LARGEST_MULTIPLE = 128


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def packing_works() -> bool:
    """Whether this torch has oneDNN's packed product and it gives the right answer on a small case."""
    weight = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    x = torch.arange(16, dtype=torch.float32).reshape(2, 8)
    try:
        packed = _pack(weight)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return torch.equal(product, x @ weight.T) and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError, TypeError):
        return False


def num_product_rows(num_rows: int) -> int:
    """The number of rows that a packed product of ``num_rows`` rows is computed with.

    oneDNN builds a kernel for each number of rows that it meets and keeps a thousand of them, some hundred kilobytes
    each: a server whose steps have any number of tokens would grow by half a gigabyte, and wait for each kernel. So
    larger products are rounded up.
    """
    for limit, multiple in _ROW_MULTIPLES:
        if num_rows <= limit:
            return -(-num_rows // multiple) * multiple
    return -(-num_rows // _LARGEST_MULTIPLE) * _LARGEST_MULTIPLE


class Unquantized(QuantMethod):
    """Plain weights. ``pack``: pack on a CPU in float32; ``None`` = if this torch can."""

    def __init__(self, pack: bool | None = None) -> None:
        self._pack_on_cpu = packing_works() if pack is None else pack
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default if self._pack_on_cpu else None

    def create_weights(self, layer: WeightedLayer) -> None:
        dtype, device = layer.options
        layer.weight = nn.Parameter(torch.empty(layer.weight_shape, dtype=dtype, device=device), requires_grad=False)
        layer.packed_weight = None

    def after_loading(self, layer: WeightedLayer) -> None:
        """Pack and let go of the plain weight, so that the memory stays that of one copy."""
        weight = layer.weight
        assert weight is not None, "after_loading ran twice"
        if self._pack_on_cpu and weight.device.type == "cpu" and weight.dtype == torch.float32:
            layer.packed_weight = _pack(weight.data)
            layer.weight = None

    def apply(self, layer: WeightedLayer, x: Tensor) -> Tensor:
        packed = layer.packed_weight
        if packed is None:
            assert layer.weight is not None
            return F.linear(x, layer.weight, layer.bias)
        num_rows = x.shape[0]
        padding = num_product_rows(num_rows) - num_rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        result: Tensor = self._product(x, packed, layer.bias, "none", [], "")
        return result[:num_rows] if padding else result

    def dequantize(self, layer: WeightedLayer) -> Tensor:
        if layer.packed_weight is not None:
            return layer.packed_weight.to_dense()
        assert layer.weight is not None
        return layer.weight.detach().to(torch.float32)


class Decoded(Unquantized):
    """Plain weights whatever the checkpoint has, and in no library's form: they can be read and changed."""

    gives_way = False

    def __init__(self) -> None:
        super().__init__(pack=False)
