"""Gemma 3 (text): Gemma 2 without soft caps, with norms on query and key heads and a rotary scheme of its own for the
layers with a window. The text half of a checkpoint that also sees pictures is read as a model of its own.
"""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl, QkNormDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import read_heads, read_layer_types, read_mlp
from backend_engine.models.families.gemma import gemma_spec
from backend_engine.models.families.gemma2 import (
    DEFAULT_HEAD_DIM,
    DEFAULT_KV_HEADS,
    DEFAULT_WINDOW,
    sandwich_rules,
    scaled_attention,
)
from backend_engine.models.family import Family
from backend_engine.models.rope_config import read_ropes
from backend_engine.models.weight_rules import IgnoreUnder

_MAX_POSITIONS = 131072
_DEFAULT_PATTERN = 6
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def build(config: HfConfig) -> ArchSpec:
    """The language model that ``config``, of a text model, describes."""
    heads = read_heads(config, DEFAULT_KV_HEADS, DEFAULT_HEAD_DIM)
    max_positions = config.integer("max_position_embeddings", _MAX_POSITIONS)
    ropes = read_ropes(config, heads.head_dim, max_positions, _THETAS)
    norm = QkNormDecl(RmsNormDecl(config.number("rms_norm_eps", 1e-6), unit_offset=True))
    has_bias = config.flag("attention_bias", False)
    num_layers = config.num_layers()
    pattern = config.integer("sliding_window_pattern", _DEFAULT_PATTERN)
    default = tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers))
    mixers = {
        kind: scaled_attention(config, AttentionDecl(*heads, 1.0, rope, has_bias, has_bias, norm))
        for kind, rope in ropes.items()
    }
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    mixers["sliding_attention"] = dataclasses.replace(mixers["sliding_attention"], sliding_window=window)
    mlp = read_mlp(config, "hidden_activation", "gelu_pytorch_tanh")
    kinds = read_layer_types(config, num_layers, default)
    layers = tuple(LayerDecl(mixers[kind], mlp) for kind in kinds)
    spec = gemma_spec(config, layers, "sandwich_norm", _MAX_POSITIONS)
    final = config.get("final_logit_softcapping") and config.number("final_logit_softcapping")
    return dataclasses.replace(spec, logits_softcap=final)


FAMILY = Family(build, sandwich_rules())
WITH_VISION = Family(
    build,
    (
        *sandwich_rules("language_model.model."),
        *sandwich_rules("model.language_model."),
        *(
            IgnoreUnder(prefix + part)
            for prefix in ("", "model.")
            for part in ("vision_tower.", "multi_modal_projector.")
        ),
    ),
    section="text_config",
    section_defaults=_DEFAULTS,
)
