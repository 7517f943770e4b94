"""Mistral: Llama with a sliding window on every layer, or on none."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_rules, decoder_spec, read_attention, read_heads, read_mlp
from backend_engine.models.family import Family

# What a configuration means that says nothing about these (as early ones do).
_DEFAULT_WINDOW = 4096
_DEFAULT_KV_HEADS = 8


def read_window(config: HfConfig) -> int | None:
    """The window of all layers; ``null`` is none, and an absent key the format's default."""
    if "sliding_window" in config and config.get("sliding_window") is None:
        return None
    return config.integer("sliding_window", _DEFAULT_WINDOW)


def _build(config: HfConfig) -> ArchSpec:
    attention = read_attention(config, read_heads(config, default_kv_heads=_DEFAULT_KV_HEADS))
    config.require_neutral({"attention_bias": (False,)})
    attention = dataclasses.replace(attention, sliding_window=read_window(config))
    layer = LayerDecl(attention, read_mlp(config))
    return decoder_spec(config, (layer,) * config.num_layers())


FAMILY = Family(_build, decoder_rules())
