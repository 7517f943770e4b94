"""OLMo 2: norms on what the sublayers add instead of what they read, and on queries and keys over all heads."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import QkNormDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import (
    attention_rules,
    decoder_spec,
    mlp_rules,
    model_rules,
    norm_rules,
    read_attention,
    read_mlp,
)
from backend_engine.models.family import Family

_DEFAULT_EPS = 1e-5


def _build(config: HfConfig) -> ArchSpec:
    norm = RmsNormDecl(config.number("rms_norm_eps", _DEFAULT_EPS))
    attention = dataclasses.replace(read_attention(config), qk_norm=QkNormDecl(norm, per_head=False))
    layer = LayerDecl(attention, read_mlp(config))
    spec = decoder_spec(config, (layer,) * config.num_layers(), default_eps=_DEFAULT_EPS)
    return dataclasses.replace(spec, block="post_norm")


FAMILY = Family(
    _build,
    model_rules()
    + norm_rules(mixer_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
    + attention_rules()
    + mlp_rules(),
)
