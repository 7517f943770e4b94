"""Activations in torch whose bits depend on nothing but the number: torch's own ones compute what is left over behind
whole vectors in another way on some processors, so that the last bit would depend on an element's place in the batch.

Called by layers and by ``TorchOps``. On a GPU torch's own are taken, which have no such rest.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Beyond it, torch's softplus is the number itself.
_SOFTPLUS_THRESHOLD = 20.0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.exp(-_wide(x)).add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    if x.device.type != "cpu":
        return F.silu(x)
    wide = _wide(x)
    return (wide / torch.exp(-wide).add_(1)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, and ``x`` where that is more than 20."""
    if x.device.type != "cpu":
        return F.softplus(x)
    wide = _wide(x)
    return torch.where(wide > _SOFTPLUS_THRESHOLD, wide, torch.exp(wide).log1p_()).to(x.dtype)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Gaussian error linear unit; ``approximate``: ``none`` or ``tanh``."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate=approximate)
    wide = _wide(x)
    if approximate == "none":
        return (torch.erf(wide * math.sqrt(0.5)).add_(1) * (wide * 0.5)).to(x.dtype)
    inner = (wide * wide * wide * 0.044715 + wide) * math.sqrt(2 / math.pi)
    return (torch.tanh(inner).add_(1) * (wide * 0.5)).to(x.dtype)
