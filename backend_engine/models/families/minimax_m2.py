"""MiniMax-M2: partly rotated heads with a norm over all of them together, and many experts that are scored by sigmoids
and chosen with a learned correction.
"""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl, QkNormDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.norm import RmsNormDecl
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

_DEFAULT_THETA = 5e6
_DEFAULT_POSITIONS = 196608
# Of kinds of layers that it has not, though its configuration speaks of them.
_UNUSED = ("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode")


def _attention(config: HfConfig) -> AttentionDecl:
    config.require_neutral(
        {
            "attention_bias": (False,),
            "attn_type_list": ([1] * config.num_layers(),),
            "qk_norm_type": ("per_layer",),
            "use_qk_norm": (True,),
        }
    )
    heads = read_heads(config, default_kv_heads=8, default_head_dim=128)
    max_positions = config.integer("max_position_embeddings", _DEFAULT_POSITIONS)
    rotated = config.integer("rotary_dim", heads.head_dim) / heads.head_dim
    return AttentionDecl(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=read_rope(config, heads.head_dim, max_positions, default_theta=_DEFAULT_THETA, default_partial=rotated),
        qk_norm=QkNormDecl(RmsNormDecl(config.number("rms_norm_eps", 1e-6)), per_head=False),
    )


def _experts(config: HfConfig) -> MoeDecl:
    config.require_neutral(
        {
            "layernorm_full_attention_beta": (1,),
            "layernorm_mlp_beta": (1,),
            "mlp_bias": (False,),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
        }
    )
    num_experts, mlp = read_num_experts(config, default=256), read_mlp(config)
    top_k = read_top_k(config, num_experts, default=8)
    return MoeDecl(RoutingDecl(num_experts, top_k, "sigmoid", has_correction=True), mlp.size, mlp.act)


def _build(config: HfConfig) -> ArchSpec:
    for key in _UNUSED:
        config.get(key)
    layer = LayerDecl(_attention(config), _experts(config))
    return decoder_spec(config, (layer,) * config.num_layers(), default_positions=_DEFAULT_POSITIONS)


FAMILY = Family(
    _build,
    (
        *pre_norm_rules(),
        *numbered_expert_rules(),
        *numbered_expert_rules(block="mlp"),
        *stacked_expert_rules(),
    ),
)
