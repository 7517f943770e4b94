"""``read_args``: the arguments that Megatron-LM stores in its checkpoints, as a ``MegatronModel``.

Source: megatron/training/arguments.py; checkpoints of earlier releases lack the later keys. Every key that changes
what the model computes is read here or refused, by name. Opens no file.
"""

from collections.abc import Collection, Mapping
from typing import Any

from backend_engine.checkpoint.hf_rope import llama3_scaling
from backend_engine.checkpoint.megatron_model import MegatronModel, read_groups, read_share, read_sizes
from backend_engine.config.hf_config import MAX_LAYERS, HfConfig

# What each key may be; absent or None is allowed as well.
_NEUTRAL: dict[str, Collection[Any]] = {
    "activation_func_clamp_value": (),
    "apply_residual_connection_post_layernorm": (False,),
    "apply_residual_connection_post_norm": (False,),
    "attention_output_gate": (False,),
    "bert_binary_head": (True, False),
    "encoder_num_layers": (),
    "experimental_attention_variant": (),
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (1,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_path": (),
    "hybrid_attention_ratio": (0.0,),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (False,),
    "linear_attention_freq": (),
    "moe_latent_size": (),
    "moe_layer_freq": (1,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_group_topk": (),
    "moe_router_num_groups": (),
    "moe_router_pre_softmax": (False,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (),
    "moe_shared_expert_intermediate_size": (),
    "mrope_section": (),
    "multi_latent_attention": (False,),
    "no_rope_freq": (),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "retro_add_retriever": (False,),
    "rotary_interleaved": (False,),
    "softmax_scale": (),
    "softmax_type": ("vanilla",),
    "window_attn_skip_freq": (),
    "window_size": (),
}  # fmt: skip


def refuse_other_models(config: HfConfig) -> None:
    """Refuse the keys of Megatron's transformer that mean another model than ``MegatronModel`` says."""
    config.require_neutral(_NEUTRAL)


def read_args(args: Mapping[str, Any], where: str) -> MegatronModel:
    """The model that the arguments describe. Raises ``ModelLoadError`` naming key and value."""
    config = HfConfig(args, where)
    refuse_other_models(config)
    hidden_size, num_heads, head_dim = read_sizes(config)
    is_grouped = config.flag("group_query_attention", False)
    has_bias = config.flag("add_bias_linear", True)
    activation, is_gated = _activation(config, has_bias)
    num_experts = config.count("num_experts", 0)
    ffn_size = config.integer("ffn_hidden_size", None if is_gated else 4 * hidden_size)
    return MegatronModel(
        where=where,
        num_layers=config.integer("num_layers", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_groups=read_groups(config, num_heads, num_heads) if is_grouped else num_heads,
        head_dim=head_dim,
        ffn_size=config.integer("moe_ffn_hidden_size", ffn_size) if num_experts else ffn_size,
        max_positions=config.integer("max_position_embeddings"),
        norm=config.choice("normalization", ("LayerNorm", "RMSNorm"), "LayerNorm").lower(),
        eps=config.number("norm_epsilon", config.number("layernorm_epsilon", 1e-5)),
        adds_one=config.flag("apply_layernorm_1p", False),
        activation=activation,
        is_gated=is_gated,
        has_bias=has_bias,
        qkv_bias=config.flag("add_qkv_bias", False) or has_bias,
        has_qk_norm=config.flag("qk_layernorm", False),
        positions=_positions(config),
        rope_theta=config.number("rotary_base", 10000.0),
        rotary_percent=read_share(config, "rotary_percent"),
        rope_scaling=_rope_scaling(config),
        is_tied=not config.flag("untie_embeddings_and_output_weights", False),
        num_experts=num_experts,
        top_k=config.integer("moe_router_topk", 2),
        vocab_size=_vocab_size(config),
    )


def _activation(config: HfConfig, has_bias: bool) -> tuple[str, bool]:
    """Hugging Face's name of the activation, and whether it gates."""
    is_gated = config.flag("swiglu", False)
    is_squared = config.flag("squared_relu", False)
    if is_gated and is_squared:
        raise config.refuse("squared_relu", "false, since swiglu is true")
    if is_gated or is_squared:
        return ("silu" if is_gated else "relu2"), is_gated
    # Bias and GELU in one kernel is the variant with tanh, as is OpenAI's.
    is_tanh = config.flag("openai_gelu", False) or (config.flag("bias_gelu_fusion", True) and has_bias)
    return ("gelu_new" if is_tanh else "gelu"), False


def _positions(config: HfConfig) -> str:
    if config.flag("use_rotary_position_embeddings", False):
        return "rope"
    kind = config.choice("position_embedding_type", ("rope", "learned_absolute"), "learned_absolute")
    if kind == "learned_absolute" and not config.flag("add_position_embedding", True):
        raise config.refuse("add_position_embedding", "true, or use_rotary_position_embeddings")
    return "rope" if kind == "rope" else "learned"


def _rope_scaling(config: HfConfig) -> dict[str, Any] | None:
    factor = config.get("rotary_seq_len_interpolation_factor")
    if config.flag("use_rope_scaling", False):
        config.require_neutral({"rotary_seq_len_interpolation_factor": (1,)})
        return llama3_scaling(config.number("rope_scaling_factor", 8.0))
    if factor is None or factor == 1:
        return None
    return {"rope_type": "linear", "factor": config.number("rotary_seq_len_interpolation_factor")}


def _vocab_size(config: HfConfig) -> int | None:
    """The vocabulary without the rows that were added to split it evenly, where the arguments tell."""
    if config.get("vocab_size") is None:
        return None
    # The tokenizer of numbers has its end beside the vocabulary that is stated.
    return config.integer("vocab_size") + (1 if config.get("tokenizer_type") == "NullTokenizer" else 0)
