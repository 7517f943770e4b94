"""Names of tensors in NVIDIA's formats, all as Megatron-core spells them, and how ranks share each tensor.

``core_name`` knows the spellings of Megatron-core with and without Transformer Engine, of earlier Megatron-LM and of
NeMo. Data, and the use of it; reads no file.
"""

import re
from typing import Literal

# Modules that only hold the model.
_WRAPPERS = re.compile(r"^(?:(?:state_dict|model|module|language_model)\.)+")
_IGNORED = re.compile(
    r".*\._extra_state(/.*)?|.*\binv_freq|(optimizer|rng_state|chained_|rerun_state)\b.*|mtp\..*|.*\b(attn_mask|masked_bias)"
)
# In earlier spellings a layer is under encoder or transformer.
_LAYER = re.compile(r"^(?:encoder|transformer|decoder)\.layers\.")
_SPELLINGS = (
    (re.compile(r"^(?:encoder|transformer)\."), "decoder."),
    (re.compile(r"^word_embeddings_for_head\.weight$"), "output_layer.weight"),
    (re.compile(r"^word_embeddings\.weight$"), "output_layer.weight"),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
)
_LAYER_SPELLINGS = (
    (re.compile(r"^attention\."), "self_attention."),
    (re.compile(r"^input_norm\."), "input_layernorm."),
    (re.compile(r"^post_attention_(?:layer)?norm\."), "pre_mlp_layernorm."),
    (re.compile(r"^self_attention\.query_key_value\."), "self_attention.linear_qkv."),
    (re.compile(r"^self_attention\.dense\."), "self_attention.linear_proj."),
    (re.compile(r"^self_attention\.linear_qkv\.layer_norm_"), "input_layernorm."),
    (re.compile(r"^mlp\.dense_h_to_4h\."), "mlp.linear_fc1."),
    (re.compile(r"^mlp\.dense_h_to_4h_2\."), "mlp.linear_fc1_up."),
    (re.compile(r"^mlp\.dense_4h_to_h\."), "mlp.linear_fc2."),
    (re.compile(r"^mlp\.linear_fc1\.layer_norm_"), "pre_mlp_layernorm."),
    (re.compile(r"^mlp\.experts\.experts\."), "mlp.experts."),
    (re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)
_BY_ROWS = re.compile(
    r"(embedding\.word_embeddings|output_layer)\.weight|.*\.(linear_qkv|linear_fc1|linear_fc1_up)\.(weight|bias)"
)
_BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")


def core_name(name: str) -> str | None:
    """The name as Megatron-core has it; ``None`` for what an answer does not need."""
    if _IGNORED.fullmatch(_WRAPPERS.sub("", name)):
        return None
    name = _WRAPPERS.sub("", name)
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    match = _LAYER.match(name)
    if match is None:
        return name
    number, dot, rest = name[match.end() :].partition(".")
    is_numbered = number.isdigit() and bool(dot)
    rest = rest if is_numbered else name[match.end() :]
    for pattern, replacement in _LAYER_SPELLINGS:
        rest = pattern.sub(replacement, rest)
    return f"decoder.layers.{number}.{rest}" if is_numbered else f"decoder.layers.{rest}"


def split_layer(name: str) -> tuple[int, str] | None:
    """Number of the layer and the name within it; ``None`` outside the layers."""
    match = _NUMBER.match(name)
    return (int(match[1]), match[2]) if match else None


def shared_by(name: str) -> Literal["rows", "columns"] | None:
    """By what the ranks of a tensor-parallel group share a tensor; ``None``: each has all of it."""
    if _BY_ROWS.fullmatch(name):
        return "rows"
    return "columns" if _BY_COLUMNS.fullmatch(name) else None
