"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint, partly rotated heads and LongRoPE."""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.decoder_config import decoder_spec, model_rules, norm_rules, read_heads, read_mlp
from backend_engine.models.family import Family
from backend_engine.models.rope_config import read_rope
from backend_engine.models.weight_rules import Rename

_DEFAULT_POSITIONS = 4096
_DEFAULT_EPS = 1e-5


def _build(config: HfConfig) -> ArchSpec:
    heads = read_heads(config)
    max_positions = config.integer("max_position_embeddings", _DEFAULT_POSITIONS)
    # Early configurations call LongRoPE su or yarn.
    rope = read_rope(
        config,
        heads.head_dim,
        max_positions,
        default_partial=1.0,
        aliases={"yarn": "longrope"},
        default_original=_DEFAULT_POSITIONS,
    )
    window = config.get("sliding_window") and config.integer("sliding_window")
    attention = AttentionDecl(*heads, scale=heads.head_dim**-0.5, rope=rope, sliding_window=window)
    layer = LayerDecl(attention, read_mlp(config))
    config.require_neutral({"attention_bias": (False,), "mlp_bias": (False,)})
    layers = (layer,) * config.num_layers()
    return decoder_spec(config, layers, default_eps=_DEFAULT_EPS, default_positions=_DEFAULT_POSITIONS)


_LAYER = "model.layers.{i}."
FAMILY = Family(
    _build,
    (
        *model_rules(),
        *norm_rules(mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
        Rename(_LAYER + "self_attn.qkv_proj.{leaf}", "layers.{i}.mixer.qkv_proj.{leaf}"),
        Rename(_LAYER + "self_attn.o_proj.{leaf}", "layers.{i}.mixer.o_proj.{leaf}"),
        Rename(_LAYER + "mlp.gate_up_proj.{leaf}", "layers.{i}.mlp.gate_up_proj.{leaf}"),
        Rename(_LAYER + "mlp.down_proj.{leaf}", "layers.{i}.mlp.down_proj.{leaf}"),
    ),
)
