"""Tiny random checkpoints of any causal language model of transformers, for tests of the transformers backend."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.tiny_models import COMMON, scramble

OPENAI = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip

# Architectures without a family file, each with the values of its configuration beside ``COMMON``.
FALLBACK_MODELS: dict[str, Mapping[str, Any]] = {
    "CodeGenForCausalLM": {**OPENAI, "rotary_dim": 8},
    "Cohere2ForCausalLM": WINDOWS,
    "CohereForCausalLM": {"logit_scale": 0.3},
    "DiffLlamaForCausalLM": {},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
    "Exaone4ForCausalLM": WINDOWS,
    "Glm4ForCausalLM": {"head_dim": 16},
    "GlmForCausalLM": {"head_dim": 16},
    "GPTBigCodeForCausalLM": OPENAI,
    "GPTJForCausalLM": {**OPENAI, "rotary_dim": 8},
    "HeliumForCausalLM": {"head_dim": 16},
    "GraniteSWAForCausalLM": WINDOWS,
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "MiniCPM3ForCausalLM": LATENT,
    "NemotronForCausalLM": {},
    "OlmoeForCausalLM": EXPERTS,
    "OlmoForCausalLM": {"clip_qkv": 0.5},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {"qk_layernorm": True},
    "SmolLM3ForCausalLM": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "StableLmForCausalLM": {"use_qkv_bias": True},
    "Starcoder2ForCausalLM": {"sliding_window": 7},
    "VaultGemmaForCausalLM": {**WINDOWS, "head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
}

# What is refused, by its kind: architecture, values, and a pattern for the reason.
REFUSED_MODELS: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "recurrent": ("MambaForCausalLM", {"state_size": 4}, "it keeps a recurrent state between tokens"),
    "partly recurrent": (
        "Qwen3NextForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0},
        "it keeps a recurrent state between tokens",
    ),
    "recurrent, Griffin": ("RecurrentGemmaForCausalLM", {}, "it keeps a recurrent state between tokens"),
    "alibi": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}, "it takes no position_ids, .*"),
    "alibi, MPT": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "it takes no position_ids, .*"),
    "attention of its own": (
        "FalconForCausalLM",
        {},
        "its layers do not attend through transformers' attention interface",
    ),
    "not causal": ("BertLMHeadModel", {"is_decoder": False}, "BertSelfAttention is not causal: .*"),
    "a bias on scores": ("DogeForCausalLM", {"head_dim": 16}, "DogeAttention adds a mask or a bias of its own .*"),
    "chunks": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16},
        "Llama4TextAttention has a mask that is neither causal nor a sliding window",
    ),
    "positions that begin later": ("RobertaForCausalLM", {"is_decoder": True}, "it does not number the positions .*"),
    "found by the check": (
        "MiniMaxForCausalLM",
        {"head_dim": 16, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
        "its logits differ from transformers' own by .*; only 1 of its 2 layers attend .*",
    ),
}


def build(architecture: str, folder: Path, values: Mapping[str, Any]) -> Any:
    """Write a random checkpoint into ``folder`` and return the model that it holds, in float32."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**COMMON, **values})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    scramble(model)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, **values: Any) -> None:
    """Set values of the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
