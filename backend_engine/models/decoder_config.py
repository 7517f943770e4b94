"""What most decoder-only models of config.json share: heads, windows, feed-forward, and the weight rules for them.

Used by the model families, each of which says what it does differently. Refusals name key, value and expectation.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from backend_engine.config.hf_config import HfConfig
from backend_engine.layers.activations import GATED
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.norm import RmsNormDecl
from backend_engine.models.arch_spec import ArchSpec, LayerDecl
from backend_engine.models.rope_config import read_rope
from backend_engine.models.weight_rules import Fuse, Ignore, Rename, Rule, Tie

# What a model whose window has a switch means that does not say its size.
_DEFAULT_USED_WINDOW = 4096


class Heads(NamedTuple):
    """Query heads, key and value heads, and elements of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(config: HfConfig, default_kv_heads: int | None = None, default_head_dim: int | None = None) -> Heads:
    """The attention's heads. ``null`` for the number of key heads, or no such key and no default, means as many as
    query heads; without a size of their own, heads share the hidden size.
    """
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    is_stated = "num_key_value_heads" in config
    num_kv_heads = config.integer("num_key_value_heads", num_heads if is_stated else default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if config.get("head_dim") is None and default_head_dim is None and hidden_size % num_heads:
        raise config.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or a head_dim")
    head_dim = config.integer("head_dim", default_head_dim or hidden_size // num_heads or 1)
    if head_dim % 2:
        raise config.refuse("head_dim", f"an even number (it is {head_dim})")
    return Heads(num_heads, num_kv_heads, head_dim)


def read_attention(config: HfConfig, heads: Heads | None = None) -> AttentionDecl:
    """Rotated grouped-query attention over the whole text, scaled by the square root of a head's size."""
    heads = heads or read_heads(config)
    max_positions = config.integer("max_position_embeddings", 2048)
    has_bias = config.flag("attention_bias", False)
    return AttentionDecl(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=read_rope(config, heads.head_dim, max_positions),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def read_layer_types(config: HfConfig, num_layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    """``full_attention`` or ``sliding_attention`` for each layer; ``default``: what it is when not stated."""
    types = config.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.refuse("layer_types", f"a list of {num_layers} names, one for each of num_hidden_layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise config.refuse("layer_types", "full_attention or sliding_attention for each layer")
    return tuple(types)


def read_used_window(config: HfConfig) -> int | None:
    """The window, where its switch is on; without it the one that a configuration states is not used."""
    if config.flag("use_sliding_window", False):
        return config.integer("sliding_window", None if "sliding_window" in config else _DEFAULT_USED_WINDOW)
    config.get("sliding_window")
    return None


def spread_window(attention: AttentionDecl, types: Sequence[str], window: int | None) -> tuple[AttentionDecl, ...]:
    """``attention`` for each layer, with ``window`` on those of type ``sliding_attention``."""
    windowed = dataclasses.replace(attention, sliding_window=window)
    return tuple(windowed if kind == "sliding_attention" else attention for kind in types)


def read_mlp(config: HfConfig, act_key: str = "hidden_act", default_act: str = "silu") -> GatedMlpDecl:
    """The gated feed-forward layer."""
    act = GATED[config.choice(act_key, GATED, default_act)]
    return GatedMlpDecl(config.integer("intermediate_size"), act, config.flag("mlp_bias", False))


def decoder_spec(
    config: HfConfig,
    layers: tuple[LayerDecl, ...],
    *,
    tie_embeddings: bool = False,
    default_eps: float = 1e-6,
    default_positions: int = 2048,
) -> ArchSpec:
    """The model of ``layers`` with root mean square norms before them; further arguments: when nothing is stated."""
    return ArchSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings", default_positions),
        norm=RmsNormDecl(config.number("rms_norm_eps", default_eps)),
        layers=layers,
        tie_embeddings=config.flag("tie_word_embeddings", tie_embeddings),
    )


def model_rules(prefix: str = "model.") -> tuple[Rule, ...]:
    """Embedding, last norm and head."""
    return (
        Rename(prefix + "embed_tokens.weight", "embed_tokens.weight"),
        Rename(prefix + "norm.weight", "norm.weight"),
        Tie("lm_head.weight", "lm_head.weight", shared_with="embed_tokens.weight"),
        Ignore(prefix + "layers.{i}.self_attn.rotary_emb.inv_freq"),
    )


def attention_rules(prefix: str = "model.") -> tuple[Rule, ...]:
    """Projections of an attention layer called ``self_attn``, with its norms on queries and keys where it has them."""
    attention = prefix + "layers.{i}.self_attn."
    return (
        Fuse(tuple(attention + f"{part}_proj.{{leaf}}" for part in "qkv"), "layers.{i}.mixer.qkv_proj.{leaf}"),
        Rename(attention + "o_proj.{leaf}", "layers.{i}.mixer.o_proj.{leaf}"),
        Rename(attention + "{part}_norm.weight", "layers.{i}.mixer.{part}_norm.weight"),
    )


def norm_rules(prefix: str = "model.", **norms: str) -> tuple[Rule, ...]:
    """The norms of a layer: our names, each with the checkpoint's."""
    return tuple(
        Rename(f"{prefix}layers.{{i}}.{source}.{{leaf}}", f"layers.{{i}}.{name}.{{leaf}}")
        for name, source in norms.items()
    )


def mlp_rules(prefix: str = "model.", source: str = "mlp", parameter: str = "mlp") -> tuple[Rule, ...]:
    """A gated feed-forward layer; ``source`` and ``parameter``: what it is called within its layer."""
    mlp, ours = f"{prefix}layers.{{i}}.{source}.", f"layers.{{i}}.{parameter}."
    return (
        Fuse(tuple(mlp + f"{part}_proj.{{leaf}}" for part in ("gate", "up")), ours + "gate_up_proj.{leaf}"),
        Rename(mlp + "down_proj.{leaf}", ours + "down_proj.{leaf}"),
    )


def pre_norm_rules(prefix: str = "model.") -> tuple[Rule, ...]:
    """A model of the usual names but for its feed-forward layers: pre-norm layers of attention."""
    norms = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return model_rules(prefix) + norm_rules(prefix, **norms) + attention_rules(prefix)


def decoder_rules(prefix: str = "model.") -> tuple[Rule, ...]:
    """A whole model of the usual names: pre-norm layers of attention and a gated feed-forward layer."""
    return pre_norm_rules(prefix) + mlp_rules(prefix)
