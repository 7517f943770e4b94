"""``AttentionLayer``: project to q, k, v, rotate, attend through the injected backend, project back."""

from torch import Tensor, nn

from backend_engine.attention.interface import AttentionBackend, AttentionSpec
from backend_engine.layers.linear import Linear
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import QuantMethod, TensorOptions


class AttentionLayer(nn.Module):
    """Self-attention of one layer over the paged cache. q, k and v are one product."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        biases: tuple[bool, bool],
        ops: TorchOps,
        backend: AttentionBackend,
        quant: QuantMethod,
        options: TensorOptions,
    ) -> None:
        """``biases``: whether the qkv and the output projection have one."""
        super().__init__()
        self.spec = spec
        self._num_rotated = spec.num_heads + spec.num_kv_heads
        self._ops = ops
        self._backend = backend
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv_proj = Linear(hidden_size, (q_size, kv_size, kv_size), quant, options, biases[0])
        self.o_proj = Linear(q_size, (hidden_size,), quant, options, biases[1])

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: Tensor) -> Tensor:
        """``x [num_tokens, hidden_size]``; ``kv`` is this layer's part of the pool."""
        spec = self.spec
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x).view(num_tokens, -1, spec.head_dim)
        rotated = self._ops.apply_rope(qkv[:, : self._num_rotated], *rope)
        q, k, v = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], qkv[:, self._num_rotated :]
        heads = self._backend.forward(q, k, v, spec, kv)
        out: Tensor = self.o_proj(heads.reshape(num_tokens, -1))
        return out
