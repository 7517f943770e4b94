"""Mamba-2 (Codestral Mamba and others): layers of a state space mixer and nothing else, no attention."""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.family import Family
from backend_engine.models.mamba2_config import Mamba2Keys, mamba2_rules, read_mamba2
from backend_engine.models.weight_rules import Rename, Rule, Tie

_KEYS = Mamba2Keys(
    num_heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    state_size=("state_size", 128),
    num_groups=("n_groups", 8),
    conv_kernel=("conv_kernel", 4),
    expand=("expand", 2),
    bias=("use_bias", False),
    conv_bias=("use_conv_bias", True),
)


def _build(config: HfConfig) -> ArchSpec:
    eps = config.number("layer_norm_epsilon", 1e-5)
    layer = LayerDecl(read_mamba2(config, _KEYS, eps), None)
    config.get("intermediate_size")  # expand * hidden_size, where it is stated; nobody reads it
    has_limit = config.get("max_position_embeddings") is not None
    return ArchSpec(
        vocab_size=config.integer("vocab_size", 32768),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings") if has_limit else None,
        norm=RmsNormDecl(eps),
        layers=(layer,) * config.num_layers(64),
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


_LAYER = "backbone.layers.{i}."
RULES: tuple[Rule, ...] = (
    Rename("backbone.embeddings.weight", "embed_tokens.weight"),
    Rename("backbone.embedding.weight", "embed_tokens.weight"),
    Rename("backbone.norm_f.weight", "norm.weight"),
    Tie("lm_head.weight", "lm_head.weight", shared_with="embed_tokens.weight"),
    Rename(_LAYER + "norm.weight", "layers.{i}.mixer_norm.weight"),
    *mamba2_rules(_LAYER + "mixer."),
)

FAMILY = Family(_build, RULES)
