"""Norm layers: root mean square and layer norm, with or without the residual sum before it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions


@dataclass(frozen=True)
class RmsNormDecl:
    """Root mean square norm with ``eps`` inside the root. ``unit_offset``: the checkpoint stores the weight as its
    distance to 1.
    """

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True)
class LayerNormDecl:
    """Layer norm with ``eps`` inside the root."""

    eps: float
    bias: bool = True


NormDecl = RmsNormDecl | LayerNormDecl


class RMSNorm(nn.Module):
    """Normalise the last dimension, of ``size``; the maths is the injected ops'."""

    def __init__(self, decl: RmsNormDecl, size: int, ops: TorchOps, options: TensorOptions) -> None:
        super().__init__()
        # A distance to 1 is small: the sum would lose what half precision keeps of it.
        dtype = torch.float32 if decl.unit_offset else options.dtype
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=options.device), requires_grad=False)
        self._decl = decl
        self._ops = ops

    def after_loading(self) -> None:
        """Turn the stored weight into the one that is multiplied; called once."""
        if self._decl.unit_offset:
            self.weight.data.add_(1.0)

    def stored_weight(self) -> Tensor:
        """The weight as checkpoints store it, whatever has been changed since loading."""
        return self.weight - 1.0 if self._decl.unit_offset else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._decl.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._decl.eps)


class LayerNorm(nn.Module):
    """Normalise the last dimension, of ``size``, to mean 0; the maths is the injected ops'."""

    def __init__(self, decl: LayerNormDecl, size: int, ops: TorchOps, options: TensorOptions) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=options.dtype, device=options.device), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if decl.bias:
            self.bias = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)
        self._eps = decl.eps
        self._ops = ops

    def after_loading(self) -> None:
        """Nothing to prepare."""

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        total = self._ops.add(residual, x)
        return self(total), total


Norm = RMSNorm | LayerNorm


def create_norm(decl: NormDecl, size: int, ops: TorchOps, options: TensorOptions) -> Norm:
    """The layer that ``decl`` describes, over ``size`` elements."""
    if isinstance(decl, LayerNormDecl):
        return LayerNorm(decl, size, ops, options)
    return RMSNorm(decl, size, ops, options)
