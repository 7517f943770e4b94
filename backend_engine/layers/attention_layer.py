"""``AttentionLayer``: project to q, k, v, normalise, rotate, attend through the injected backend, project back."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend_engine.attention.interface import AttentionSpec
from backend_engine.attention.paged_kv import PagedKv
from backend_engine.core.kv_spec import KvSpec
from backend_engine.layers.linear import Linear
from backend_engine.layers.norm import NormDecl, create_norm
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.layers.rotary import RopeDecl
from backend_engine.layers.smoothing import Rows, Smoothing


@dataclass(frozen=True)
class QkNormDecl:
    """A norm on queries and keys before they are rotated: of each head alone, or of all heads together."""

    norm: NormDecl
    per_head: bool = True


@dataclass(frozen=True)
class AttentionDecl:
    """Softmax attention over keys and values; see ``AttentionSpec`` for ``scale``, ``sliding_window``,
    ``logit_softcap`` and ``has_sinks``. ``rope``: ``None`` = queries and keys are not rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeDecl | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNormDecl | None = None
    sliding_window: int | None = None
    logit_softcap: float | None = None
    has_sinks: bool = False

    def cache_spec(self) -> KvSpec:
        """What the cache holds for a token."""
        return KvSpec(self.num_kv_heads, self.head_dim)

    def attention_spec(self, layer_idx: int, sliding_window: int | None) -> AttentionSpec:
        """The layer as an attention backend sees it."""
        return AttentionSpec(
            layer_idx=layer_idx,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            sliding_window=sliding_window,
            logit_softcap=self.logit_softcap,
            has_sinks=self.has_sinks,
        )


class AttentionLayer(nn.Module):
    """Self-attention of one layer over the paged cache. q, k and v are one product."""

    def __init__(
        self, decl: AttentionDecl, spec: AttentionSpec, hidden_size: int, rope_index: int | None, parts: ModelParts
    ) -> None:
        """``rope_index``: the layer's scheme among ``LayerStep.ropes``."""
        super().__init__()
        self.spec = spec
        self._decl = decl
        self._rope_index = rope_index
        self._ops = parts.ops
        self._backend = parts.attention
        quant, options = parts.quant, parts.options
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv_proj = Linear(hidden_size, (q_size, kv_size, kv_size), quant, options, decl.qkv_bias, spec.head_dim)
        self.o_proj = Linear(q_size, (hidden_size,), quant, options, decl.out_bias)
        if decl.qk_norm is not None:
            sizes = (spec.head_dim, spec.head_dim) if decl.qk_norm.per_head else (q_size, kv_size)
            self.q_norm, self.k_norm = (create_norm(decl.qk_norm.norm, size, parts.ops, options) for size in sizes)
        self.sinks: nn.Parameter | None = None
        if decl.has_sinks:
            sinks = torch.empty(spec.num_heads, dtype=options.dtype, device=options.device)
            self.sinks = nn.Parameter(sinks, requires_grad=False)

    def readers(self) -> tuple[Linear, ...]:
        """The products that read the layer's input."""
        return (self.qkv_proj,)

    def smoothable(self) -> list[Smoothing]:
        """See ``Smoothing``; those within the layer: values and what is made of them, unless heads share values."""
        if self.spec.num_kv_heads != self.spec.num_heads:
            return []
        q_size, k_size, v_size = self.qkv_proj.out_sizes
        return [Smoothing(Rows(self.qkv_proj, q_size + k_size, v_size), (self.o_proj,))]

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """``x [num_tokens, hidden_size]`` -> the same."""
        spec = self.spec
        num_tokens, num_rotated = x.shape[0], spec.num_heads + spec.num_kv_heads
        qkv = self.qkv_proj(x).view(num_tokens, -1, spec.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self._decl.qk_norm is None:
            qk = self._rotate(qk, step)
            q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        else:
            q, k = (self._rotate(part, step) for part in self._normalise(qk, self._decl.qk_norm.per_head))
        cache = step.caches[spec.layer_idx]
        assert isinstance(cache, PagedKv), f"layer {spec.layer_idx} has no cache of keys and values"
        heads = self._backend.forward(q, k, v, spec, cache, self.sinks)
        out: Tensor = self.o_proj(heads.reshape(num_tokens, -1))
        return out

    def _rotate(self, heads: Tensor, step: LayerStep) -> Tensor:
        """``heads [num_tokens, n, head_dim]`` at their positions."""
        if self._rope_index is None:
            return heads
        cos, sin = step.ropes[self._rope_index]
        if self._decl.rope is not None and self._decl.rope.is_interleaved:
            heads = self._ops.pair_halves(heads, cos.shape[-1])
        return self._ops.apply_rope(heads, cos, sin)

    def _normalise(self, qk: Tensor, per_head: bool) -> tuple[Tensor, Tensor]:
        q, k = qk[:, : self.spec.num_heads], qk[:, self.spec.num_heads :]
        if per_head:
            return self.q_norm(q), self.k_norm(k)
        # All heads of a token as one row; they lie side by side, so this is a view.
        return self.q_norm(q.flatten(1)).view(q.shape), self.k_norm(k.flatten(1)).view(k.shape)
