"""Granite 3: Llama whose embeddings, scores, sublayers and logits are multiplied by constants."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_rules, decoder_spec, read_attention, read_mlp
from backend_engine.models.family import Family


def scaled(config: HfConfig, spec: ArchSpec) -> ArchSpec:
    """``spec`` with the constants around its layers."""
    return dataclasses.replace(
        spec,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logits_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def _build(config: HfConfig) -> ArchSpec:
    attention = dataclasses.replace(read_attention(config), scale=config.number("attention_multiplier", 1.0))
    layer = LayerDecl(attention, read_mlp(config))
    return scaled(config, decoder_spec(config, (layer,) * config.num_layers()))


FAMILY = Family(_build, decoder_rules())
