"""What the tests of weight formats share: a checkpoint in a dict, the loader's checks, integers in words, memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backend_engine.core.tensor_info import TensorInfo
from backend_engine.quantization.weight_format import Quantization, StoredTensors, WeightFormat

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
WHERE = "config.json: quantization_config"


def described(tensors: Mapping[str, Tensor]) -> StoredTensors:
    """Headers of a checkpoint that holds ``tensors``."""
    return StoredTensors({name: TensorInfo(tuple(t.shape), DTYPE_NAMES[t.dtype]) for name, t in tensors.items()}, WHERE)


def load(
    quantization: Quantization, tensors: Mapping[str, Tensor], module: str, shape: tuple[int, ...]
) -> tuple[WeightFormat, dict[str, Tensor]]:
    """Format and components of a packed weight, with the checks that the loader makes."""
    packing = quantization.format_of(module)
    assert packing is not None, module
    leaves = {}
    for ending, leaf in packing.leaves(shape).items():
        if module + ending not in tensors:
            assert leaf.is_optional, ending
            continue
        tensor = tensors[module + ending]
        assert tuple(tensor.shape) == leaf.shape, (ending, tensor.shape, leaf.shape)
        assert DTYPE_NAMES[tensor.dtype] in leaf.dtypes, (ending, tensor.dtype)
        leaves[ending] = tensor
    parts = packing.unpack(leaves, shape)
    described_parts = packing.scheme.components(shape[-1])
    assert parts.keys() == described_parts.keys()
    for name, component in described_parts.items():
        expected = (*shape[:-1], *component.shape) if component.per_row else component.shape
        assert (tuple(parts[name].shape), parts[name].dtype) == (expected, component.dtype), name
    return packing, parts


def decoded(quantization: Quantization, tensors: Mapping[str, Tensor], module: str, shape: tuple[int, ...]) -> Tensor:
    """The weight in float32. Looks at ``multiply`` on the way."""
    packing, parts = load(quantization, tensors, module, shape)
    weight = packing.scheme.decode(parts)
    if len(shape) == 2:
        x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0))
        product = packing.scheme.multiply(packing.scheme.prepare(parts), x)
        torch.testing.assert_close(product, x @ weight.t(), rtol=1e-4, atol=1e-4)
    return weight


def words_of(values: Tensor, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """Integers ``[num_rows, n]`` as int32 ``[num_rows, n * bits / 32]``, one after another from the lowest bit of the
    first word; with ``places``, integer j of every 8 is put where the ``places[j]``-th would be.
    """
    rows = []
    for row in values.tolist():
        stream = 0
        for j, value in enumerate(row):
            at = j if places is None else j // 8 * 8 + places[j % 8]
            stream |= int(value) << (at * bits)
        data = stream.to_bytes(len(row) * bits // 8, "little")
        rows.append([int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)])
    return torch.tensor(rows, dtype=torch.int32)


class _Allocations(TorchDispatchMode):
    """Remembers what every operation returned, so that no memory is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
        return result


def largest_temporary(unpack: Callable[[], Mapping[str, Tensor]], leaves: Mapping[str, Tensor]) -> int:
    """Bytes of the largest tensor that ``unpack`` makes, apart from what it is given and returns."""
    with _Allocations() as made:
        result = unpack()
    known = {t.untyped_storage().data_ptr() for t in (*leaves.values(), *result.values())}
    storages = [t.untyped_storage() for t in made.tensors]
    return max((storage.nbytes() for storage in storages if storage.data_ptr() not in known), default=0)
