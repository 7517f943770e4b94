"""``LatentAttention``: attention whose cache holds one compressed vector a token for all heads (DeepSeek-V2, 2024).

Used by models like any mixer; attends through the injected backend. It never makes the keys and values of single
heads: a query q of a head scores a key made from the vector c as ``q . (K c) = (K^T q) . c``, so queries go into the
compressed space with K, and what is attended there comes back with the head's V.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend_engine.attention.interface import AttentionSpec
from backend_engine.attention.paged_kv import PagedKv
from backend_engine.core.kv_spec import LatentSpec
from backend_engine.layers.linear import Linear
from backend_engine.layers.norm import RMSNorm, RmsNormDecl
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.layers.rotary import RopeDecl
from backend_engine.layers.smoothing import Smoothing


@dataclass(frozen=True)
class LatentAttentionDecl:
    """Multi-head latent attention.

    kv_rank: width of the compressed vector that keys and values are made from; q_rank: the same for queries, ``None`` =
    queries are made from the input. nope_dim, rope_dim: parts of a query and key without and with rotation; value_dim:
    width of a head's value. eps: of the two norms on compressed vectors. qkv_bias: a bias on the compressing products
    of keys and values and of queries; out_bias: on the last product.
    """

    num_heads: int
    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeDecl
    eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False

    def cache_spec(self) -> LatentSpec:
        """What the cache holds for a token: the compressed vector and the rotated part of the key."""
        return LatentSpec(self.kv_rank + self.rope_dim)

    def attention_spec(self, layer_idx: int, sliding_window: int | None) -> AttentionSpec:
        """The layer as an attention backend sees it: all heads share one key, whose beginning is the value."""
        return AttentionSpec(
            layer_idx=layer_idx,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.kv_rank + self.rope_dim,
            scale=self.scale,
            sliding_window=sliding_window,
            value_dim=self.kv_rank,
        )


class LatentAttention(nn.Module):
    """Self-attention of one layer. ``kv_b_proj`` is filled by the loader, ``[num_heads * (nope_dim + value_dim),
    kv_rank]`` head by head, and turned into the two matrices of each head once that is done.
    """

    def __init__(
        self, decl: LatentAttentionDecl, spec: AttentionSpec, hidden_size: int, rope_index: int, parts: ModelParts
    ) -> None:
        """``rope_index``: the layer's scheme among ``LayerStep.ropes``."""
        super().__init__()
        self.spec = spec
        self._decl = decl
        self._rope_index = rope_index
        self._ops = parts.ops
        self._backend = parts.attention
        self._dtype = parts.options.dtype
        q_size = decl.num_heads * (decl.nope_dim + decl.rope_dim)
        norm = RmsNormDecl(decl.eps)
        quant, options = parts.quant, parts.options
        if decl.q_rank is None:
            self.q_proj = Linear(hidden_size, (q_size,), quant, options, bias=False)
        else:
            self.q_a_proj = Linear(hidden_size, (decl.q_rank,), quant, options, decl.qkv_bias)
            self.q_a_norm = RMSNorm(norm, decl.q_rank, parts.ops, options)
            self.q_b_proj = Linear(decl.q_rank, (q_size,), quant, options, bias=False)
        self.kv_a_proj = Linear(hidden_size, (decl.kv_rank + decl.rope_dim,), quant, options, decl.qkv_bias)
        self.kv_a_norm = RMSNorm(norm, decl.kv_rank, parts.ops, options)
        kv_size = decl.num_heads * (decl.nope_dim + decl.value_dim)
        self.kv_b_proj: Linear | None = Linear(decl.kv_rank, (kv_size,), quant, options, bias=False)
        self.o_proj = Linear(decl.num_heads * decl.value_dim, (hidden_size,), quant, options, decl.out_bias)
        # [num_heads, nope_dim, kv_rank] and [num_heads, kv_rank, value_dim] after loading.
        self._into_keys: Tensor | None = None
        self._into_values: Tensor | None = None

    def after_loading(self) -> None:
        """Take ``kv_b_proj`` apart and let go of it; called once, after its own preparation."""
        assert self.kv_b_proj is not None, "after_loading ran twice"
        weight = self.kv_b_proj.quant.dequantize(self.kv_b_proj).to(self._dtype)
        by_head = weight.view(self._decl.num_heads, -1, self._decl.kv_rank)
        self._into_keys = by_head[:, : self._decl.nope_dim].contiguous()
        self._into_values = by_head[:, self._decl.nope_dim :].transpose(1, 2).contiguous()
        self.kv_b_proj = None

    def readers(self) -> tuple[Linear, ...]:
        """The products that read the layer's input."""
        return (self.q_proj if self._decl.q_rank is None else self.q_a_proj, self.kv_a_proj)

    def smoothable(self) -> list[Smoothing]:
        """See ``Smoothing``; those within the layer. What becomes of keys and values is no product once loaded."""
        return [] if self._decl.q_rank is None else [Smoothing(self.q_a_norm, (self.q_b_proj,))]

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """``x [num_tokens, hidden_size]`` -> the same."""
        assert self._into_keys is not None and self._into_values is not None, "forward before after_loading"
        decl, num_tokens = self._decl, x.shape[0]
        q = self._queries(x).view(num_tokens, decl.num_heads, -1)
        compressed, k_rope = self.kv_a_proj(x).split((decl.kv_rank, decl.rope_dim), -1)
        q_rope, k_rope = self._rotate(q[..., decl.nope_dim :], k_rope.unsqueeze(1), step)
        query = torch.bmm(q[..., : decl.nope_dim].transpose(0, 1), self._into_keys).transpose(0, 1)
        query = torch.cat((query, q_rope), -1)
        key = torch.cat((self.kv_a_norm(compressed).unsqueeze(1), k_rope), -1)
        cache = step.caches[self.spec.layer_idx]
        assert isinstance(cache, PagedKv), f"layer {self.spec.layer_idx} has no cache of compressed vectors"
        attended = self._backend.forward(query, key, key[..., : decl.kv_rank], self.spec, cache)
        heads = torch.bmm(attended.transpose(0, 1), self._into_values).transpose(0, 1)
        out: Tensor = self.o_proj(heads.reshape(num_tokens, -1))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        out: Tensor = self.q_proj(x) if self._decl.q_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        return out

    def _rotate(self, q: Tensor, k: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
        """The rotated parts of queries ``[num_tokens, num_heads, rope_dim]`` and of the key that all heads share."""
        cos, sin = step.ropes[self._rope_index]
        both = torch.cat((q, k), 1)
        if self._decl.rope.is_interleaved:
            both = self._ops.pair_halves(both, self._decl.rope_dim)
        both = self._ops.apply_rope(both, cos, sin)
        return both[:, : self._decl.num_heads], both[:, self._decl.num_heads :]
