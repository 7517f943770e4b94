"""``TorchAttention``: the reference backend, any device and dtype; accepts all that the interface can express.

Rows with one new token are gathered from their blocks and computed in a few padded groups; rows with more
are computed one by one. Long blocks, as a contiguous cache has, are read and zeroed in parts. Used by layers through
``AttentionBackend``; never sees requests.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec, IntArray
from backend_engine.ops.torch_ops import TorchOps

# A further group costs about as much as this many padded tokens.
_GROUP_COST_TOKENS = 1024
# Longer blocks are read in parts of at most this many tokens: a text that fills a little of one is not padded to it.
_MAX_PART_TOKENS = 64


@dataclass
class _Piece:
    """Rows that are computed together: ``n`` rows of ``q_len`` new tokens, keys padded to ``kv_len``.

    ``tokens``: a slice of the step's tokens, or their indices ``[n]`` when q_len is 1. ``pool_rows``: index of
    the parts of K, then those of V, in the pool seen as ``[num_parts, part_len, ...]``; ``None`` when k and v of this
    step are all there is. ``masks``: additive masks by window, made when a layer first asks.
    """

    tokens: slice | Tensor
    q_len: int
    kv_len: int
    kv_lens: IntArray
    pool_rows: Tensor | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


class TorchAttention(AttentionBackend):
    """See the module. ``ops`` appends keys and values; ``device`` is where the pool lies."""

    name = "torch"
    preference = 0

    def __init__(self, ops: TorchOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._pieces: list[_Piece] = []
        self._kv_rows: tuple[Tensor, Tensor] | None = None
        self._part_len = 1
        self._fresh_parts: Tensor | None = None

    @classmethod
    def unsupported(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[str]:
        if not dtype.is_floating_point:
            return [f"dtype {dtype} is not a floating point type"]
        return []

    def prepare(self, metadata: AttentionMetadata) -> None:
        q_lens, kv_lens = metadata.q_lens_host, metadata.kv_lens_host
        starts = np.cumsum(q_lens) - q_lens
        self._kv_rows = self._ops.kv_rows(metadata.slot_mapping, metadata.tokens_per_block)
        self._part_len = _part_len(metadata.tokens_per_block)
        self._fresh_parts = self._find_fresh_parts(metadata)
        self._pieces = [self._long_piece(metadata, int(row), int(starts[row])) for row in np.flatnonzero(q_lens > 1)]
        single = np.flatnonzero(q_lens == 1)
        if len(single):
            groups = _group_by_length(single, kv_lens)
            self._pieces += [self._short_piece(metadata, rows, starts[rows], len(groups) == 1) for rows in groups]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: Tensor) -> Tensor:
        assert self._kv_rows is not None, "forward before prepare"
        if self._fresh_parts is not None:
            self._parts(kv).index_fill_(0, self._fresh_parts, 0)
        self._ops.append_kv(k, v, kv, self._kv_rows)
        if len(self._pieces) == 1:
            return self._attend(self._pieces[0], q, k, v, spec, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for piece in self._pieces:
            out[piece.tokens] = self._attend(piece, q[piece.tokens], k, v, spec, kv)
        return out

    def _find_fresh_parts(self, metadata: AttentionMetadata) -> Tensor | None:
        """Parts whose first slot, but not whose last, is written now. Their tail is zeroed: a masked weight is
        zero, but zero times the NaN that an earlier owner may have left would still be NaN.
        """
        size = self._part_len
        kv_lens = metadata.kv_lens_host
        last = (kv_lens - 1) // size
        is_fresh = (last * size >= kv_lens - metadata.q_lens_host) & (kv_lens % size != 0)
        rows = np.flatnonzero(is_fresh)
        if not len(rows):
            return None
        return self._pool_rows(metadata, rows, last[rows, None])

    def _upload(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)

    def _parts(self, kv: Tensor) -> Tensor:
        """The pool of a layer as ``[num_parts, part_len, num_kv_heads, head_dim]``."""
        return kv.view(-1, self._part_len, *kv.shape[3:])

    def _pool_rows(self, metadata: AttentionMetadata, rows: IntArray, parts: IntArray) -> Tensor:
        """Where parts ``[len(rows), n]`` of the rows' texts lie in the pool: all keys, then all values."""
        per_block = metadata.tokens_per_block // self._part_len
        blocks = metadata.block_tables_host[rows[:, None], parts // per_block].astype(np.int64)
        keys = 2 * per_block * blocks + parts % per_block
        return self._upload(np.stack((keys, keys + per_block)).reshape(-1))

    def _long_piece(self, metadata: AttentionMetadata, row: int, start: int) -> _Piece:
        q_len, kv_len = int(metadata.q_lens_host[row]), int(metadata.kv_lens_host[row])
        pool_rows = None
        if kv_len > q_len:
            parts = np.arange(-(-kv_len // self._part_len))
            pool_rows = self._pool_rows(metadata, np.array([row]), parts[None])
        kv_lens = metadata.kv_lens_host[row : row + 1]
        return _Piece(slice(start, start + q_len), q_len, kv_len, kv_lens, pool_rows)

    def _short_piece(self, metadata: AttentionMetadata, rows: IntArray, tokens: IntArray, is_only: bool) -> _Piece:
        kv_lens = metadata.kv_lens_host[rows]
        kv_len = int(kv_lens.max())
        parts = np.arange(-(-kv_len // self._part_len))
        # Padding points at a part of the row's own.
        is_padding = parts * self._part_len >= kv_lens[:, None]
        pool_rows = self._pool_rows(metadata, rows, np.where(is_padding, 0, parts))
        in_order = is_only and bool(np.all(np.diff(tokens) == 1))
        where = slice(int(tokens[0]), int(tokens[-1]) + 1) if in_order else self._upload(tokens)
        return _Piece(where, 1, kv_len, kv_lens, pool_rows)

    def _attend(self, piece: _Piece, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kv: Tensor) -> Tensor:
        """q ``[n * q_len, num_heads, head_dim]`` of this piece against its keys; same shape out."""
        num_rows, heads, dim = len(piece.kv_lens), spec.num_kv_heads, spec.head_dim
        if piece.pool_rows is None:
            keys, values = k[piece.tokens].unsqueeze(0), v[piece.tokens].unsqueeze(0)
        else:
            gathered = self._parts(kv).index_select(0, piece.pool_rows)
            keys, values = gathered.view(2, num_rows, -1, heads, dim)[:, :, : piece.kv_len].unbind(0)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        mask = self._mask(piece, spec.sliding_window, q.dtype)
        if piece.q_len == 1:
            # The heads that share keys stand where a sequence of queries would: keys are read once for all.
            query = q.view(num_rows, heads, -1, dim) if q.is_contiguous() else q.reshape(num_rows, heads, -1, dim)
            result = _attention(query, keys, values, mask, False, spec)
            return result.reshape(num_rows, spec.num_heads, dim)
        is_causal = mask is None
        result = _attention(q.transpose(0, 1).unsqueeze(0), keys, values, mask, is_causal, spec)
        return result.squeeze(0).transpose(0, 1)

    def _mask(self, piece: _Piece, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """0 where a query sees a key and -inf elsewhere, ``[n, 1, 1, kv_len]`` or ``[q_len, kv_len]``;
        ``None`` when everything (one new token) or exactly the past (a whole prompt) is seen.
        """
        if window in piece.masks:
            return piece.masks[window]
        longest = int(piece.kv_lens.max())
        is_windowed = window is not None and longest > window
        mask = None
        if piece.q_len == 1:
            needs_mask = is_windowed or int(piece.kv_lens.min()) < longest
            query_positions = self._upload(piece.kv_lens - 1).view(-1, 1, 1, 1)
        else:
            needs_mask = is_windowed or piece.kv_len > piece.q_len
            query_positions = torch.arange(piece.kv_len - piece.q_len, piece.kv_len, device=self._device).unsqueeze(1)
        if needs_mask:
            key_positions = torch.arange(piece.kv_len, device=self._device)
            is_seen = key_positions <= query_positions
            if window is not None:
                is_seen &= key_positions > query_positions - window
            mask = torch.zeros(is_seen.shape, dtype=dtype, device=self._device).masked_fill_(~is_seen, float("-inf"))
        piece.masks[window] = mask
        return mask


def _part_len(tokens_per_block: int) -> int:
    """The block, or the longest part of at most ``_MAX_PART_TOKENS`` that it can be cut into without a rest."""
    return next(n for n in range(min(tokens_per_block, _MAX_PART_TOKENS), 0, -1) if tokens_per_block % n == 0)


def _group_by_length(rows: IntArray, kv_lens: IntArray) -> list[IntArray]:
    """Split rows into groups padded to their longest, so that padding saved outweighs the price of a group."""
    by_length = rows[np.argsort(-kv_lens[rows], kind="stable")]
    lengths = kv_lens[by_length].tolist()
    bounds = [0]
    for i, length in enumerate(lengths):
        if (lengths[bounds[-1]] - length) * (len(lengths) - i) > _GROUP_COST_TOKENS:
            bounds.append(i)
    if len(bounds) == 1:
        return [rows]
    return [np.sort(by_length[a:b]) for a, b in zip(bounds, [*bounds[1:], len(rows)], strict=True)]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, spec: AttentionSpec) -> Tensor:
    """Attention over ``[batch, heads, length, head_dim]``; q may have a multiple of the heads of k and v."""
    if spec.logit_softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1).float(), v.repeat_interleave(repeats, 1).float()
    scores = torch.matmul(q.float(), k.transpose(-1, -2)) * spec.scale
    scores = torch.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    if mask is not None:
        scores = scores + mask
    elif is_causal:
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.matmul(scores.softmax(-1), v).to(q.dtype)
