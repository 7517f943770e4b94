"""GPT-OSS: windows on every second layer, sinks in every attention, and experts of clamped SwiGLU, stored stacked, with
gate and up alternating, usually in MXFP4.
"""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.activations import ClampedSwiglu
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.rotary import RopeDecl, YarnScaling
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import (
    decoder_spec,
    mlp_rules,
    pre_norm_rules,
    read_heads,
    read_layer_types,
    spread_window,
)
from backend_engine.models.family import Family
from backend_engine.models.moe_config import read_num_experts, read_top_k, transposed_expert_rules
from backend_engine.models.rope_config import read_rope, yarn_temperature
from backend_engine.models.weight_rules import Rename

_DEFAULT_THETA = 150000.0
_DEFAULT_WINDOW = 128
_DEFAULT_EPS = 1e-5
_DEFAULT_POSITIONS = 131072


def _rope(config: HfConfig, head_dim: int) -> RopeDecl:
    if config.get("rope_scaling") or config.get("rope_parameters"):
        max_positions = config.integer("max_position_embeddings", _DEFAULT_POSITIONS)
        return read_rope(config, head_dim, max_positions, default_theta=_DEFAULT_THETA)
    stretched = YarnScaling(32.0, 4096, yarn_temperature(32.0, 1.0), truncate=False)
    return RopeDecl(config.number("rope_theta", _DEFAULT_THETA), stretched, head_dim)


def _attention(config: HfConfig) -> tuple[AttentionDecl, ...]:
    """Each layer's attention: windows alternate, the first layer has one."""
    heads = read_heads(config, default_kv_heads=8, default_head_dim=64)
    rope, has_bias = _rope(config, heads.head_dim), config.flag("attention_bias", True)
    full = AttentionDecl(*heads, heads.head_dim**-0.5, rope, has_bias, has_bias, has_sinks=True)
    num_layers = config.num_layers()
    default = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(num_layers))
    types = read_layer_types(config, num_layers, default)
    if "sliding_attention" not in types:
        config.get("sliding_window")
        return (full,) * num_layers
    window = config.integer("sliding_window", None if "sliding_window" in config else _DEFAULT_WINDOW)
    return spread_window(full, types, window)


def _experts(config: HfConfig) -> MoeDecl:
    config.require_neutral({"hidden_act": ("silu",), "mlp_bias": (False,)})
    num_experts = read_num_experts(config, default=128)
    top_k = read_top_k(config, num_experts, default=4)
    config.require_neutral({"experts_per_token": (top_k,)})
    act = ClampedSwiglu(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    return MoeDecl(RoutingDecl(num_experts, top_k, has_bias=True), config.integer("intermediate_size"), act, bias=True)


def _build(config: HfConfig) -> ArchSpec:
    experts = _experts(config)
    layers = tuple(LayerDecl(attention, experts) for attention in _attention(config))
    return decoder_spec(config, layers, default_eps=_DEFAULT_EPS, default_positions=_DEFAULT_POSITIONS)


FAMILY = Family(
    _build,
    (
        *pre_norm_rules(),
        Rename("model.layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks"),
        Rename("model.layers.{i}.mlp.router.{leaf}", "layers.{i}.mlp.router.{leaf}"),
        *transposed_expert_rules("gate_up_proj", is_interleaved=True),
        *transposed_expert_rules("down_proj"),
        # Other formats number the experts.
        *mlp_rules(source="mlp.experts.{e}", parameter="mlp.experts.{e}"),
    ),
)
