"""Operators: ``TorchOps`` with one operation done in another way. Chosen by the parameter ``operators``."""

from torch import Tensor

from backend_engine.ops.torch_ops import TorchOps


class Float32NormOps(TorchOps):
    """Normalises in float32, whatever the model's dtype; all else is inherited."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x.float(), weight.float(), eps).to(x.dtype)
