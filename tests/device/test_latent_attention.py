"""Multi-head latent attention against a formula that makes the keys and values of every head, in float64.

Requests come in chunks and single tokens, so compressed vectors are written and read back through the cache.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.attention.paged_kv import paged_kv
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.core.kv_spec import LatentSpec
from backend_engine.layers.latent_attention import LatentAttention, LatentAttentionDecl
from backend_engine.layers.parts import LayerStep, ModelParts
from backend_engine.layers.rotary import NoScaling, RopeDecl, Rotary
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized
from tests.support.attention_cache import CPU, metadata_of

HIDDEN, SIZE, LEN = 12, 4, 24
# Rows of (request, tokens now), step by step.
STEPS = (((0, 7), (1, 3)), ((1, 4), (0, 1)), ((0, 1), (1, 1)), ((0, 2),))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, decl: LatentAttentionDecl) -> Tensor:
    """``x [length, heads, rope_dim]`` at positions 0, 1, ...; pairs by the layout of the checkpoint."""
    out, half = torch.zeros_like(x), decl.rope_dim // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if decl.rope.is_interleaved else (i, i + half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * decl.rope.theta ** (-2 * i / decl.rope_dim)
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return out


def direct(x: Tensor, w: dict[str, Tensor], decl: LatentAttentionDecl) -> Tensor:
    """Output for all tokens ``x [length, hidden]`` of one request."""

    def product(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    length, heads, nope = len(x), decl.num_heads, decl.nope_dim
    if decl.q_rank is None:
        q = product("q_proj", x)
    else:
        q = product("q_b_proj", rms_norm(product("q_a_proj", x), w["q_a_norm.weight"], decl.eps))
    q = q.view(length, heads, -1)
    compressed, k_rope = product("kv_a_proj", x).split((decl.kv_rank, decl.rope_dim), -1)
    kv = product("kv_b_proj", rms_norm(compressed, w["kv_a_norm.weight"], decl.eps)).view(length, heads, -1)
    k_rope = rotate(k_rope.unsqueeze(1), decl).expand(-1, heads, -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], decl)), -1)
    k = torch.cat((kv[..., :nope], k_rope), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * decl.scale
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return product("o_proj", torch.einsum("hqk,khd->qhd", weights, kv[..., nope:]).reshape(length, -1))


def build(decl: LatentAttentionDecl, seed: int) -> tuple[LatentAttention, dict[str, Tensor]]:
    """The layer filled with random weights, and the same weights in float64."""
    parts = ModelParts(TorchOps(), TorchAttention(TorchOps(), CPU), Unquantized(), TensorOptions(torch.float32, CPU))
    layer = LatentAttention(decl, decl.attention_spec(0, None), HIDDEN, 0, parts)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in layer.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        weights[name] = parameter.detach().double()
    for module in reversed(list(layer.modules())):
        if hasattr(module, "after_loading"):
            module.after_loading()
    return layer, weights


decls = st.builds(
    LatentAttentionDecl,
    num_heads=st.integers(1, 5),
    kv_rank=st.integers(1, 9),
    q_rank=st.none() | st.integers(1, 7),
    nope_dim=st.integers(1, 6),
    rope_dim=st.just(4),
    value_dim=st.integers(1, 6),
    scale=st.sampled_from((0.2, 0.7)),
    rope=st.builds(RopeDecl, st.just(100.0), st.just(NoScaling()), st.just(4), st.booleans()),
    eps=st.sampled_from((1e-6, 0.1)),
    qkv_bias=st.booleans(),
    out_bias=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(decls, st.integers(0, 999))
def test_it_is_the_attention_of_the_keys_and_values_that_the_vectors_stand_for(
    decl: LatentAttentionDecl, seed: int
) -> None:
    layer, weights = build(decl, seed)
    x = torch.randn(2, LEN, HIDDEN, generator=torch.Generator().manual_seed(seed))
    expected = [direct(x[request].double(), weights, decl) for request in range(2)]
    tables = np.random.default_rng(seed).permutation(2 * LEN // SIZE).reshape(2, -1).astype(np.int32)
    (width,) = decl.cache_spec()
    cache = paged_kv(torch.full((tables.size, 1, SIZE, 1, width), math.nan))
    rotary = Rotary(decl.rope, TorchOps(), TensorOptions(torch.float32, CPU))
    done = [0, 0]
    for rows in STEPS:
        spans = [(request, done[request], done[request] + count) for request, count in rows]
        metadata = metadata_of(
            [count for _, count in rows], [stop for _, _, stop in spans], tables[[r for r, _ in rows]], SIZE
        )
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        layer._backend.prepare(metadata)
        step = LayerStep((rotary(positions, positions + 1),), (cache,), metadata, None)
        found = layer(torch.cat([x[request, start:stop] for request, start, stop in spans]), step)
        wanted = torch.cat([expected[request][start:stop] for request, start, stop in spans])
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        for request, _, stop in spans:
            done[request] = stop


DECL = LatentAttentionDecl(3, 6, None, 4, 4, 5, 0.3, RopeDecl(100.0, NoScaling(), 4))


def test_the_cache_holds_one_vector_a_token_and_the_backend_sees_one_shared_key() -> None:
    assert DECL.cache_spec() == LatentSpec(10)
    spec = DECL.attention_spec(7, 5)
    assert (spec.layer_idx, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim) == (7, 3, 1, 10, 6)
    assert (spec.scale, spec.sliding_window) == (0.3, 5)


def test_the_matrix_of_keys_and_values_is_kept_once() -> None:
    layer, weights = build(DECL, 0)
    assert "kv_b_proj.weight" in weights and layer.kv_b_proj is None
    with pytest.raises(AssertionError, match="after_loading ran twice"):
        layer.after_loading()
