"""``Unquantized``: weights as the checkpoint has them; on a CPU in float32 packed for the native library.

Packed (``ops/dense_products.py``) a product with few rows is as fast as the memory, a row's result does not depend on
how many rows are multiplied with it, and the numbers may stay in memory in a shorter form. Without the library oneDNN's
packing is used, by a private operator of torch, so it is tried first and done without if it fails.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend_engine.ops.dense_packing import pack_dense, with_bias
from backend_engine.ops.dense_products import DenseKind, dense_bytes, multiply_dense, unpack_dense
from backend_engine.ops.huge_pages import HugePages
from backend_engine.ops.native_runtime import native_runtime
from backend_engine.quantization.quant_method import QuantMethod, TensorOptions, WeightedLayer

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


def packs_densely(options: TensorOptions) -> bool:
    """Whether plain weights of products are packed for the native library."""
    return options.device.type == "cpu" and options.dtype == torch.float32 and native_runtime() is not None


def plain_bytes(shape: tuple[int, int], options: TensorOptions, kind: DenseKind, packs: bool) -> int:
    """Bytes of a weight of ``shape`` as ``Unquantized(packs, kind)`` keeps it."""
    if packs and packs_densely(options):
        return dense_bytes(kind, *shape)
    return shape[0] * shape[1] * options.dtype.itemsize


class Unquantized(QuantMethod):
    """Plain weights. ``pack``: pack on a CPU in float32; ``None`` = if it can be done here. kind: the form in memory,
    where the native library packs; it is needed for others than float32. memory: where it packs, best one for a model.
    """

    def __init__(
        self, pack: bool | None = None, kind: DenseKind = DenseKind.F32, memory: HugePages | None = None
    ) -> None:
        self._kind = kind
        self._memory = memory
        self._wants_native = pack is not False
        self._pack_on_cpu = packing_works() if pack is None else pack
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default if self._pack_on_cpu else None

    def create_weights(self, layer: WeightedLayer) -> None:
        dtype, device = layer.options
        layer.weight = nn.Parameter(torch.empty(layer.weight_shape, dtype=dtype, device=device), requires_grad=False)
        layer.packed_weight = layer.dense_weight = None

    def take(self, layer: WeightedLayer, weight: Tensor) -> bool:
        if not (self._wants_native and packs_densely(layer.options)):
            return False
        assert tuple(weight.shape) == layer.weight_shape, (tuple(weight.shape), layer.weight_shape)
        layer.dense_weight = pack_dense(weight, self._kind, memory=self._memory)
        layer.weight = None
        return True

    def after_loading(self, layer: WeightedLayer) -> None:
        """Pack and let go of the plain weight, so that the memory stays that of one copy."""
        weight = layer.weight
        if layer.dense_weight is not None:
            assert weight is None and layer.dense_weight.bias is None, "after_loading ran twice"
            layer.dense_weight = with_bias(layer.dense_weight, layer.bias)
            return
        assert weight is not None, "after_loading ran twice"
        if self._wants_native and packs_densely(TensorOptions(weight.dtype, weight.device)):
            layer.dense_weight = pack_dense(weight.data, self._kind, layer.bias, self._memory)
            layer.weight = None
        elif self._pack_on_cpu and weight.device.type == "cpu" and weight.dtype == torch.float32:
            layer.packed_weight = _pack(weight.data)
            layer.weight = None

    def apply(self, layer: WeightedLayer, x: Tensor) -> Tensor:
        if layer.dense_weight is not None:
            product = multiply_dense(layer.dense_weight, x)
            assert product is not None, "the native library is gone"
            return product
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
        if layer.dense_weight is not None:
            return unpack_dense(layer.dense_weight)
        if layer.packed_weight is not None:
            return layer.packed_weight.to_dense()
        assert layer.weight is not None
        return layer.weight.detach().to(torch.float32)


class Decoded(Unquantized):
    """Plain weights whatever the checkpoint has, and in no library's form: they can be read and changed."""

    gives_way = False

    def __init__(self) -> None:
        super().__init__(pack=False)
