"""What models of latent attention and grouped experts share: both as config.json has them, and the weight rules.

Used by the model families. Refusals name key, value and expectation.
"""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.latent_attention import LatentAttentionDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.arch_spec import LayerDecl
from backend_engine.models.decoder_config import mlp_rules, model_rules, norm_rules, read_mlp
from backend_engine.models.rope_config import read_rope, yarn_temperature
from backend_engine.models.weight_rules import IgnoreBeside, Rename, Rule


def read_latent_attention(config: HfConfig, *, is_interleaved: bool) -> LatentAttentionDecl:
    """The attention of all layers; ``is_interleaved``: how the checkpoint pairs rotated elements."""
    num_heads = config.integer("num_attention_heads")
    config.require_neutral({"num_key_value_heads": (num_heads,)})
    config.get("head_dim")  # Derived from the parts of a head by whoever writes it.
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.refuse("qk_rope_head_dim", "an even number")
    if "q_lora_rank" not in config:
        raise config.refuse("q_lora_rank", "an integer of at least 1, or null")
    has_bias = config.flag("attention_bias", False)
    max_positions = config.integer("max_position_embeddings")
    return LatentAttentionDecl(
        num_heads=num_heads,
        kv_rank=config.integer("kv_lora_rank"),
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _temperature(config) ** 2,
        rope=read_rope(config, rope_dim, max_positions, is_interleaved=is_interleaved),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _temperature(config: HfConfig) -> float:
    """What a stretched context multiplies queries and keys with."""
    settings = config.section("rope_scaling") or config.section("rope_parameters")
    if settings is None or not settings.get("mscale_all_dim"):
        return 1.0
    if (settings.get("rope_type") or settings.get("type")) == "default":
        return 1.0
    return yarn_temperature(settings.number("factor"), settings.number("mscale_all_dim"))


def read_groups(config: HfConfig, min_group_size: int) -> tuple[int, int]:
    """Number of groups of experts, and of those that are chosen from."""
    num_experts, num_groups = config.integer("n_routed_experts"), config.integer("n_group")
    if num_experts % num_groups or num_experts // num_groups < min_group_size:
        allowed = f"a divisor of n_routed_experts, {num_experts}, with at least {min_group_size} experts a group"
        raise config.refuse("n_group", allowed)
    top_k, top_groups = config.integer("num_experts_per_tok"), config.integer("topk_group")
    if not top_k <= top_groups * (num_experts // num_groups) <= num_experts:
        allowed = f"at most n_group, {num_groups}, and enough for num_experts_per_tok, {top_k}, experts"
        raise config.refuse("topk_group", allowed)
    return num_groups, top_groups


def read_layers(config: HfConfig, mixer: LatentAttentionDecl, routing: RoutingDecl) -> tuple[LayerDecl, ...]:
    """All layers: dense ones first, then every ``moe_layer_freq``-th with experts."""
    config.require_neutral({"mlp_bias": (False,)})
    dense, size = read_mlp(config), config.integer("moe_intermediate_size")
    sparse = MoeDecl(routing, size, dense.act, shared_size=size * config.integer("n_shared_experts"))
    first, every = config.count("first_k_dense_replace"), config.integer("moe_layer_freq", 1)
    return tuple(
        LayerDecl(mixer, sparse if i >= first and i % every == 0 else dense) for i in range(config.num_layers())
    )


_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."
RULES: tuple[Rule, ...] = (
    *model_rules(),
    *norm_rules(mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    Rename(_LAYER + "self_attn.kv_a_proj_with_mqa.{leaf}", _OURS + "mixer.kv_a_proj.{leaf}"),
    Rename(_LAYER + "self_attn.{part}_proj.{leaf}", _OURS + "mixer.{part}_proj.{leaf}"),
    Rename(_LAYER + "self_attn.{part}_layernorm.weight", _OURS + "mixer.{part}_norm.weight"),
    *mlp_rules(),
    *mlp_rules(source="mlp.shared_experts", parameter="mlp.shared"),
    *mlp_rules(source="mlp.experts.{e}", parameter="mlp.experts.{e}"),
    Rename(_LAYER + "mlp.gate.weight", _OURS + "mlp.router.weight"),
    Rename(_LAYER + "mlp.gate.e_score_correction_bias", _OURS + "mlp.router.correction_bias"),
    # Layers behind the last, which predict several tokens at once, are no part of the model.
    IgnoreBeside(_LAYER, _LAYER + "eh_proj.weight"),
)
