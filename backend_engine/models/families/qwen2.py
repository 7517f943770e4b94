"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and possibly windows on the upper layers."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import (
    decoder_rules,
    decoder_spec,
    read_attention,
    read_heads,
    read_layer_types,
    read_mlp,
    read_used_window,
    spread_window,
)
from backend_engine.models.family import Family

_DEFAULT_KV_HEADS = 32
_DEFAULT_WINDOW_LAYERS = 28


def windowed(config: HfConfig, attention: AttentionDecl) -> tuple[AttentionDecl, ...]:
    """``attention`` for each layer, with the window on those that have one."""
    num_layers = config.num_layers()
    has_none = "sliding_window" in config and config.get("sliding_window") is None
    window = None if has_none and config.flag("use_sliding_window", False) else read_used_window(config)
    first = config.count("max_window_layers", _DEFAULT_WINDOW_LAYERS)
    default = tuple("full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers))
    types = read_layer_types(config, num_layers, default)
    if window is None and "sliding_attention" in types:
        raise config.refuse("use_sliding_window", "true, and a sliding_window, since layer_types has sliding_attention")
    return spread_window(attention, types, window)


def _build(config: HfConfig) -> ArchSpec:
    config.require_neutral({"attention_bias": (True,)})
    attention = dataclasses.replace(
        read_attention(config, read_heads(config, default_kv_heads=_DEFAULT_KV_HEADS)), qkv_bias=True, out_bias=False
    )
    mlp = read_mlp(config)
    return decoder_spec(config, tuple(LayerDecl(layer, mlp) for layer in windowed(config, attention)))


FAMILY = Family(_build, decoder_rules())
