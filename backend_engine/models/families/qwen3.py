"""Qwen3: Qwen2 without the biases, with a norm on each query and key head, and heads of a size of their own."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl, QkNormDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_rules, decoder_spec, read_attention, read_heads, read_mlp
from backend_engine.models.families.qwen2 import windowed
from backend_engine.models.family import Family

_DEFAULT_KV_HEADS = 32
_DEFAULT_HEAD_DIM = 128


def normed_attention(config: HfConfig, default_kv_heads: int = _DEFAULT_KV_HEADS) -> AttentionDecl:
    """Attention with a norm on each query and key head."""
    attention = read_attention(config, read_heads(config, default_kv_heads, _DEFAULT_HEAD_DIM))
    return dataclasses.replace(attention, qk_norm=QkNormDecl(RmsNormDecl(config.number("rms_norm_eps", 1e-6))))


def _build(config: HfConfig) -> ArchSpec:
    mlp = read_mlp(config)
    return decoder_spec(config, tuple(LayerDecl(layer, mlp) for layer in windowed(config, normed_attention(config))))


FAMILY = Family(_build, decoder_rules())
