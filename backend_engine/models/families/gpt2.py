"""GPT-2: layer norms, a learned position table, a plain feed-forward layer, biases everywhere, a tied head.

Its checkpoints store products transposed, with or without a prefix before all names.
"""

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.activations import PLAIN
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.mlp import PlainMlpDecl
from backend_engine.layers.norm import LayerNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.family import Family
from backend_engine.models.weight_rules import Ignore, Rename, Rule, Tie, Transpose


def _build(config: HfConfig) -> ArchSpec:
    hidden_size, num_heads = config.integer("n_embd", 768), config.integer("n_head", 12)
    num_layers, positions = config.integer("n_layer", 12), config.integer("n_positions", 1024)
    if hidden_size % num_heads:
        raise config.refuse("n_head", f"a divisor of n_embd, {hidden_size}")
    head_dim = hidden_size // num_heads
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    act = PLAIN[config.choice("activation_function", PLAIN, "gelu_new")]
    mlp = PlainMlpDecl(config.integer("n_inner", 4 * hidden_size), act, bias=True)
    layers = (
        AttentionDecl(num_heads, num_heads, head_dim, scale / (i + 1 if by_layer else 1), None, True, True)
        for i in range(num_layers)
    )
    return ArchSpec(
        vocab_size=config.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        max_positions=positions,
        norm=LayerNormDecl(config.number("layer_norm_epsilon", 1e-5)),
        layers=tuple(LayerDecl(attention, mlp) for attention in layers),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        learned_positions=positions,
    )


def _rules(prefix: str) -> tuple[Rule, ...]:
    layer = prefix + "h.{i}."
    products = {"attn.c_attn": "mixer.qkv_proj", "attn.c_proj": "mixer.o_proj", "mlp.c_fc": "mlp.up_proj",
                "mlp.c_proj": "mlp.down_proj"}  # fmt: skip
    return (
        Rename(prefix + "wte.weight", "embed_tokens.weight"),
        Rename(prefix + "wpe.weight", "embed_positions.weight"),
        Rename(prefix + "ln_f.{leaf}", "norm.{leaf}"),
        Rename(layer + "ln_1.{leaf}", "layers.{i}.mixer_norm.{leaf}"),
        Rename(layer + "ln_2.{leaf}", "layers.{i}.mlp_norm.{leaf}"),
        *(Transpose(f"{layer}{theirs}.weight", f"layers.{{i}}.{ours}.weight") for theirs, ours in products.items()),
        *(Rename(f"{layer}{theirs}.bias", f"layers.{{i}}.{ours}.bias") for theirs, ours in products.items()),
        Ignore(layer + "attn.bias"),
        Ignore(layer + "attn.masked_bias"),
    )


FAMILY = Family(
    _build,
    (*_rules("transformer."), *_rules(""), Tie("lm_head.weight", "lm_head.weight", shared_with="embed_tokens.weight")),
)
