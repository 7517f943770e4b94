"""config.json as well-known models of the dense families have it: read, with every key understood."""

from typing import Any

import pytest

from backend_engine.layers.rotary import Llama3Scaling, LongRopeScaling
from backend_engine.plugins.catalog import ARCHITECTURES

COMMON: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "attention_dropout": 0.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": True,
}  # fmt: skip
LLAMA3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_VISION: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
    "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "lm_head_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999,
    "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
    "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
PYTHIA: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 512,
    "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 8,
    "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "logits_scaling": 8.0, "max_position_embeddings": 4096, "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "vocab_size": 49155,
}  # fmt: skip
PUBLISHED = {
    "llama 3.1": LLAMA3_1, "mistral": MISTRAL, "qwen 2.5": QWEN2_5, "qwen 3": QWEN3, "gemma 2": GEMMA2,
    "gemma 3": GEMMA3, "gemma 3 with vision": GEMMA3_VISION, "phi 4 mini": PHI4_MINI,
    "gpt 2": GPT2, "pythia": PYTHIA, "granite": GRANITE,
}  # fmt: skip


def spec(name: str, **changes: Any) -> Any:
    values = {**COMMON, **PUBLISHED[name], **changes}
    return ARCHITECTURES.get(values["architectures"][0]).from_hf(values)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_every_key_of_it_understood(name: str) -> None:
    values = {**COMMON, **PUBLISHED[name]}
    family = ARCHITECTURES.get(values["architectures"][0])
    assert family.from_hf(values).num_layers > 0
    assert family.unknown_keys(values) == []


def test_what_is_special_about_them_arrives() -> None:
    assert spec("llama 3.1").ropes[0].scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert [spec("mistral").sliding_window(0), spec("mistral", sliding_window=None).sliding_window(0)] == [4096, None]
    assert not any(spec("qwen 2.5").sliding_window(i) for i in range(24)), "its window is switched off"
    assert spec("mistral", num_key_value_heads=None).layers[0].mixer.num_kv_heads == 32
    without = {key: value for key, value in PUBLISHED["mistral"].items() if key != "num_key_value_heads"}
    mistral = ARCHITECTURES.get("MistralForCausalLM").from_hf(without)
    assert mistral.layers[0].mixer.num_kv_heads == 8, "the format's default"
    switched = {key: value for key, value in QWEN2_5.items() if key != "sliding_window"} | {"use_sliding_window": True}
    qwen = ARCHITECTURES.get("Qwen2ForCausalLM")
    assert [qwen.from_hf(switched).sliding_window(i) for i in (20, 21)] == [None, 4096], "the format's default"
    assert qwen.from_hf({**switched, "sliding_window": None}).sliding_window(21) is None
    assert spec("qwen 2.5").layers[0].mixer.qkv_bias and not spec("qwen 2.5").layers[0].mixer.out_bias
    assert [spec("gemma 2").sliding_window(i) for i in (0, 1, 2)] == [4096, None, 4096]
    gemma3 = spec("gemma 3")
    assert [gemma3.sliding_window(i) for i in range(6)] == [512] * 5 + [None]
    assert [gemma3.layers[i].mixer.rope.theta for i in (0, 5)] == [10000.0, 1000000.0]
    vision = spec("gemma 3 with vision")
    assert (vision.vocab_size, vision.num_layers, vision.layers[0].mixer.num_heads) == (262208, 34, 8)
    phi = spec("phi 4 mini")
    assert isinstance(phi.ropes[0].scaling, LongRopeScaling) and phi.ropes[0].dim == 96
    assert (phi.positions_switch_at, phi.max_positions) == (4096, 131072)
    assert (spec("gpt 2").learned_positions, spec("gpt 2").exact_up_to) == (1024, 1024)
    assert (spec("pythia").block, spec("pythia").ropes[0].dim) == ("parallel", 16)
    granite = spec("granite")
    assert (granite.embedding_scale, granite.residual_scale, granite.logits_scale) == (12.0, 0.22, 0.125)


@pytest.mark.parametrize(
    ("name", "eps", "positions"),
    [("phi 4 mini", 1e-5, 4096), ("gemma 2", 1e-6, 8192), ("gemma 3", 1e-6, 131072), ("llama 3.1", 1e-6, 2048)],
)
def test_what_is_not_stated_is_as_the_format_has_it(name: str, eps: float, positions: int) -> None:
    changes = {"rms_norm_eps": None, "max_position_embeddings": None, "rope_scaling": None}
    found = spec(name, **changes)
    assert (found.norm.eps, found.max_positions) == (eps, positions)
