"""``replace_norms``: root mean square norms of a transformers model, computed by one operation in place of six.

Called once, while a model is loaded. A module is replaced only after it gave the same numbers: its class name is a hint
where to look and proves nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NAME = "RMSNorm"
_EPS_NAMES = ("variance_epsilon", "eps")
# Offsets of the stored weight from the factor.
_OFFSETS = (0.0, 1.0)
_TOLERANCE = 1e-6


class FusedRmsNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._shape = tuple(weight.shape)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)


def replace_norms(model: nn.Module) -> int:
    """Replace what can be, in a model whose numbers are float32; returns how many modules that were."""
    made: dict[nn.Module, FusedRmsNorm] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in made:
                fused = _fused(child)
                if fused is None:
                    continue
                made[child] = fused
            setattr(parent, name, made[child])
    return len(made)


def _fused(norm: nn.Module) -> FusedRmsNorm | None:
    """The replacement of ``norm``, ``None`` for one that is something else."""
    weight = getattr(norm, "weight", None)
    tensors = [*norm.named_parameters(), *norm.named_buffers()]
    if _NAME not in type(norm).__name__ or len(tensors) != 1 or not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    eps = next((getattr(norm, name) for name in _EPS_NAMES if hasattr(norm, name)), None)
    if not isinstance(eps, float) or weight.dtype != torch.float32:
        return None
    # Rows so small that eps counts, and usual ones.
    rows = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device)
    rows[:2] *= eps**0.5
    wanted = norm(rows.unsqueeze(0)).squeeze(0)
    for offset in _OFFSETS:
        fused = FusedRmsNorm(weight.detach() + offset if offset else weight.detach(), eps)
        found = fused(rows)
        if wanted.shape == found.shape and torch.allclose(found, wanted, rtol=_TOLERANCE * 4, atol=_TOLERANCE):
            return fused
    return None
