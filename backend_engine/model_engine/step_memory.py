"""``estimate_step``: the memory that a full step needs beside weights and KV cache. An estimate, by a stated formula.

Called by whoever plans a server's memory. Measures and allocates nothing; allocators keep more than is in use.
"""

from typing import NamedTuple

from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.latent_attention import LatentAttentionDecl
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.models.arch_spec import ArchSpec, MixerDecl, MlpDecl

# Scores that the written-out softmax holds at a time, see ``attention/torch_scores.py``.
_MAX_SCORES = 2**24
_FLOAT32 = 4


class StepBytes(NamedTuple):
    """stream: the residual stream, its next sum and its norm. mixer, mlp: the largest layer's own. logits: float32
    ``[max_batch_size, vocab_size]``.
    """

    stream: int
    mixer: int
    mlp: int
    logits: int

    @property
    def total(self) -> int:
        """A mixer and a feed-forward layer never run at once."""
        return self.stream + max(self.mixer, self.mlp) + self.logits


def estimate_step(
    spec: ArchSpec, vocab_size: int, limits: EngineLimits, cached_tokens: int, element_bytes: int
) -> StepBytes:
    """A step of ``max_num_tokens`` tokens, of ``max_batch_size`` requests that together see ``cached_tokens`` tokens.

    ``spec``: of one rank; every rank holds logits of the whole vocabulary. ``element_bytes``: of the dtype.
    Attention: q, k, v, their rotated copies and the result; K and V of all tokens seen as dense copies; the mask
    ``[max_num_tokens, max_seq_len]``. Feed-forward: the inner products and their activation; with experts also the
    tokens' ``top_k`` copies before and after them.
    """
    tokens, seen = limits.max_num_tokens, min(cached_tokens, limits.max_batch_size * limits.max_seq_len)
    layers = set(spec.layers)
    return StepBytes(
        stream=3 * tokens * spec.hidden_size * element_bytes,
        mixer=max(_mixer(layer.mixer, limits, seen, element_bytes) for layer in layers),
        mlp=max(_mlp(layer.mlp, tokens, spec.hidden_size, element_bytes) for layer in layers),
        logits=limits.max_batch_size * vocab_size * _FLOAT32,
    )


def _mixer(decl: MixerDecl, limits: EngineLimits, seen: int, element_bytes: int) -> int:
    tokens = limits.max_num_tokens
    if isinstance(decl, AttentionDecl):
        q, kv = decl.num_heads * decl.head_dim, decl.num_kv_heads * decl.head_dim
        numbers = tokens * (3 * q + 3 * kv) + seen * 2 * kv + tokens * limits.max_seq_len
        is_written_out = decl.logit_softcap is not None or decl.has_sinks
        scores = min(_MAX_SCORES, decl.num_heads * tokens * limits.max_seq_len) if is_written_out else 0
        return numbers * element_bytes + 2 * scores * _FLOAT32
    if isinstance(decl, LatentAttentionDecl):
        latent = decl.kv_rank + decl.rope_dim
        heads = decl.num_heads * (decl.nope_dim + decl.rope_dim + 2 * latent + decl.kv_rank + decl.value_dim)
        return (tokens * (heads + 3 * latent) + seen * latent + tokens * limits.max_seq_len) * element_bytes
    return tokens * (3 * decl.conv_size + 3 * decl.inner_size + decl.num_heads) * _FLOAT32


def _mlp(decl: MlpDecl | None, tokens: int, hidden_size: int, element_bytes: int) -> int:
    if decl is None:
        return 0
    if isinstance(decl, MoeDecl):
        copies = 2 * decl.routing.top_k * hidden_size
        numbers = copies + 3 * max(decl.size, decl.shared_size)
        return tokens * (numbers * element_bytes + 3 * decl.routing.num_experts * _FLOAT32)
    return tokens * (3 if isinstance(decl, GatedMlpDecl) else 2) * decl.size * element_bytes
