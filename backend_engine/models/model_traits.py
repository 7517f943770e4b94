"""``ModelTraits``: what the rest of the engine has to know about a model, whoever runs it. Data only."""

from dataclasses import dataclass

from backend_engine.attention.interface import AttentionSpec
from backend_engine.core.kv_spec import CacheSpec


@dataclass(frozen=True)
class ModelTraits:
    """vocab_size: width of the logits. cache_specs: what each layer stores, in the order of the pool. attention_specs:
    the layers that attend. exact_up_to: length of text from which positions are no longer what the model was given,
    ``None`` = any length. positions_switch_at: longer texts have other positions from their first token on, ``None`` =
    none have.
    """

    vocab_size: int
    cache_specs: tuple[CacheSpec, ...]
    attention_specs: tuple[AttentionSpec, ...]
    exact_up_to: int | None = None
    positions_switch_at: int | None = None
