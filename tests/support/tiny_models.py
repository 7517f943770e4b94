"""Tiny random checkpoints of every model family, written by transformers, for parity tests and the generated docs.

``TINY_MODELS``: one row for each thing that is tested about a family. The values are small, unlike each other wherever
a mistake could hide behind equal ones, and noisy enough for every tensor to matter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class TinyModel(NamedTuple):
    """``architecture``: transformers' class, ``about``: what this row tests, ``values``: what its configuration has
    beside those of ``COMMON`` that such configurations know.
    """

    architecture: str
    about: str
    values: Mapping[str, Any]

    def config(self) -> Any:
        """The configuration, as transformers has it."""
        config_class = getattr(transformers, self.architecture).config_class
        known = config_class().to_dict()
        return config_class(**{**{key: value for key, value in COMMON.items() if key in known}, **self.values})


def _tiny(architecture: str, about: str, **values: Any) -> TinyModel:
    return TinyModel(architecture, about, values)


ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
}  # fmt: skip


def _deepseek(architecture: str, about: str, **values: Any) -> TinyModel:
    latent = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    }
    return _tiny(architecture, about, **{**latent, **values})


GPT2: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 160}

GRANITE_HYBRID: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_conv": 3, "mamba_chunk_size": 16, "shared_intermediate_size": 72,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.11, "logits_scaling": 2.5,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16,
}  # fmt: skip

TINY_MODELS: dict[str, TinyModel] = {
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM",
        "groups of experts, a compressed query, biases, a dense first layer, YaRN that scales the scores",
        q_lora_rank=20,
        attention_bias=True,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        rope_parameters={**YARN, "mscale": 0.9, "mscale_all_dim": 0.6},
    ),
    "deepseek_v2_lite": _deepseek(
        "DeepseekV2ForCausalLM",
        "experts without groups in every layer, whole queries, biases",
        q_lora_rank=None,
        first_k_dense_replace=0,
        attention_bias=True,
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM",
        "corrected choice of experts in groups, a compressed query, a dense first layer, YaRN",
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3_halves": _deepseek(
        "DeepseekV3ForCausalLM",
        "one group of experts as in Kimi K2, scores as they are, whole queries, biases, halves rotated together",
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        attention_bias=True,
        rope_interleave=False,
    ),
    "gemma": _tiny("GemmaForCausalLM", "as released", head_dim=16),
    "gemma2": _tiny(
        "Gemma2ForCausalLM",
        "alternating windows, soft caps",
        head_dim=16,
        sliding_window=9,
        num_hidden_layers=3,
        query_pre_attn_scalar=24,
    ),
    "gemma2_plain": _tiny(
        "Gemma2ForCausalLM",
        "no soft caps, layer types given",
        head_dim=32,
        sliding_window=5,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gemma3": _tiny(
        "Gemma3ForCausalLM",
        "local and global layers",
        head_dim=16,
        sliding_window=9,
        num_hidden_layers=7,
        query_pre_attn_scalar=24,
    ),
    "gemma3_scaled": _tiny(
        "Gemma3ForCausalLM",
        "stretched global layers",
        head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        attention_bias=True,
        final_logit_softcapping=20.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma3_vision": TinyModel(
        "Gemma3ForConditionalGeneration",
        "the text half of a checkpoint that also sees pictures",
        {
            "text_config": {
                **COMMON,
                "head_dim": 16,
                "sliding_window": 9,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 20,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "gpt2": _tiny("GPT2LMHeadModel", "as released", **GPT2),
    "gpt2_scaled": _tiny(
        "GPT2LMHeadModel",
        "scores scaled by layer, untied head",
        **GPT2,
        n_inner=80,
        scale_attn_by_inverse_layer_idx=True,
        activation_function="relu",
        tie_word_embeddings=False,
    ),
    "gpt_neox": _tiny("GPTNeoXForCausalLM", "parallel sublayers, a quarter of each head rotated"),
    "gpt_neox_serial": _tiny(
        "GPTNeoXForCausalLM",
        "sublayers one after the other",
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ),
    "gpt_oss": _tiny(
        "GptOssForCausalLM",
        "sinks, alternating windows, biases, YaRN, clamped experts",
        head_dim=24,
        sliding_window=9,
        num_hidden_layers=3,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=0.8,
        rope_parameters={**YARN, "truncate": False},
    ),
    "gpt_oss_plain": _tiny(
        "GptOssForCausalLM",
        "layer types given, no biases in the attention, unstretched positions, one expert a token",
        head_dim=16,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=False,
        num_local_experts=4,
        num_experts_per_tok=1,
        swiglu_alpha=1.1,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0},
    ),
    "granite": _tiny(
        "GraniteForCausalLM",
        "all four multipliers",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.11,
        logits_scaling=2.5,
        attention_bias=True,
    ),
    "granite_hybrid": _tiny(
        "GraniteMoeHybridForCausalLM",
        "Mamba-2 and attention without positions, experts beside a shared layer, all four multipliers",
        **GRANITE_HYBRID,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=5,
        num_experts_per_tok=2,
        position_embedding_type="nope",
    ),
    "granite_hybrid_dense": _tiny(
        "GraniteMoeHybridForCausalLM",
        "Mamba-2 and rotated attention, no experts, biases, a bounded time step",
        **GRANITE_HYBRID,
        layer_types=["attention", "mamba"],
        num_local_experts=0,
        position_embedding_type="rope",
        attention_bias=True,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=(0.3, 1.1),
        tie_word_embeddings=True,
    ),
    "llama": _tiny("LlamaForCausalLM", "grouped-query attention"),
    "llama_dynamic": _tiny("LlamaForCausalLM", "dynamic rope", rope_parameters={**ROPE, "rope_type": "dynamic"}),
    "llama_linear": _tiny("LlamaForCausalLM", "linear rope", rope_parameters={**ROPE, "rope_type": "linear"}),
    "llama_llama3": _tiny(
        "LlamaForCausalLM",
        "llama3 rope",
        rope_parameters={
            **ROPE,
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_longrope": _tiny(
        "LlamaForCausalLM",
        "longrope within the texts",
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 24,
            "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        },
    ),
    "llama_yarn": _tiny(
        "LlamaForCausalLM",
        "yarn rope",
        rope_parameters={**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 32},
    ),
    "llama_yarn_tuned": _tiny(
        "LlamaForCausalLM",
        "yarn rope with all its settings",
        rope_parameters={
            **ROPE,
            "rope_type": "yarn",
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ),
    "mamba2": _tiny("Mamba2ForCausalLM", "two groups of heads", **MAMBA2),
    "mamba2_tied": _tiny(
        "Mamba2ForCausalLM",
        "one group, biases, a bounded time step, a longer convolution, tied head",
        **{**MAMBA2, "n_groups": 1, "conv_kernel": 6},
        use_bias=True,
        use_conv_bias=False,
        time_step_limit=(0.3, 1.1),
        tie_word_embeddings=True,
    ),
    "minimax_m2": _tiny(
        "MiniMaxM2ForCausalLM",
        "sigmoid scores with a correction, norms over all heads, half of each head rotated",
        head_dim=24,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
    ),
    "minimax_m2_whole": _tiny(
        "MiniMaxM2ForCausalLM",
        "all of each head rotated, stretched, every expert for every token",
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=3,
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
    "mistral": _tiny("MistralForCausalLM", "a window on every layer", sliding_window=11, head_dim=32),
    "mistral_full": _tiny("MistralForCausalLM", "no window", sliding_window=None),
    "mixtral": _tiny("MixtralForCausalLM", "two of eight experts", head_dim=24),
    "mixtral_windowed": _tiny(
        "MixtralForCausalLM",
        "a window on every layer, three of five experts, stretched positions",
        sliding_window=9,
        num_local_experts=5,
        num_experts_per_tok=3,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
    ),
    "olmo2": _tiny("Olmo2ForCausalLM", "norms on what is added, and on queries and keys"),
    "phi3": _tiny("Phi3ForCausalLM", "fused projections", original_max_position_embeddings=256),
    "phi3_long": _tiny(
        "Phi3ForCausalLM",
        "LongRoPE within the texts, partly rotated heads, a window",
        sliding_window=21,
        original_max_position_embeddings=24,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 24,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
            "long_factor": [1.5, 2.5, 4.0, 6.0, 9.0, 13.0],
        },
    ),
    "qwen2": _tiny("Qwen2ForCausalLM", "biases on queries, keys and values", tie_word_embeddings=True),
    "qwen2_moe": _tiny(
        "Qwen2MoeForCausalLM",
        "a gated shared expert, dense layers among sparse ones, scores as they are",
        num_hidden_layers=5,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=36,
        num_experts=9,
        num_experts_per_tok=4,
    ),
    "qwen2_moe_windowed": _tiny(
        "Qwen2MoeForCausalLM",
        "windows, no biases, normalized scores",
        num_hidden_layers=4,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=2,
    ),
    "qwen2_windowed": _tiny(
        "Qwen2ForCausalLM",
        "a window on the upper layers",
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        num_hidden_layers=3,
    ),
    "qwen3": _tiny("Qwen3ForCausalLM", "norms on heads, heads of their own size", head_dim=32),
    "qwen3_moe": _tiny(
        "Qwen3MoeForCausalLM",
        "many narrow experts, normalized scores, dense layers among sparse ones",
        num_hidden_layers=3,
        head_dim=24,
        mlp_only_layers=[0],
        moe_intermediate_size=12,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    ),
    "qwen3_moe_windowed": _tiny(
        "Qwen3MoeForCausalLM",
        "a window on every layer, biases, scores as they are",
        moe_intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=3,
        use_sliding_window=True,
        sliding_window=9,
        attention_bias=True,
    ),
    "qwen3_windowed": _tiny(
        "Qwen3ForCausalLM",
        "layer types given",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        attention_bias=True,
    ),
}


def build_tiny_model(name: str, folder: Path, seed: int = 0) -> Any:
    """Write the checkpoint of row ``name`` into ``folder`` and return the model it holds, in float32."""
    row = TINY_MODELS[name]
    model_class = getattr(transformers, row.architecture)
    torch.manual_seed(seed)
    config = row.config()
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    scramble(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Give every parameter, and every buffer that is saved, values that make a difference."""
    saved = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in saved or not tensor.is_floating_point():
            continue
        is_norm = "norm" in name or "ln_" in name
        tensor.normal_(std=0.3 if tensor.ndim == 1 else 0.2)
        if is_norm and name.endswith("weight"):
            tensor.add_(1.0)


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits from which ``output`` follows on ``prompt``, ``[len(output), vocab_size]``, from one pass without a cache.

    Where positions depend on the length of a text, from a pass for every token: what has been computed stays.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        logits: torch.Tensor = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 :]
    result = model(torch.tensor([prompt]), use_cache=True)
    rows = [result.logits[0, -1]]
    for token_id in output[:-1]:
        result = model(torch.tensor([[token_id]]), cache=result.past_key_values, use_cache=True)
        rows.append(result.logits[0, -1])
    return torch.stack(rows)
