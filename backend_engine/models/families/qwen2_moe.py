"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with many narrow experts, and a gated layer that all tokens share; its parts serve
Qwen3-MoE too.
"""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import (
    decoder_rules,
    decoder_spec,
    mlp_rules,
    read_attention,
    read_heads,
    read_layer_types,
    read_used_window,
    spread_window,
)
from backend_engine.models.family import Family
from backend_engine.models.moe_config import read_sparse_mlps, stacked_expert_rules
from backend_engine.models.weight_rules import Rename, Rule

_DEFAULT_KV_HEADS = 16
_DEFAULT_WINDOW_LAYERS = 28
_DEFAULT_SHARED_SIZE = 5632


def _attention(config: HfConfig) -> tuple[AttentionDecl, ...]:
    """Each layer's attention; where windows are on, every second of the lower layers has one."""
    heads = read_heads(config, default_kv_heads=_DEFAULT_KV_HEADS)
    attention = dataclasses.replace(read_attention(config, heads), qkv_bias=config.flag("qkv_bias", True))
    config.require_neutral({"attention_bias": (False,)})
    num_layers, window = config.num_layers(), read_used_window(config)
    last = config.count("max_window_layers", _DEFAULT_WINDOW_LAYERS)
    default = tuple(
        "full_attention" if window is None or i % 2 or i >= last else "sliding_attention" for i in range(num_layers)
    )
    types = read_layer_types(config, num_layers, default)
    if window is None and "sliding_attention" in types:
        raise config.refuse("use_sliding_window", "true, since layer_types has sliding_attention")
    return spread_window(attention, types, window)


def _build(config: HfConfig) -> ArchSpec:
    shared_size = config.integer("shared_expert_intermediate_size", _DEFAULT_SHARED_SIZE)
    mlps = read_sparse_mlps(config, 1408, (60, 4), shared_size)
    return decoder_spec(config, tuple(map(LayerDecl, _attention(config), mlps)))


_MLP, _OURS = "model.layers.{i}.mlp.", "layers.{i}.mlp."
RULES: tuple[Rule, ...] = (
    *decoder_rules(),
    *mlp_rules(source="mlp.experts.{e}", parameter="mlp.experts.{e}"),
    *stacked_expert_rules(),
    Rename(_MLP + "gate.weight", _OURS + "router.weight"),
    *mlp_rules(source="mlp.shared_expert", parameter="mlp.shared"),
    Rename(_MLP + "shared_expert_gate.weight", _OURS + "shared_gate.weight"),
)

FAMILY = Family(_build, RULES)
