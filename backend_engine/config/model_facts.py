"""``ModelFacts``: what ``resolve.py`` has to know about a model before it is loaded. Data only."""

from typing import NamedTuple

from backend_engine.config.build_config import BuildConfig


class ModelFacts(NamedTuple):
    """max_positions: longest text the model was made for, ``None`` = not stated. dtype: the checkpoint's, as stated.
    elements_per_token: numbers that the cache keeps for a token over all layers. state_bytes: what it keeps for a
    block beside that, the recurrent state. model_backend: whose modules it is made of, a name of ``MODEL_BACKENDS``.
    kv_cache_dtype: format of the KV cache that the checkpoint was made for, a name of ``KV_FORMATS``, ``None`` = none.
    built: what an engine folder was built for, ``None`` = it is none.
    """

    max_positions: int | None = None
    dtype: str | None = None
    elements_per_token: int = 0
    state_bytes: int = 0
    model_backend: str = "native"
    kv_cache_dtype: str | None = None
    built: BuildConfig | None = None
