"""``RMSNorm``: root mean square normalisation, with or without the residual sum before it."""

import torch
from torch import Tensor, nn

from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions


class RMSNorm(nn.Module):
    """Normalise the last dimension, of ``size``; the maths is the injected ops'."""

    def __init__(self, size: int, eps: float, ops: TorchOps, options: TensorOptions) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=options.dtype, device=options.device), requires_grad=False)
        self._eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)
