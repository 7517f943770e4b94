"""``perplexity``: how well a model foretells given texts, whatever its weights and its KV cache are kept in.

What tells whether a quantized model is as good as the one that it was made of. Runs any loaded model as serving does,
through a pool of its own; reads no file.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from backend_engine.attention.interface import IntArray
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.model_engine.model_engine import layer_caches
from backend_engine.model_engine.token_windows import blocks_per_window, window_inputs

# Windows done, windows in all, what is being done.
Progress = Callable[[int, int, str], None]

_TOKENS_PER_BLOCK = 64
# A step has at most so many tokens, and logits of at most so many bytes.
_MAX_TOKENS = 4096
_MAX_LOGITS_BYTES = 256 * 2**20
_LARGEST_EXPONENT = math.log(sys.float_info.max)


@torch.inference_mode()
def perplexity(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], kv_dtype: str, progress: Progress | None = None
) -> float:
    """``exp`` of the mean negative log likelihood of every token of ``windows`` but each window's first, given those
    before it in the window (Jelinek et al., 1977). Infinite where it is beyond a float.

    windows: token ids, all of the same length, 2 or more. kv_dtype: of the KV cache, a key of ``KV_DTYPES``.
    """
    ids = np.array(windows, np.int32)
    assert ids.ndim == 2 and ids.shape[0] and ids.shape[1] >= 2, f"windows of shape {ids.shape}"
    num_windows, window_len = ids.shape
    limit = loaded.traits.exact_up_to
    assert limit is None or window_len <= limit, f"windows of {window_len} tokens, positions up to {limit}"
    max_tokens = max(1, min(_MAX_TOKENS, _MAX_LOGITS_BYTES // (4 * loaded.traits.vocab_size)))
    at_once = min(num_windows, max(1, max_tokens // window_len))
    num_blocks = at_once * blocks_per_window(window_len, _TOKENS_PER_BLOCK)
    pool = KVPool(loaded.traits.cache_specs, num_blocks, _TOKENS_PER_BLOCK, KV_DTYPES[kv_dtype], loaded.options.device)
    total = 0.0
    for first in range(0, num_windows, at_once):
        some = ids[first : first + at_once]
        # Nothing follows on a window's last token.
        for span in _spans(window_len - 1, max_tokens):
            total += _surprise(loaded, pool, some, span)
        if progress is not None:
            progress(first + len(some), num_windows, "perplexity")
    mean = total / (num_windows * (window_len - 1))
    return math.inf if mean > _LARGEST_EXPONENT else math.exp(mean)


def _spans(num_tokens: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Tokens ``[0, num_tokens)`` in pieces of at most ``max_tokens``."""
    return ((start, min(start + max_tokens, num_tokens)) for start in range(0, num_tokens, max_tokens))


def _surprise(loaded: LoadedModel, pool: KVPool, windows: IntArray, span: tuple[int, int]) -> float:
    """Compute the tokens of ``span``, of all windows. Returns the sum of the negative log likelihoods of the tokens
    that follow on them.
    """
    device = loaded.options.device
    inputs = window_inputs(windows, pool.tokens_per_block, device, True, span)
    loaded.attention.prepare(inputs.attention)
    caches = layer_caches(loaded.traits.cache_specs, pool.layers, loaded.kv_scales)
    logits = loaded.model(inputs, caches)
    start, stop = span
    following = torch.from_numpy(windows[:, start + 1 : stop + 1].astype(np.int64).reshape(-1)).to(device)
    losses = F.cross_entropy(logits, following, reduction="none")
    return float(losses.to(torch.float64).sum())
