"""Attention over dense keys and values: the fused product where it can serve, the written-out softmax elsewhere.

Used by ``TorchAttention`` piece by piece. Knows no blocks and no rows.

With sinks (GPT-OSS, 2025) a head's softmax has one more score s that stands for no token. Where l is the logarithm of
the sum of the other scores' exponentials, that multiplies the result by ``exp(l) / (exp(l) + exp(s))``, the sigmoid of
``l - s``: so the fused product serves too, where it tells l.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.attention.interface import AttentionSpec

# Queries are taken in parts of at most so many scores (64 MiB in float32).
_MAX_SCORES = 2**24


def find_fused_with_sums() -> Any:
    """The fused product for CPUs that also gives the logarithms of the sums. It is a private operator of torch, so it
    is tried on a small case: ``None`` when this torch has none that gives the right answer.
    """
    q = torch.arange(8, dtype=torch.float32).view(1, 2, 2, 2) / 8
    k = q[:, :1]
    try:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        result, sums = fused(q, k, k, 0.0, True, attn_mask=None, scale=0.5)
        expected = F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5, enable_gqa=True)
        scores = (q[:, :, 1:] @ k.transpose(-1, -2) * 0.5).squeeze(2)
        is_right = torch.allclose(result, expected) and torch.allclose(sums[:, :, 1], scores.logsumexp(-1))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return fused if is_right else None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    spec: AttentionSpec,
    sinks: Tensor | None,
    fused_with_sums: Any,
) -> Tensor:
    """``q [batch, heads, length, head_dim]`` over ``k, v [batch, kv_heads, kv_length, head_dim]``, heads a multiple of
    kv_heads -> ``[batch, heads, length, width of a value]``.

    ``mask``: added to the scores, broadcast; without one ``is_causal`` tells whether a query sees only what is not
    behind it. ``sinks``: broadcast to ``[batch, heads, length]``. ``fused_with_sums``: see ``find_fused_with_sums``.
    """
    if spec.logit_softcap is not None or (sinks is not None and fused_with_sums is None):
        return _written_out(q, k, v[..., : spec.value_dim], mask, is_causal, spec, sinks)
    # Where the value is the beginning of the key it is taken whole: the fused product wants equal widths.
    if sinks is None:
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        result, sums = fused_with_sums(q, k, v, 0.0, is_causal, attn_mask=mask, scale=spec.scale)
        result = result * torch.sigmoid(sums - sinks).to(result.dtype).unsqueeze(-1)
    return result if spec.value_dim is None else result[..., : spec.value_dim]


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """The same, scores and softmax in float32 at least."""
    batch, heads, length, dim = q.shape
    kv_heads, kv_length, width = k.shape[1], k.shape[2], v.shape[3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(dtype).transpose(-1, -2), v.to(dtype)
    out = q.new_empty(batch, heads, length, width)
    step = max(1, _MAX_SCORES // (batch * heads * kv_length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        # The heads that share keys stand side by side: keys are read once for all.
        queries = q[:, :, start:stop].to(dtype).reshape(batch, kv_heads, -1, dim)
        scores = torch.matmul(queries, keys).view(batch, heads, stop - start, kv_length) * spec.scale
        if spec.logit_softcap is not None:
            scores = torch.tanh(scores / spec.logit_softcap) * spec.logit_softcap
        if mask is not None:
            scores = scores + mask.expand(*mask.shape[:-2], length, kv_length)[..., start:stop, :]
        elif is_causal:
            positions = torch.arange(kv_length, device=q.device)
            scores = scores.masked_fill(positions > positions[start:stop, None], float("-inf"))
        weights = scores.softmax(-1).view(batch, kv_heads, -1, kv_length)
        result = torch.matmul(weights, values).view(batch, heads, stop - start, width)
        if sinks is not None:
            share = torch.sigmoid(scores.logsumexp(-1) - sinks.expand(batch, heads, length)[..., start:stop])
            result = result * share.unsqueeze(-1)
        out[:, :, start:stop] = result
    return out
