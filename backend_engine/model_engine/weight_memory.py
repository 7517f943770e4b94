"""``weight_bytes``: the memory that a loaded model's weights take, in whatever form each layer keeps them.

Called once by the composition root, for the statistics. Changes nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of ``model``: parameters, buffers and packed weights; a shared one counts once."""
    return sum({_identity(tensor): _num_bytes(tensor) for tensor in _tensors(model)}.values())


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        packed = [tensor for part in vars(module).get("packed_parts", ()) for tensor in part.tensors.values()]
        dense = vars(module).get("dense_weight")
        if dense is not None:
            # The bias in there is a copy of a few numbers.
            packed += [tensor for tensor in (dense.data, dense.scales) if tensor is not None]
        kept = (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values(), *packed)
        yield from (tensor for tensor in kept if isinstance(tensor, Tensor))


def _num_bytes(tensor: Tensor) -> int:
    # A packed tensor is opaque: it has no storage to ask.
    return tensor.untyped_storage().nbytes() if _has_storage(tensor) else tensor.numel() * tensor.element_size()


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _has_storage(tensor) else id(tensor)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
