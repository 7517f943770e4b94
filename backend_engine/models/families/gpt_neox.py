"""GPT-NeoX (Pythia and others): both sublayers read the same stream, heads are rotated in part, and the checkpoint
fuses queries, keys and values head by head.
"""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.activations import PLAIN
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.mlp import PlainMlpDecl
from backend_engine.layers.norm import LayerNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import norm_rules
from backend_engine.models.family import Family
from backend_engine.models.rope_config import read_rope
from backend_engine.models.weight_rules import FuseInterleaved, Ignore, Rename, Tie

_DEFAULT_POSITIONS = 2048
_DEFAULT_PARTIAL = 0.25


def _build(config: HfConfig) -> ArchSpec:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise config.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
    head_dim = hidden_size // num_heads
    max_positions = config.integer("max_position_embeddings", _DEFAULT_POSITIONS)
    rope = read_rope(
        config,
        head_dim,
        max_positions,
        default_theta=config.number("rotary_emb_base", 10000.0),
        default_partial=config.number("rotary_pct", _DEFAULT_PARTIAL),
    )
    has_bias = config.flag("attention_bias", True)
    attention = AttentionDecl(num_heads, num_heads, head_dim, head_dim**-0.5, rope, has_bias, has_bias)
    act = PLAIN[config.choice("hidden_act", PLAIN, "gelu")]
    mlp = PlainMlpDecl(config.integer("intermediate_size"), act, bias=True)
    return ArchSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_positions=max_positions,
        norm=LayerNormDecl(config.number("layer_norm_eps", 1e-5)),
        layers=(LayerDecl(attention, mlp),) * config.num_layers(),
        block="parallel" if config.flag("use_parallel_residual", True) else "pre_norm",
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


_LAYER = "gpt_neox.layers.{i}."
FAMILY = Family(
    _build,
    (
        Rename("gpt_neox.embed_in.weight", "embed_tokens.weight"),
        Rename("gpt_neox.final_layer_norm.{leaf}", "norm.{leaf}"),
        Tie("embed_out.weight", "lm_head.weight", shared_with="embed_tokens.weight"),
        Tie("lm_head.weight", "lm_head.weight", shared_with="embed_tokens.weight"),
        *norm_rules("gpt_neox.", mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
        FuseInterleaved(_LAYER + "attention.query_key_value.{leaf}", "layers.{i}.mixer.qkv_proj.{leaf}"),
        Rename(_LAYER + "attention.dense.{leaf}", "layers.{i}.mixer.o_proj.{leaf}"),
        Rename(_LAYER + "mlp.dense_h_to_4h.{leaf}", "layers.{i}.mlp.up_proj.{leaf}"),
        Rename(_LAYER + "mlp.dense_4h_to_h.{leaf}", "layers.{i}.mlp.down_proj.{leaf}"),
        *(Ignore(_LAYER + "attention." + name) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    ),
)
