"""The self-check of the transformers room: a short text, computed by transformers and by us, must give equal logits.

Called once, at the end of loading. Catches what no rule foresaw: a state between tokens, positions that are counted
otherwise, tokens that see another request's. Uses a small cache of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from backend_engine.attention.interface import AttentionBackend, AttentionMetadata, AttentionSpec, IntArray
from backend_engine.attention.paged_kv import PagedKv, paged_kv
from backend_engine.models.model_inputs import ModelInputs
from backend_engine.models.transformers_room.facts import max_positions

_TOKENS_PER_BLOCK = 16
# Tables of two texts of at most 32 tokens, out of order.
_BLOCKS = ((3, 1), (0, 2))
_LENGTHS = (24, 9)
# Steps of (first, end) for each text: one alone, a rest beside a beginning, one token each.
_STEPS = (((0, 10), None), ((10, 23), (0, 8)), ((23, 24), (8, 9)))
# Largest distance between logits, as a share of their length.
_LIMITS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
# The same between two runs of the same operations, in any dtype.
POSITION_LIMIT = 1e-3

PagedModel = Callable[[ModelInputs, Sequence[PagedKv]], Tensor]


class Reference(NamedTuple):
    """The texts of the check ``[length]`` and what transformers says to them, float32 ``[length, vocab_size]``.

    ``position_error``: distance from what it says when it is told that positions are 0, 1, 2 and so on.
    """

    texts: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]
    position_error: float


def reference(model: nn.Module, device: torch.device) -> Reference:
    """What ``model`` computes with its own attention, text by text and without a cache."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    vocab_size = config.get_text_config().vocab_size
    longest = max_positions(config) or max(_LENGTHS)
    texts = tuple(
        torch.randint(0, vocab_size, (min(length, longest),), generator=generator).to(device) for length in _LENGTHS
    )
    logits = tuple(_logits(model, text) for text in texts)
    told = _logits(model, texts[-1], torch.arange(len(texts[-1]), device=device).unsqueeze(0))
    return Reference(texts, logits, _error(told, logits[-1]))


def _logits(model: nn.Module, text: Tensor, positions: Tensor | None = None) -> Tensor:
    result = model(input_ids=text.unsqueeze(0), position_ids=positions, use_cache=False, return_dict=True)
    logits: Tensor = result.logits[0].float()
    return logits


def _error(found: Tensor, wanted: Tensor) -> float:
    """Distance as a share of the length of ``wanted``: 0 when ``wanted`` is not finite, infinite when only ``found``
    is not.
    """
    if not bool(wanted.isfinite().all()):
        return 0.0
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))
    return error if math.isfinite(error) else math.inf


def distance(
    model: PagedModel,
    expected: Reference,
    specs: Sequence[AttentionSpec],
    attention: AttentionBackend,
    dtype: torch.dtype,
) -> float:
    """Largest distance between a row of logits and its reference, as a share of the reference's length.

    ``model`` is run in chunks, with both texts in one step, over a cache of ``dtype``. 0 when the reference itself is
    not finite.
    """
    device = expected.texts[0].device
    caches = [
        paged_kv(torch.zeros(4, 2, _TOKENS_PER_BLOCK, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device))
        for spec in specs
    ]
    largest = 0.0
    for step in _STEPS:
        rows = [
            (text, first, min(end, len(expected.texts[text])))
            for text, part in enumerate(step)
            if part is not None
            for first, end in (part,)
            if first < len(expected.texts[text])
        ]
        if not rows:
            continue
        rows.sort(key=lambda row: row[1] - row[2])
        inputs = _inputs(rows, expected.texts)
        attention.prepare(inputs.attention)
        logits = model(inputs, caches)
        for row, (text, _, end) in zip(logits, rows, strict=True):
            largest = max(largest, _error(row, expected.logits[text][end - 1]))
    return largest


def limit(dtype: torch.dtype) -> float:
    """The largest distance that rounding explains."""
    return _LIMITS[dtype]


def _inputs(rows: list[tuple[int, int, int]], texts: tuple[Tensor, ...]) -> ModelInputs:
    """The step that computes tokens ``first`` to ``end`` of each (text, first, end)."""
    device = texts[0].device
    q_lens = np.array([end - first for _, first, end in rows], np.int32)
    kv_lens = np.array([end for _, _, end in rows], np.int32)
    tables = np.array([_BLOCKS[text] for text, _, _ in rows], np.int32)
    positions = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in rows])
    owners = np.repeat(np.arange(len(rows)), q_lens)
    slots = tables[owners, positions // _TOKENS_PER_BLOCK] * _TOKENS_PER_BLOCK + positions % _TOKENS_PER_BLOCK
    num_contexts = int((q_lens > 1).sum())

    def upload(array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

    metadata = AttentionMetadata(
        num_contexts=num_contexts,
        num_ctx_tokens=int(q_lens[:num_contexts].sum()),
        tokens_per_block=_TOKENS_PER_BLOCK,
        q_lens=upload(q_lens),
        kv_lens=upload(kv_lens),
        block_tables=upload(tables),
        slot_mapping=upload(slots),
        q_lens_host=q_lens,
        kv_lens_host=kv_lens,
        block_tables_host=tables,
    )
    return ModelInputs(
        input_ids=torch.cat([texts[text][first:end] for text, first, end in rows]).to(torch.int32),
        position_ids=upload(positions),
        text_lens=upload(kv_lens[owners]),
        logits_indices=upload(np.cumsum(q_lens) - 1),
        attention=metadata,
    )
