"""Mixtral: Mistral with a few wide experts in every layer, of which a token goes to the best two."""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_spec, pre_norm_rules, read_heads, read_mlp
from backend_engine.models.family import Family
from backend_engine.models.moe_config import (
    numbered_expert_rules,
    read_num_experts,
    read_top_k,
    stacked_expert_rules,
)
from backend_engine.models.rope_config import read_rope
from backend_engine.models.weight_rules import Rename

_DEFAULT_KV_HEADS = 8
_DEFAULT_POSITIONS = 131072
_DEFAULT_THETA = 1e6
_DEFAULT_EPS = 1e-5


def _build(config: HfConfig) -> ArchSpec:
    heads = read_heads(config, default_kv_heads=_DEFAULT_KV_HEADS)
    max_positions = config.integer("max_position_embeddings", _DEFAULT_POSITIONS)
    attention = AttentionDecl(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=read_rope(config, heads.head_dim, max_positions, default_theta=_DEFAULT_THETA),
        sliding_window=None if config.get("sliding_window") is None else config.integer("sliding_window"),
    )
    num_experts = read_num_experts(config, default=8)
    mlp = read_mlp(config)
    config.require_neutral({"mlp_bias": (False,)})
    experts = MoeDecl(RoutingDecl(num_experts, read_top_k(config, num_experts, default=2)), mlp.size, mlp.act)
    layers = (LayerDecl(attention, experts),) * config.num_layers()
    return decoder_spec(config, layers, default_eps=_DEFAULT_EPS, default_positions=_DEFAULT_POSITIONS)


FAMILY = Family(
    _build,
    (
        *pre_norm_rules(),
        *numbered_expert_rules(),
        *stacked_expert_rules(),
        Rename("model.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.router.weight"),
    ),
)
