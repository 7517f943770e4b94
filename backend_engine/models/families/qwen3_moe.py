"""Qwen3-MoE: Qwen3 with many narrow experts; a window, where it has one, is on every layer."""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import QkNormDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_spec, read_attention, read_heads, read_used_window
from backend_engine.models.families.qwen2_moe import RULES
from backend_engine.models.family import Family
from backend_engine.models.moe_config import read_sparse_mlps

_DEFAULT_KV_HEADS = 4


def _build(config: HfConfig) -> ArchSpec:
    attention = dataclasses.replace(
        read_attention(config, read_heads(config, default_kv_heads=_DEFAULT_KV_HEADS)),
        qk_norm=QkNormDecl(RmsNormDecl(config.number("rms_norm_eps", 1e-6))),
        sliding_window=read_used_window(config),
    )
    mlps = read_sparse_mlps(config, 768, (128, 8))
    return decoder_spec(config, tuple(LayerDecl(attention, mlp) for mlp in mlps))


FAMILY = Family(_build, RULES)
