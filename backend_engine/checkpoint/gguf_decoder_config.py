"""What the architectures of GGUF files have in common, as config.json has it: heads, sizes, experts, windows.

Used by ``gguf_families.py``, each of whose entries says what it does differently.
"""

from typing import Any, NamedTuple

from backend_engine.checkpoint.gguf_files import GgufFiles
from backend_engine.checkpoint.gguf_keys import ModelKeys
from backend_engine.checkpoint.gguf_rope import rope_config

Config = dict[str, Any]


class GgufModel(NamedTuple):
    """What a config is made of: the metadata, and the tensors that are there."""

    keys: ModelKeys
    files: GgufFiles

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.files.tensors


def read_heads(model: GgufModel, default_dim: int | None = None) -> Config:
    """Heads and their size; keys and values have the same one."""
    keys = model.keys
    hidden_size, num_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", default_dim or max(1, hidden_size // num_heads))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise keys.refuse("attention.value_length", f"the same as attention.key_length, {head_dim}")
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
    }


def read_sizes(model: GgufModel) -> Config:
    """What all models have but GPT-2."""
    keys = model.keys
    return {
        "num_hidden_layers": keys.count("block_count"),
        "intermediate_size": keys.count("feed_forward_length"),
        "max_position_embeddings": keys.count("context_length"),
    }


def read_decoder(model: GgufModel) -> Config:
    """A model of root mean square norms whose heads are rotated as a whole."""
    keys, heads = model.keys, read_heads(model)
    if keys.count("rope.dimension_count", heads["head_dim"]) != heads["head_dim"]:
        raise keys.refuse("rope.dimension_count", f"the size of a head, {heads['head_dim']}")
    return {
        **heads,
        **read_sizes(model),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": model.has("blk.0.attn_q.bias"),
        **rope_config(keys, model.files, heads["head_dim"]),
    }


def read_expert_counts(model: GgufModel, key: str = "num_experts") -> Config:
    return {
        key: model.keys.count("expert_count"),
        "num_experts_per_tok": model.keys.count("expert_used_count"),
    }


def read_narrow_experts(model: GgufModel) -> Config:
    """Experts of a size of their own in every layer."""
    keys = model.keys
    counts = read_expert_counts(model)
    default = max(1, keys.count("feed_forward_length") // counts["num_experts_per_tok"])
    return {
        **counts,
        "moe_intermediate_size": keys.count("expert_feed_forward_length", default),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_layer_types(model: GgufModel, default_pattern: int) -> list[str]:
    """Which layers have a window: all but every n-th, or as listed."""
    keys, num_layers = model.keys, model.keys.count("block_count")
    key = "attention.sliding_window_pattern"
    stated = keys.get(key)
    pattern = default_pattern if stated is None else stated
    if isinstance(pattern, bool):
        pattern = (pattern,) * num_layers
    if isinstance(pattern, int) and pattern >= 0:
        pattern = tuple(pattern == 0 or (i + 1) % pattern != 0 for i in range(num_layers))
    if not isinstance(pattern, tuple) or len(pattern) != num_layers or not all(isinstance(p, bool) for p in pattern):
        raise keys.refuse(key, f"an integer, or a list of true and false for {num_layers} layers")
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern]
