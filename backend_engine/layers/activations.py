"""Activations of the feed-forward layers, by the names that config.json uses.

Looked up by the model families; applied by the layers through the injected ops.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from backend_engine.ops.torch_ops import TorchOps

# From the first product's output to the second's input. A gated one takes gate and up side by side,
# ``[num_tokens, 2 * size]``, and gives ``[num_tokens, size]``; a plain one keeps the width.
Activation = Callable[[TorchOps, Tensor], Tensor]


@dataclass(frozen=True)
class ClampedSwiglu:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` with the gate at most ``limit`` and up within ``+-limit``."""

    alpha: float
    limit: float

    def __call__(self, ops: TorchOps, x: Tensor) -> Tensor:
        return ops.clamped_swiglu(x, self.alpha, self.limit)


# Each is ``f(gate) * up``; see ``multiplies_up``.
GATED: dict[str, Activation] = {
    "silu": lambda ops, x: ops.silu_and_mul(x),
    "swish": lambda ops, x: ops.silu_and_mul(x),
    "gelu": lambda ops, x: ops.gelu_and_mul(x, "none"),
    "gelu_pytorch_tanh": lambda ops, x: ops.gelu_and_mul(x, "tanh"),
    "gelu_new": lambda ops, x: ops.gelu_and_mul(x, "tanh"),
    "relu": lambda ops, x: ops.relu_and_mul(x),
}
PLAIN: dict[str, Activation] = {
    "gelu": lambda ops, x: ops.gelu(x, "none"),
    "gelu_pytorch_tanh": lambda ops, x: ops.gelu(x, "tanh"),
    "gelu_new": lambda ops, x: ops.gelu(x, "tanh"),
    "gelu_fast": lambda ops, x: ops.gelu(x, "tanh"),
    "relu": lambda ops, x: ops.relu(x),
    "relu2": lambda ops, x: ops.relu(x).square(),
    "silu": lambda ops, x: ops.silu(x),
}


def multiplies_up(act: Activation) -> bool:
    """Whether a gated activation is known to be linear in ``up``."""
    return any(act is known for known in GATED.values())
