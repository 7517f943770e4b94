"""``window_inputs``: texts of equal length as the tensors of one forward pass, without requests and a scheduler.

For whoever runs a model over given texts (``post_training``); serving uses ``ModelInputsBuilder``. Holds nothing.
"""

import numpy as np
import torch

from backend_engine.attention.interface import AttentionMetadata, IntArray
from backend_engine.models.model_inputs import ModelInputs


def blocks_per_window(window_len: int, tokens_per_block: int) -> int:
    """Blocks of the pool that a text of ``window_len`` tokens takes."""
    return -(-window_len // tokens_per_block)


def window_inputs(
    windows: IntArray,
    tokens_per_block: int,
    device: torch.device,
    with_logits: bool,
    span: tuple[int, int] | None = None,
) -> ModelInputs:
    """One step over ``windows``, token ids ``[num_windows, window_len]``, each a text of its own.

    span: the step computes the tokens from the first number up to the second of every window, those before have been
    computed; by default all. Window r has blocks ``r * blocks_per_window`` up to the next one's. with_logits: of all
    tokens of the step, window after window, or of none.
    """
    num_windows, window_len = windows.shape
    start, stop = (0, window_len) if span is None else span
    assert num_windows and 0 <= start < stop <= window_len, (windows.shape, start, stop)
    q_len, size = stop - start, tokens_per_block
    num_tokens, per_window = num_windows * q_len, blocks_per_window(window_len, size)
    tables = np.arange(num_windows * per_window, dtype=np.int32).reshape(num_windows, per_window)
    tables = np.ascontiguousarray(tables[:, : blocks_per_window(stop, size)])
    places = np.arange(start, stop, dtype=np.int32)
    q_lens, kv_lens = (np.full(num_windows, length, np.int32) for length in (q_len, stop))
    arrays = (
        np.ascontiguousarray(windows[:, start:stop], np.int32).reshape(-1),
        np.tile(places, num_windows),
        np.full(num_tokens, window_len, np.int32),
        (tables[:, places // size] * size + places % size).reshape(-1),
        q_lens,
        kv_lens,
        np.arange(num_tokens if with_logits else 0, dtype=np.int32),
    )
    ids, positions, text_lens, slots, q_tensor, kv_tensor, wanted = (torch.from_numpy(a).to(device) for a in arrays)
    metadata = AttentionMetadata(
        num_contexts=num_windows,
        num_ctx_tokens=num_tokens,
        tokens_per_block=size,
        q_lens=q_tensor,
        kv_lens=kv_tensor,
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=slots,
        q_lens_host=q_lens,
        kv_lens_host=kv_lens,
        block_tables_host=tables,
    )
    return ModelInputs(ids, positions, text_lens, wanted, metadata)
