"""Requests over a shuffled block cache beside a dense attention that knows nothing of blocks.

Used by the tests of attention backends. The pool starts full of NaN, so reading a place that nobody wrote is seen at
once.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec
from backend_engine.attention.paged_kv import KvScales, paged_kv
from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.core.kv_spec import KvSpec, LatentSpec
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
SPEC = AttentionSpec(layer_idx=0, num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3)
LATENT = AttentionSpec(layer_idx=0, num_heads=6, num_kv_heads=1, head_dim=8, scale=0.3, value_dim=5)
SIZE = 4
MAX_LEN = 24 * SIZE
LAYOUTS = {"paged": SIZE, "contiguous": MAX_LEN, "contiguous_of_prime_length": MAX_LEN + 1}
Row = tuple[int, int]  # request, tokens now
# Keys (0) or values (1) as a cache holds them.
Rounding = Callable[[torch.Tensor, int], torch.Tensor]


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    """Fill a pool with NaN, and with any number where its tensors cannot hold one."""
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 77)


def sinks_of(spec: AttentionSpec) -> torch.Tensor | None:
    """A score for each head, from far below to far above the scores of the tokens."""
    return torch.linspace(-4, 6, spec.num_heads) if spec.has_sinks else None


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The last ``len(q)`` tokens of one request against all of its keys, head by head, in float64."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    first, sinks = len(k) - len(q), sinks_of(spec)
    for head in range(spec.num_heads):
        keys, values = (t[:, head // (spec.num_heads // spec.num_kv_heads)].double() for t in (k, v))
        for i in range(len(q)):
            low = 0 if spec.sliding_window is None else max(0, first + i + 1 - spec.sliding_window)
            scores = keys[low : first + i + 1] @ q[i, head].double() * spec.scale
            if spec.logit_softcap is not None:
                scores = torch.tanh(scores / spec.logit_softcap) * spec.logit_softcap
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else math.exp(sinks[head]))
            out[i, head] = weights / total @ values[low : first + i + 1]
    return out


def metadata_of(q_lens: list[int], kv_lens: list[int], tables: np.ndarray, size: int) -> AttentionMetadata:
    """Of rows that bring the last ``q_lens`` of their ``kv_lens`` tokens; ``tables [B, max_blocks]`` int32."""
    counts, totals = np.array(q_lens, np.int32), np.array(kv_lens, np.int32)
    slots = [
        int(table[p // size]) * size + p % size
        for table, count, total in zip(tables, q_lens, kv_lens, strict=True)
        for p in range(total - count, total)
    ]
    num_contexts = int((counts > 1).sum())
    return AttentionMetadata(
        num_contexts=num_contexts,
        num_ctx_tokens=int(counts[:num_contexts].sum()),
        tokens_per_block=size,
        q_lens=torch.from_numpy(counts),
        kv_lens=torch.from_numpy(totals),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        q_lens_host=counts,
        kv_lens_host=totals,
        block_tables_host=tables,
    )


class Cache:
    """One layer's cache: requests with shuffled blocks; remembers all keys and values for ``dense``."""

    def __init__(
        self,
        num_requests: int,
        spec: AttentionSpec,
        dtype: torch.dtype,
        seed: int = 0,
        size: int = SIZE,
        kv_dtype: torch.dtype | None = None,
        kv_scales: KvScales = KvScales(),
        rounding: Rounding = lambda x, plane: x,
    ) -> None:
        """``dtype``: of q, k, v, and of the cache unless ``kv_dtype`` says otherwise. ``rounding``: what the cache does
        to keys and values.
        """
        self.spec, self.dtype, self.size, self.rounding = spec, dtype, size, rounding
        self.backend: AttentionBackend = TorchAttention(TorchOps(), CPU)
        self.random = [torch.Generator().manual_seed(100 * seed + i) for i in range(num_requests)]
        self.max_blocks = -(-MAX_LEN // size)
        ids = np.random.default_rng(seed).permutation(num_requests * self.max_blocks)
        self.tables = ids.reshape(num_requests, self.max_blocks).astype(np.int32)
        stored = KvSpec(spec.num_kv_heads, spec.head_dim) if spec.value_dim is None else LatentSpec(spec.head_dim)
        pool = KVPool([stored], len(ids), size, kv_dtype or dtype, CPU)
        spoil(pool.tensors)
        self.kv = pool.tensors[0]
        self.paged = paged_kv(pool.layers[0], kv_scales)
        empty = torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=dtype)
        self.keys, self.values = [empty] * num_requests, [empty[..., : spec.value_dim]] * num_requests

    def draw(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of the rows' new tokens; a request's values do not depend on who else is in the step."""
        heads, dim = self.spec.num_heads, self.spec.head_dim
        all_heads = heads + 2 * self.spec.num_kv_heads
        drawn = [torch.randn(count, all_heads, dim, generator=self.random[request]) for request, count in rows]
        q, k, v = torch.cat(drawn).to(self.dtype).split((heads, self.spec.num_kv_heads, self.spec.num_kv_heads), 1)
        return q, k, v if self.spec.value_dim is None else k[..., : self.spec.value_dim]

    def step(self, rows: list[Row], is_first_layer: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of (request, new tokens), those with one token last; returns what came out and what should.
        ``is_first_layer``: the backend is prepared; another layer of the step finds it so.
        """
        q, k, v = self.draw(rows)
        expected, start = [], 0
        for request, count in rows:
            new = slice(start, start + count)
            keys = self.rounding(k[new], 0)
            values = self.rounding(v[new], 1) if self.spec.value_dim is None else keys[..., : self.spec.value_dim]
            self.keys[request] = torch.cat((self.keys[request], keys))
            self.values[request] = torch.cat((self.values[request], values))
            expected.append(dense(q[new], self.keys[request], self.values[request], self.spec))
            start += count
        if is_first_layer:
            kv_lens = [len(self.keys[request]) for request, _ in rows]
            tables = self.tables[[request for request, _ in rows]]
            self.backend.prepare(metadata_of([count for _, count in rows], kv_lens, tables, self.size))
        return self.backend.forward(q, k, v, self.spec, self.paged, sinks_of(self.spec)), torch.cat(expected)
