"""Logits of texts of equal length from a loaded model, without an engine."""

from collections.abc import Sequence

import numpy as np
import torch

from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.model_engine.model_engine import layer_caches
from backend_engine.model_engine.token_windows import window_inputs

SIZE = 8


@torch.inference_mode()
def window_logits(loaded: LoadedModel, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of every token, ``[num_windows * window_len, vocab_size]``, all windows in one step."""
    ids = np.array(windows)
    specs = loaded.traits.cache_specs
    pool = KVPool(specs, len(ids) * -(-ids.shape[1] // SIZE), SIZE, torch.float32, loaded.options.device)
    inputs = window_inputs(ids, SIZE, loaded.options.device, True)
    loaded.attention.prepare(inputs.attention)
    logits: torch.Tensor = loaded.model(inputs, layer_caches(specs, pool.layers, {}))
    return logits
