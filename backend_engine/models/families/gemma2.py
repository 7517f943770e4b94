"""Gemma 2: Gemma with norms before and after each sublayer, soft caps, and a window on every other layer."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import (
    attention_rules,
    mlp_rules,
    model_rules,
    norm_rules,
    read_attention,
    read_heads,
    read_layer_types,
    read_mlp,
)
from backend_engine.models.families.gemma import gemma_spec
from backend_engine.models.family import Family
from backend_engine.models.weight_rules import Rule

DEFAULT_KV_HEADS = 4
DEFAULT_HEAD_DIM = 256
DEFAULT_WINDOW = 4096
_DEFAULT_SCALAR = 256
_DEFAULT_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def scaled_attention(config: HfConfig, attention: AttentionDecl) -> AttentionDecl:
    """``attention`` with the scale that does not follow from its heads."""
    scalar = config.number("query_pre_attn_scalar", _DEFAULT_SCALAR)
    return dataclasses.replace(attention, scale=scalar**-0.5)


def sandwich_rules(prefix: str = "model.") -> tuple[Rule, ...]:
    """A model with four norms a layer."""
    norms = norm_rules(
        prefix,
        mixer_norm="input_layernorm",
        mixer_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    )
    return model_rules(prefix) + norms + attention_rules(prefix) + mlp_rules(prefix)


def _softcap(config: HfConfig, key: str) -> float | None:
    """``null`` is none, and an absent key the format's default."""
    if key in config and config.get(key) is None:
        return None
    return config.number(key, _DEFAULT_SOFTCAPS[key])


def _build(config: HfConfig) -> ArchSpec:
    attention = read_attention(config, read_heads(config, DEFAULT_KV_HEADS, DEFAULT_HEAD_DIM))
    attention = dataclasses.replace(
        scaled_attention(config, attention), logit_softcap=_softcap(config, "attn_logit_softcapping")
    )
    windowed = dataclasses.replace(attention, sliding_window=config.integer("sliding_window", DEFAULT_WINDOW))
    num_layers = config.num_layers()
    default = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(num_layers))
    mlp = read_mlp(config, "hidden_activation", "gelu_pytorch_tanh")
    kinds = read_layer_types(config, num_layers, default)
    layers = tuple(LayerDecl(windowed if kind == "sliding_attention" else attention, mlp) for kind in kinds)
    spec = gemma_spec(config, layers, "sandwich_norm")
    config.require_neutral({"hidden_act": ("gelu_pytorch_tanh", "gelu")})
    return dataclasses.replace(spec, logits_softcap=_softcap(config, "final_logit_softcapping"))


FAMILY = Family(_build, sandwich_rules())
