"""The names that GGUF files and Hugging Face have for the same tensor, architecture by architecture.

Data for ``gguf_names.py``: where the converter changed a tensor, the rule says how that is undone.
"""

from collections.abc import Mapping
from typing import NamedTuple

from backend_engine.checkpoint.gguf_changes import (
    Change,
    by_head,
    each_expert,
    less_one,
    one_row,
    rotated_halves,
    same,
    transposed,
)


class NameRule(NamedTuple):
    """``{i}``, ``{e}``, ``{leaf}``: any one part of a name, the same on both sides."""

    source: str
    target: str
    change: Change = same


def _layer(rules: Mapping[str, str], change: Change = same, prefix: str = "model.layers.{i}.") -> tuple[NameRule, ...]:
    return tuple(
        NameRule(f"blk.{{i}}.{source}.{{leaf}}", f"{prefix}{target}.{{leaf}}", change)
        for source, target in rules.items()
    )


def _model(norm: Change = same) -> tuple[NameRule, ...]:
    return (
        NameRule("token_embd.weight", "model.embed_tokens.weight"),
        NameRule("output_norm.weight", "model.norm.weight", norm),
        NameRule("output.weight", "lm_head.weight"),
    )


_QKV = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
_OUT = {"attn_output": "self_attn.o_proj"}
_QK_NORMS = {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_SHARED = {f"ffn_{part}_shexp": f"mlp.{{shared}}.{part}_proj" for part in ("gate", "up", "down")}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")}
_MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}


def _shared(name: str) -> dict[str, str]:
    return {source: target.replace("{shared}", name) for source, target in _SHARED.items()}


_USUAL = (*_model(), *_layer({**_QKV, **_OUT, **_NORMS, **_MLP}))
_ROTATED = (
    *_layer({"attn_q": "self_attn.q_proj"}, rotated_halves("num_attention_heads")),
    *_layer({"attn_k": "self_attn.k_proj"}, rotated_halves("num_key_value_heads")),
)
_GEMMA = (*_model(less_one), *_layer({**_QKV, **_OUT, **_MLP}))
_SANDWICH = (*_GEMMA, *_layer({**_FOUR_NORMS, **_QK_NORMS}, less_one))
_ROUTED = (*_layer(_EXPERTS, each_expert), *_layer({"ffn_gate_inp": "mlp.gate"}))
_SPARSE = "block_sparse_moe."

RULES: Mapping[str, tuple[NameRule, ...]] = {
    "deepseek2": (
        *_model(),
        *_layer({**_OUT, **_NORMS, **_MLP, **_shared("shared_experts")}),
        *_layer({"attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj"}),
        *_layer({"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj"}),
        *_layer({"attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_norm": "self_attn.kv_a_layernorm"}),
        *_ROUTED,
        NameRule("blk.{i}.exp_probs_b.bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
    ),
    "gemma": (*_GEMMA, *_layer(_NORMS, less_one)),
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gpt-oss": (
        *_model(),
        *_layer({**_QKV, **_OUT, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}),
        *_layer(_EXPERTS, each_expert),
        *_layer({"ffn_gate_inp": "mlp.router"}),
        NameRule("blk.{i}.attn_sinks.weight", "model.layers.{i}.self_attn.sinks"),
    ),
    "gpt2": (
        NameRule("token_embd.weight", "transformer.wte.weight"),
        NameRule("position_embd.weight", "transformer.wpe.weight"),
        NameRule("output_norm.{leaf}", "transformer.ln_f.{leaf}"),
        NameRule("output.weight", "lm_head.weight"),
        *_layer({"attn_norm": "ln_1", "ffn_norm": "ln_2"}, prefix="transformer.h.{i}."),
        *_layer(
            {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            transposed,
            prefix="transformer.h.{i}.",
        ),
    ),
    "gptneox": (
        NameRule("token_embd.weight", "gpt_neox.embed_in.weight"),
        NameRule("output_norm.{leaf}", "gpt_neox.final_layer_norm.{leaf}"),
        NameRule("output.weight", "embed_out.weight"),
        *_layer(_NORMS, prefix="gpt_neox.layers.{i}."),
        *_layer({"attn_qkv": "attention.query_key_value"}, by_head, prefix="gpt_neox.layers.{i}."),
        *_layer(
            {"attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
            prefix="gpt_neox.layers.{i}.",
        ),
    ),
    "granite": (*_ROTATED, *_USUAL),
    "llama": (
        *_ROTATED,
        *_USUAL,
        *_layer({f"ffn_{part}_exps": f"{_SPARSE}experts.{{e}}.{w}" for part, w in _MIXTRAL.items()}, each_expert),
        *_layer({f"ffn_{part}.{{e}}": f"{_SPARSE}experts.{{e}}.{w}" for part, w in _MIXTRAL.items()}),
        *_layer({"ffn_gate_inp": f"{_SPARSE}gate"}),
    ),
    "olmo2": (*_model(), *_layer({**_QKV, **_OUT, **_QK_NORMS, **_POST_NORMS, **_MLP})),
    "phi3": (
        *_model(),
        *_layer({**_OUT, **_NORMS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
        *_layer({"ffn_down": "mlp.down_proj"}),
    ),
    "qwen2": _USUAL,
    "qwen2moe": (
        *_USUAL,
        *_ROUTED,
        *_layer(_shared("shared_expert")),
        *_layer({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, one_row),
    ),
    "qwen3": (*_USUAL, *_layer(_QK_NORMS)),
    "qwen3moe": (*_USUAL, *_layer(_QK_NORMS), *_ROUTED),
}
"""By ``general.architecture``; the first rule that fits a name is taken."""
