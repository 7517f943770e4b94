"""The config.json of each architecture of GGUF files, from its metadata.

Looked up by ``gguf_config.py``. What a file does not say, because its converter leaves it out, is what llama.cpp takes
it to be. A new architecture needs an entry here and one in ``gguf_name_rules.py``.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from backend_engine.checkpoint.gguf_decoder_config import (
    Config,
    GgufModel,
    read_decoder,
    read_expert_counts,
    read_heads,
    read_layer_types,
    read_narrow_experts,
    read_sizes,
)
from backend_engine.checkpoint.gguf_rope import rope_config

_GEMMA2_PATTERN, _GEMMA3_PATTERN, _GPT_OSS_PATTERN = 2, 6, 2
# Layers of the models whose scores are not scaled by the size of a head.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


class Architecture(NamedTuple):
    """class_name, model_type: Hugging Face's. build: the rest of config.json."""

    class_name: str
    model_type: str
    build: Callable[[GgufModel], Config]


def _llama(model: GgufModel) -> Config:
    return {**read_decoder(model), "mlp_bias": model.has("blk.0.ffn_gate.bias")}


def _mixtral(model: GgufModel) -> Config:
    config = read_decoder(model)
    del config["attention_bias"]
    return {**config, **read_expert_counts(model, "num_local_experts"), "sliding_window": None}


def _qwen2(model: GgufModel) -> Config:
    return {**read_decoder(model), "attention_bias": True, "use_sliding_window": False}


def _qwen3(model: GgufModel) -> Config:
    return {**read_decoder(model), "use_sliding_window": False}


def _qwen2_moe(model: GgufModel) -> Config:
    normalizes = model.keys.flag("expert_weights_norm", False)
    config = {**_qwen3(model), **read_narrow_experts(model), "norm_topk_prob": normalizes}
    config["qkv_bias"] = config.pop("attention_bias")
    size = model.keys.count("expert_shared_feed_forward_length", config["intermediate_size"])
    return {**config, "shared_expert_intermediate_size": size}


def _qwen3_moe(model: GgufModel) -> Config:
    normalizes = model.keys.flag("expert_weights_norm", True)
    return {**_qwen3(model), **read_narrow_experts(model), "norm_topk_prob": normalizes}


def _gemma(model: GgufModel) -> Config:
    return {**read_decoder(model), "hidden_act": "gelu_pytorch_tanh"}


def _gemma_scores(config: Config, num_layers_27b: int) -> Config:
    """What scores are divided by the root of: the size of a head, but in the largest model of the generation."""
    is_largest = config["num_hidden_layers"] == num_layers_27b
    of_hidden = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": of_hidden if is_largest else config["head_dim"],
    }


def _gemma2(model: GgufModel) -> Config:
    config, keys = read_decoder(model), model.keys
    return {
        **config,
        **_gemma_scores(config, _GEMMA2_27B_LAYERS),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "layer_types": read_layer_types(model, _GEMMA2_PATTERN),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(model: GgufModel) -> Config:
    config, keys = read_decoder(model), model.keys
    num_layers = config["num_hidden_layers"]
    window = keys.count("attention.sliding_window", 0, low=0)
    types = read_layer_types(model, _GEMMA3_PATTERN) if window else ["full_attention"] * num_layers
    return {
        **config,
        **_gemma_scores(config, _GEMMA3_27B_LAYERS),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "layer_types": types,
        **({"sliding_window": window} if window else {}),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


def _phi3(model: GgufModel) -> Config:
    keys, heads = model.keys, read_heads(model)
    dim = keys.count("rope.dimension_count", heads["head_dim"])
    return {
        **heads,
        **read_sizes(model),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "partial_rotary_factor": dim / heads["head_dim"],
        "sliding_window": keys.count("attention.sliding_window", 0, low=0) or None,
        **rope_config(keys, model.files, dim),
    }


def _granite(model: GgufModel) -> Config:
    config, keys = _llama(model), model.keys
    return {
        **config,
        "attention_multiplier": keys.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
    }


def _gpt2(model: GgufModel) -> Config:
    keys = model.keys
    return {
        "n_embd": keys.count("embedding_length"),
        "n_head": keys.count("attention.head_count"),
        "n_layer": keys.count("block_count"),
        "n_positions": keys.count("context_length"),
        "n_inner": keys.count("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gpt_neox(model: GgufModel) -> Config:
    keys, heads = model.keys, read_heads(model)
    head_dim = heads.pop("head_dim")
    if heads.pop("num_key_value_heads") != heads["num_attention_heads"]:
        raise keys.refuse("attention.head_count_kv", f"attention.head_count, {heads['num_attention_heads']}")
    dim = keys.count("rope.dimension_count", head_dim)
    return {
        **heads,
        **read_sizes(model),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "rotary_pct": dim / head_dim,
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": model.has("blk.0.attn_qkv.bias"),
        "hidden_act": "gelu",
        **rope_config(keys, model.files, dim),
    }


def _gpt_oss(model: GgufModel) -> Config:
    config, keys = read_decoder(model), model.keys
    # What the model was made with; what else yarn means rounds the ends of the band outwards.
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return {
        **config,
        **read_expert_counts(model, "num_local_experts"),
        "intermediate_size": keys.count("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": keys.count("attention.sliding_window", 128),
        "layer_types": read_layer_types(model, _GPT_OSS_PATTERN),
    }


def _deepseek(model: GgufModel) -> Config:
    """Latent attention; keys and values may be stored absorbed, which has sizes of heads of its own."""
    keys = model.keys
    num_heads, rope_dim = keys.count("attention.head_count"), keys.count("rope.dimension_count")
    is_absorbed = "attention.key_length_mla" in keys
    key_dim, value_dim = keys.count("attention.key_length"), keys.count("attention.value_length")
    if is_absorbed:
        key_dim, value_dim = keys.count("attention.key_length_mla"), keys.count("attention.value_length_mla")
    if key_dim <= rope_dim:
        raise keys.refuse("rope.dimension_count", f"less than the size of a key, {key_dim}")
    keys.count("attention.head_count_kv", 1)
    rope = rope_config(keys, model.files, rope_dim)
    if rope.get("rope_scaling", {}).get("rope_type") == "yarn":
        # The converter writes a tenth of it; both are the same in the models that there are.
        weight = float(f"{10 * keys.number('rope.scaling.yarn_log_multiplier'):.6g}")
        rope["rope_scaling"].update(mscale=weight, mscale_all_dim=weight)
    rank = "attention.q_lora_rank"
    return {
        "hidden_size": keys.count("embedding_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        **read_sizes(model),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": keys.count(rank) if rank in keys else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
        **read_expert_counts(model, "n_routed_experts"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": keys.count("expert_group_count", 0, low=0) or 1,
        "topk_group": keys.count("expert_group_used_count", 0, low=0) or 1,
        "rope_interleave": True,
        **rope,
    }


def _deepseek_v2(model: GgufModel) -> Config:
    config, keys = _deepseek(model), model.keys
    if keys.get("expert_gating_func") not in (None, 0, 1):
        raise keys.refuse("expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    is_grouped = config["n_group"] > 1
    if keys.flag("expert_weights_norm", False):
        raise keys.refuse("expert_weights_norm", "false, where the experts' scores are softmax")
    return {**config, "topk_method": "group_limited_greedy" if is_grouped else "greedy", "norm_topk_prob": False}


def _deepseek_v3(model: GgufModel) -> Config:
    return {**_deepseek(model), "norm_topk_prob": model.keys.flag("expert_weights_norm", False)}


ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture("DeepseekV2ForCausalLM", "deepseek_v2", _deepseek_v2),
    "gemma": Architecture("GemmaForCausalLM", "gemma", _gemma),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _gpt_oss),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", _gpt2),
    "gptneox": Architecture("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox),
    "granite": Architecture("GraniteForCausalLM", "granite", _granite),
    "llama": Architecture("LlamaForCausalLM", "llama", _llama),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", read_decoder),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _qwen2),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _qwen3),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
}
"""By ``general.architecture``."""

VARIANTS: Mapping[str, Architecture] = {
    "mixtral": Architecture("MixtralForCausalLM", "mixtral", _mixtral),
    "deepseek3": Architecture("DeepseekV3ForCausalLM", "deepseek_v3", _deepseek_v3),
}
"""Models that share the architecture of another."""
