"""Gemma 1: norm weights are distances to 1, embeddings are scaled, the gate is a GELU, the head is tied."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.activations import GATED
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_rules, decoder_spec, read_attention, read_heads
from backend_engine.models.family import Family

_DEFAULT_KV_HEADS = 16
_DEFAULT_HEAD_DIM = 256


def gemma_spec(
    config: HfConfig, layers: tuple[LayerDecl, ...], block: str = "pre_norm", default_positions: int = 8192
) -> ArchSpec:
    """What all generations of Gemma share around their layers."""
    spec = decoder_spec(config, layers, tie_embeddings=True, default_positions=default_positions)
    norm = RmsNormDecl(config.number("rms_norm_eps", 1e-6), unit_offset=True)
    return dataclasses.replace(spec, norm=norm, block=block, embedding_scale=spec.hidden_size**0.5)


def _build(config: HfConfig) -> ArchSpec:
    config.require_neutral({"hidden_activation": ("gelu_pytorch_tanh",)})
    act = config.choice("hidden_act", GATED, "gelu_pytorch_tanh")
    # The first releases say gelu and mean its approximation.
    mlp = GatedMlpDecl(config.integer("intermediate_size"), GATED["gelu_pytorch_tanh" if act == "gelu" else act])
    layer = LayerDecl(read_attention(config, read_heads(config, _DEFAULT_KV_HEADS, _DEFAULT_HEAD_DIM)), mlp)
    return gemma_spec(config, (layer,) * config.num_layers())


FAMILY = Family(_build, decoder_rules())
