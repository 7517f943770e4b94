"""Granite 4: Granite whose layers mix tokens by Mamba-2 or by attention, which may do without positions, and which
has experts beside a shared feed-forward layer, or the latter alone.
"""

import dataclasses

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.activations import GATED
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_spec, pre_norm_rules, read_attention
from backend_engine.models.families.granite import scaled
from backend_engine.models.family import Family
from backend_engine.models.mamba2_config import Mamba2Keys, mamba2_rules, read_mamba2, read_mamba_layers
from backend_engine.models.moe_config import read_num_experts, read_top_k
from backend_engine.models.weight_rules import Rename, Rule, Unstack

_KEYS = Mamba2Keys(
    num_heads=("mamba_n_heads", 128),
    head_dim=("mamba_d_head", None),
    state_size=("mamba_d_state", 256),
    num_groups=("mamba_n_groups", 1),
    conv_kernel=("mamba_d_conv", 4),
    expand=("mamba_expand", 2),
    bias=("mamba_proj_bias", False),
    conv_bias=("mamba_conv_bias", True),
)


def _build(config: HfConfig) -> ArchSpec:
    config.choice("normalization_function", ("rmsnorm",), "rmsnorm")
    attention, mlp = _attention(config), _mlp(config)
    is_mamba = read_mamba_layers(config)
    # A model of attention alone may state whatever it likes about the other kind.
    mamba = read_mamba2(config, _KEYS, config.number("rms_norm_eps", 1e-6)) if any(is_mamba) else None
    mixers = [mamba if mamba is not None and is_here else attention for is_here in is_mamba]
    return scaled(config, decoder_spec(config, tuple(LayerDecl(mixer, mlp) for mixer in mixers)))


def _attention(config: HfConfig) -> AttentionDecl:
    attention = dataclasses.replace(read_attention(config), scale=config.number("attention_multiplier", 1.0))
    is_rotated = config.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    return attention if is_rotated else dataclasses.replace(attention, rope=None)


def _mlp(config: HfConfig) -> GatedMlpDecl | MoeDecl:
    act = GATED[config.choice("hidden_act", GATED, "silu")]
    shared = GatedMlpDecl(config.integer("shared_intermediate_size", 1024), act)
    size, num_experts = config.integer("intermediate_size", 11008), read_num_experts(config, 8, at_least=0)
    if not num_experts:
        config.get("num_experts_per_tok")  # of no experts
        return shared
    routing = RoutingDecl(num_experts, read_top_k(config, num_experts, 2))
    return MoeDecl(routing, size, act, shared_size=shared.size)


_LAYER = "model.layers.{i}."
_MOE = _LAYER + "block_sparse_moe."
_SHARED = (("input_linear.weight", "gate_up_proj.weight"), ("output_linear.weight", "down_proj.weight"))
_EXPERTS = (*_SHARED, ("experts.gate_up_proj", "gate_up_proj.weight"), ("experts.down_proj", "down_proj.weight"))
RULES: tuple[Rule, ...] = (
    *pre_norm_rules(),
    *mamba2_rules(_LAYER + "mamba."),
    *(Rename(f"{_LAYER}shared_mlp.{source}", f"layers.{{i}}.mlp.{ours}") for source, ours in _SHARED),
    *(Rename(f"{_LAYER}shared_mlp.{source}", f"layers.{{i}}.mlp.shared.{ours}") for source, ours in _SHARED),
    *(Unstack(_MOE + source, f"layers.{{i}}.mlp.experts.{{e}}.{ours}") for source, ours in _EXPERTS),
    Rename(_MOE + "router.layer.weight", "layers.{i}.mlp.router.weight"),
    Rename(_MOE + "router.weight", "layers.{i}.mlp.router.weight"),
)

FAMILY = Family(_build, RULES)
