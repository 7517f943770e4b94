"""How ``TorchAttention`` cuts a step into pieces: which rows are computed together, and where their texts lie.

Made in ``prepare`` from host arrays; what depends on the kind of a layer's cache is made when the first such layer
asks, since layers that store keys and values may stand beside layers that store one vector. Computes no attention.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from backend_engine.attention.interface import AttentionMetadata, IntArray

# A further group costs about as much as this many padded tokens.
_GROUP_COST_TOKENS = 1024
# Longer blocks are read in parts of at most this many tokens: a text that fills a little of one is not padded to it.
_MAX_PART_TOKENS = 64


class PoolRows:
    """Chosen parts of texts as rows of a layer's pool, the pool seen as ``[num_parts, part_len, ...]``."""

    def __init__(self, metadata: AttentionMetadata, rows: IntArray, parts: IntArray, device: torch.device) -> None:
        """``parts [len(rows), n]``: numbers of the parts within the text of each of ``rows``."""
        self._per_block = metadata.tokens_per_block // part_len(metadata.tokens_per_block)
        self._blocks = metadata.block_tables_host[rows[:, None], parts // self._per_block].astype(np.int64)
        self._inner = parts % self._per_block
        self._device = device
        self._made: dict[int, Tensor] = {}

    def of(self, num_planes: int) -> Tensor:
        """int64 ``[num_planes * len(rows) * n]`` for a pool ``[num_blocks, num_planes, ...]``: all parts of the first
        plane, then all of the second.
        """
        if num_planes not in self._made:
            first = num_planes * self._per_block * self._blocks + self._inner
            planes = np.stack([first + plane * self._per_block for plane in range(num_planes)])
            self._made[num_planes] = upload(planes.reshape(-1), self._device)
        return self._made[num_planes]


@dataclass
class Piece:
    """Rows that are computed together: ``n`` rows of ``q_len`` new tokens, keys padded to ``kv_len``.

    ``tokens``: a slice of the step's tokens, or their indices ``[n]`` when q_len is 1. ``pool_rows``: where the parts
    of the texts lie. ``is_whole``: k and v of this step are all there is. ``masks``: additive masks by window, made
    when a layer first asks.
    """

    tokens: slice | Tensor
    q_len: int
    kv_len: int
    kv_lens: IntArray
    pool_rows: PoolRows
    is_whole: bool
    device: torch.device
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """0 where a query sees a key and -inf elsewhere, ``[n, 1, 1, kv_len]`` or ``[q_len, kv_len]``;
        ``None`` when everything (one new token) or exactly the past (a whole prompt) is seen.
        """
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, dtype)
        return self.masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        longest = int(self.kv_lens.max())
        is_windowed = window is not None and longest > window
        if self.q_len == 1:
            needs_mask = is_windowed or int(self.kv_lens.min()) < longest
            query_positions = upload(self.kv_lens - 1, self.device).view(-1, 1, 1, 1)
        else:
            needs_mask = is_windowed or self.kv_len > self.q_len
            query_positions = torch.arange(self.kv_len - self.q_len, self.kv_len, device=self.device).unsqueeze(1)
        if not needs_mask:
            return None
        key_positions = torch.arange(self.kv_len, device=self.device)
        is_seen = key_positions <= query_positions
        if window is not None:
            is_seen &= key_positions > query_positions - window
        return torch.zeros(is_seen.shape, dtype=dtype, device=self.device).masked_fill_(~is_seen, float("-inf"))


def make_pieces(metadata: AttentionMetadata, device: torch.device) -> list[Piece]:
    """Rows with several new tokens one by one, rows with one in a few groups; rows without any in none."""
    q_lens, kv_lens = metadata.q_lens_host, metadata.kv_lens_host
    starts = np.cumsum(q_lens) - q_lens
    pieces = [_long_piece(metadata, int(row), int(starts[row]), device) for row in np.flatnonzero(q_lens > 1)]
    single = np.flatnonzero(q_lens == 1)
    if len(single):
        groups = _group_by_length(single, kv_lens)
        pieces += [_short_piece(metadata, rows, starts[rows], len(groups) == 1, device) for rows in groups]
    return pieces


def fresh_parts(metadata: AttentionMetadata, device: torch.device) -> PoolRows | None:
    """Parts whose first slot, but not whose last, is written now. Their tail is zeroed: a masked weight is
    zero, but zero times the NaN that an earlier owner may have left would still be NaN.
    """
    size = part_len(metadata.tokens_per_block)
    kv_lens = metadata.kv_lens_host
    last = (kv_lens - 1) // size
    is_fresh = (last * size >= kv_lens - metadata.q_lens_host) & (kv_lens % size != 0)
    rows = np.flatnonzero(is_fresh)
    return PoolRows(metadata, rows, last[rows, None], device) if len(rows) else None


def part_len(tokens_per_block: int) -> int:
    """The block, or the longest part of at most ``_MAX_PART_TOKENS`` that it can be cut into without a rest."""
    return next(n for n in range(min(tokens_per_block, _MAX_PART_TOKENS), 0, -1) if tokens_per_block % n == 0)


def upload(array: IntArray, device: torch.device) -> Tensor:
    """As int64 on ``device``."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


def _long_piece(metadata: AttentionMetadata, row: int, start: int, device: torch.device) -> Piece:
    q_len, kv_len = int(metadata.q_lens_host[row]), int(metadata.kv_lens_host[row])
    parts = np.arange(-(-kv_len // part_len(metadata.tokens_per_block)))
    pool_rows = PoolRows(metadata, np.array([row]), parts[None], device)
    kv_lens = metadata.kv_lens_host[row : row + 1]
    return Piece(slice(start, start + q_len), q_len, kv_len, kv_lens, pool_rows, kv_len == q_len, device)


def _short_piece(
    metadata: AttentionMetadata, rows: IntArray, tokens: IntArray, is_only: bool, device: torch.device
) -> Piece:
    kv_lens = metadata.kv_lens_host[rows]
    kv_len = int(kv_lens.max())
    size = part_len(metadata.tokens_per_block)
    parts = np.arange(-(-kv_len // size))
    # Padding points at a part of the row's own.
    is_padding = parts * size >= kv_lens[:, None]
    pool_rows = PoolRows(metadata, rows, np.where(is_padding, 0, parts), device)
    in_order = is_only and bool(np.all(np.diff(tokens) == 1))
    where = slice(int(tokens[0]), int(tokens[-1]) + 1) if in_order else upload(tokens, device)
    return Piece(where, 1, kv_len, kv_lens, pool_rows, False, device)


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
