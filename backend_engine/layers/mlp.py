"""``GatedMlp``: ``down(silu(gate(x)) * up(x))`` with gate and up fused into one product."""

from torch import Tensor, nn

from backend_engine.layers.linear import Linear
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import QuantMethod, TensorOptions


class GatedMlp(nn.Module):
    """``size`` is the inner width; the maths is the injected ops'."""

    def __init__(
        self, hidden_size: int, size: int, bias: bool, ops: TorchOps, quant: QuantMethod, options: TensorOptions
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, (size, size), quant, options, bias)
        self.down_proj = Linear(size, (hidden_size,), quant, options, bias)
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._ops.silu_and_mul(self.gate_up_proj(x)))
        return out
