"""Llama (1 to 3.x, SmolLM2 and others that use its class): the base case of the families."""

from typing import Any

from backend_engine.models.arch_spec import ArchSpec, AttentionDecl, GatedMlpDecl, RmsNormDecl
from backend_engine.models.family import Family
from backend_engine.models.hf_config import HfConfig
from backend_engine.models.rope_config import read_rope
from backend_engine.models.weight_rules import Fuse, Ignore, Rename, Rule, Tie

# Keys that change the maths and the values with which they do not; any other value is refused.
_NEUTRAL = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "partial_rotary_factor": (1,),
    "sliding_window": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
}


def _from_hf(values: dict[str, Any]) -> ArchSpec:
    config = HfConfig(values)
    config.require_neutral(_NEUTRAL)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or a head_dim")
    head_dim = config.integer("head_dim", hidden_size // num_heads or 1)
    if head_dim % 2:
        raise config.refuse("head_dim", f"an even number (it is {head_dim})")
    max_positions = config.integer("max_position_embeddings", 2048)
    has_bias = config.flag("attention_bias", False)
    return ArchSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        max_positions=max_positions,
        norm=RmsNormDecl(config.number("rms_norm_eps", 1e-6)),
        attention=AttentionDecl(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp=GatedMlpDecl(config.integer("intermediate_size"), config.flag("mlp_bias", False)),
        positions=read_rope(config, max_positions),
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


_LAYER = "model.layers.{i}."
RULES: tuple[Rule, ...] = (
    Rename("model.embed_tokens.weight", "embed_tokens.weight"),
    Rename("model.norm.weight", "norm.weight"),
    Tie("lm_head.weight", "lm_head.weight", shared_with="embed_tokens.weight"),
    Rename(_LAYER + "input_layernorm.weight", "layers.{i}.attention_norm.weight"),
    Rename(_LAYER + "post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Fuse(tuple(_LAYER + f"self_attn.{part}_proj.{{leaf}}" for part in "qkv"), "layers.{i}.attention.qkv_proj.{leaf}"),
    Rename(_LAYER + "self_attn.o_proj.{leaf}", "layers.{i}.attention.o_proj.{leaf}"),
    Fuse(tuple(_LAYER + f"mlp.{part}_proj.{{leaf}}" for part in ("gate", "up")), "layers.{i}.mlp.gate_up_proj.{leaf}"),
    Rename(_LAYER + "mlp.down_proj.{leaf}", "layers.{i}.mlp.down_proj.{leaf}"),
    Ignore(_LAYER + "self_attn.rotary_emb.inv_freq"),
)

FAMILY = Family(_from_hf, RULES)
