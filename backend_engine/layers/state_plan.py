"""``StatePlan``: where one step's rows read and write their recurrent states. Made once a step by the model.

A block of the cache holds the state after the last of its computed tokens. A row that starts at token s > 0 reads the
block that holds token s - 1, one that starts at 0 begins from zeros and reads nothing; a row writes each block that it
fills, and its last one. So a full block that others share is read by them and never written again. Pure index
arithmetic: it knows no layer and no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backend_engine.attention.interface import AttentionMetadata, IntArray

MAX_CHUNK_TOKENS = 64
"""Longest piece that a scan works on at once: its cost grows with the square, the number of states with the inverse."""


@dataclass(frozen=True)
class SingleRows:
    """The ``n`` rows of one token each; int64 ``[n]``.

    tokens: each one's token in the step. reads: block whose state it starts from. writes: block its new state goes to.
    fresh ``[<= n]``: rows that start from zeros, whatever their block of ``reads`` holds.
    """

    tokens: Tensor
    reads: Tensor
    writes: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class LongRows:
    """The ``R`` rows of more tokens, cut into ``C`` chunks of at most ``L`` tokens, at the ends of blocks too. int64.

    tokens ``[T]``: their tokens in the step, row after row; a *place* below is an index into this. rows ``[T]``: row of
    each place. firsts ``[R]``: first place of each row. reads ``[R]``, fresh: as in ``SingleRows``.

    chunk_sizes: number of rows that have a first, a second, ... chunk; chunks come in this order, and the rows that
    have an n-th one are always the first ones. chunk_places ``[C, L]``: places of a chunk's tokens, where it is shorter
    filled up with its own first one, which ``is_padding`` marks. token_slots ``[T]``: where in ``[C * L]`` each place
    is.

    saves ``[S]``: chunks whose end is written to a block; save_places: place of the last token of each; save_blocks.
    """

    tokens: Tensor
    rows: Tensor
    firsts: Tensor
    reads: Tensor
    fresh: Tensor
    chunk_places: Tensor
    is_padding: Tensor
    token_slots: Tensor
    saves: Tensor
    save_places: Tensor
    save_blocks: Tensor
    chunk_sizes: tuple[int, ...] = field(kw_only=True)


@dataclass(frozen=True)
class StatePlan:
    """Rows of one token, advanced all at once, and longer ones, which are scanned; ``None`` = no such rows."""

    single: SingleRows | None
    long: LongRows | None

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> "StatePlan":
        """The plan of the step that ``metadata`` describes."""
        step = _Step.of(metadata)
        device = metadata.q_lens.device
        single = np.flatnonzero(metadata.q_lens_host == 1)
        long = np.flatnonzero(metadata.q_lens_host > 1)
        return cls(
            _single_rows(step, single, device) if len(single) else None,
            _long_rows(step, long, device) if len(long) else None,
        )


class _Step(NamedTuple):
    """Rows of a step: first token in the step, ``[starts, ends)`` of the request's tokens, block it starts from."""

    first_tokens: IntArray
    starts: IntArray
    ends: IntArray
    reads: IntArray
    block_tables: IntArray
    tokens_per_block: int

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> "_Step":
        q_lens, ends = metadata.q_lens_host.astype(np.int64), metadata.kv_lens_host.astype(np.int64)
        starts = ends - q_lens
        size = metadata.tokens_per_block
        # A row that begins reads nothing; its own first block stands in, so that the index is valid.
        before = np.maximum(starts - 1, 0) // size
        reads = metadata.block_tables_host[np.arange(len(ends)), before].astype(np.int64)
        return cls(np.cumsum(q_lens) - q_lens, starts, ends, reads, metadata.block_tables_host, size)


class _Chunk(NamedTuple):
    """``length`` tokens from ``first``, counted from its row's first one. ``block``: where the end's state belongs."""

    first: int
    length: int
    block: int | None


def _single_rows(step: _Step, rows: IntArray, device: torch.device) -> SingleRows:
    last_blocks = (step.ends[rows] - 1) // step.tokens_per_block
    return SingleRows(
        *_upload(
            [
                step.first_tokens[rows],
                step.reads[rows],
                step.block_tables[rows, last_blocks],
                np.flatnonzero(step.starts[rows] == 0),
            ],
            device,
        )
    )


def _long_rows(step: _Step, rows: IntArray, device: torch.device) -> LongRows:
    cut = [_cut(step, int(row)) for row in rows]
    order = sorted(range(len(cut)), key=lambda i: -len(cut[i]))
    rows, cut = rows[order], [cut[i] for i in order]
    lengths = step.ends[rows] - step.starts[rows]
    firsts = np.cumsum(lengths) - lengths
    row_of_place = np.repeat(np.arange(len(rows)), lengths)
    tokens = np.arange(int(lengths.sum())) + (step.first_tokens[rows] - firsts)[row_of_place]

    numbered = [(n, row) for n in range(len(cut[0])) for row in range(len(cut)) if n < len(cut[row])]
    chunks = [cut[row][n] for n, row in numbered]
    chunk_rows = np.array([row for _, row in numbered])
    chunk_firsts = np.array([chunk.first for chunk in chunks]) + firsts[chunk_rows]
    chunk_lengths = np.array([chunk.length for chunk in chunks])
    offsets = np.arange(int(chunk_lengths.max()))
    is_padding = offsets >= chunk_lengths[:, None]
    chunk_places = chunk_firsts[:, None] + np.where(is_padding, 0, offsets)
    token_slots = np.empty(len(tokens), np.int64)
    token_slots[chunk_places[~is_padding]] = np.flatnonzero(~is_padding)
    saves = np.array([i for i, chunk in enumerate(chunks) if chunk.block is not None])
    save_blocks = np.array([chunk.block for chunk in chunks if chunk.block is not None])

    parts = [
        tokens, row_of_place, firsts, step.reads[rows], np.flatnonzero(step.starts[rows] == 0), chunk_places,
        is_padding, token_slots, saves, (chunk_firsts + chunk_lengths - 1)[saves], save_blocks,
    ]  # fmt: skip
    sizes = tuple(sum(len(chunks_of_row) > n for chunks_of_row in cut) for n in range(len(cut[0])))
    return LongRows(*_upload(parts, device), chunk_sizes=sizes)


def _cut(step: _Step, row: int) -> list[_Chunk]:
    """A row's tokens in pieces that end where its blocks end, and after ``MAX_CHUNK_TOKENS`` at the latest."""
    start, end, size = int(step.starts[row]), int(step.ends[row]), step.tokens_per_block
    chunks = []
    position = start
    while position < end:
        stop = min(end, (position // size + 1) * size, position + MAX_CHUNK_TOKENS)
        block = int(step.block_tables[row, (stop - 1) // size]) if stop == end or stop % size == 0 else None
        chunks.append(_Chunk(position - start, stop - position, block))
        position = stop
    return chunks


def _upload(parts: Sequence[IntArray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of the same shapes, int64 (truth values as bool), in one transfer."""
    flat = np.concatenate([part.ravel().astype(np.int64) for part in parts])
    pieces = torch.split(torch.from_numpy(flat).to(device), [part.size for part in parts])
    shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    return [piece.bool() if part.dtype == np.bool_ else piece for piece, part in zip(shaped, parts, strict=True)]
