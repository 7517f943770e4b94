"""What GGUF metadata means as config.json: defaults, schemes that are recognised by numbers, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind

from backend_engine.checkpoint.gguf_checkpoint import open_gguf
from backend_engine.checkpoint.gguf_keys import shortest
from backend_engine.errors import ModelLoadError

U32, F32, F64, BOOL, STRING, ARRAY = (
    Kind.UINT32, Kind.FLOAT32, Kind.FLOAT64, Kind.BOOL, Kind.STRING, Kind.ARRAY,
)  # fmt: skip
VOCAB, HIDDEN, HEAD = 40, 32, 16
USUAL: dict[str, tuple[Any, ...]] = {
    "block_count": (2, U32),
    "context_length": (64, U32),
    "embedding_length": (HIDDEN, U32),
    "feed_forward_length": (48, U32),
    "attention.head_count": (2, U32),
    "attention.layer_norm_rms_epsilon": (1e-5, F32),
}


def write(path: Path, architecture: str, extra: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A file of ``USUAL`` metadata and some; ``None`` leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**USUAL, **extra}.items():
        if value is not None:
            full = key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"
            writer.add_key_value(full, *value)
    needed = {
        "token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    for name, data in {**needed, **(tensors or {})}.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(tmp_path: Path, architecture: str = "llama", tensors: Any = None, **extra: Any) -> dict[str, Any]:
    dotted = {key.replace("__", "."): value for key, value in extra.items()}
    return dict(open_gguf(write(tmp_path / "model.gguf", architecture, dotted, tensors)).config)


def refusal(tmp_path: Path, architecture: str = "llama", tensors: Any = None, **extra: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        config_of(tmp_path, architecture, tensors, **extra)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(tmp_path / "model.gguf"))
    return text.removeprefix(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("value", "decimal"), [(np.float32(1e-5), 1e-5), (np.float32(0.0707), 0.0707), (1 / 3, 1 / 3)])
def test_numbers_are_the_shortest_decimal_of_their_float32(value: Any, decimal: float) -> None:
    assert shortest(float(value)) == decimal


def test_a_number_stays_what_it_is_when_it_is_no_float32() -> None:
    assert shortest(1e300) == 1e300 and shortest(0.1) == 0.1


def test_what_a_file_does_not_say_is_as_usual(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config["num_key_value_heads"] == 2 and config["head_dim"] == HEAD
    assert config["rope_theta"] == 10000.0 and "rope_scaling" not in config
    assert config["rms_norm_eps"] == 1e-5 and config["vocab_size"] == VOCAB
    assert config["tie_word_embeddings"] is True and config["attention_bias"] is False
    assert config["quantization_config"] == {"quant_method": "gguf"}


def test_a_value_for_every_layer_is_one_value_where_they_agree(tmp_path: Path) -> None:
    assert config_of(tmp_path, attention__head_count_kv=([1, 1], ARRAY))["num_key_value_heads"] == 1
    message = refusal(tmp_path, attention__head_count_kv=([1, 2], ARRAY))
    assert message == ": llama.attention.head_count_kv is an array of 2; expected an integer of at least 1"


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    assert config_of(tmp_path, rope__scale_linear=(4.0, F32))["rope_scaling"] == linear
    assert config_of(tmp_path, rope__scaling__factor=(4.0, F32))["rope_scaling"] == linear
    stated = {"rope__scaling__factor": (4.0, F32), "rope__scaling__type": ("none", STRING)}
    assert "rope_scaling" not in config_of(tmp_path, **stated)


def factors(theta: float, dim: int, original: int, factor: float, low: float, high: float) -> np.ndarray:
    """Llama 3.1's: of wavelengths, those of more than ``original / low`` are stretched."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


@pytest.mark.parametrize(
    ("dim", "theta", "settings"),
    [(128, 5e5, (8192, 8.0, 1.0, 4.0)), (64, 5e5, (8192, 32.0, 1.0, 4.0)), (128, 1e4, (2048, 4.0, 1.0, 8.0))],
)
def test_llama_3_is_recognised_by_its_factors(tmp_path: Path, dim: int, theta: float, settings: Any) -> None:
    original, factor, low, high = settings
    extra = {"attention__key_length": (dim, U32), "attention__value_length": (dim, U32)}
    tensors = {"rope_freqs.weight": factors(theta, dim, original, factor, low, high)}
    config = config_of(tmp_path, tensors=tensors, rope__freq_base=(theta, F32), **extra)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    assert "rope_scaling" not in config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(HEAD // 2, np.float32)})


@pytest.mark.parametrize("values", [[1, 2, 1, 2, 1, 2, 1, 2], [8] * 7, [1, 1, 1, 1, 2, 3, 4, 0]])
def test_other_factors_are_refused(tmp_path: Path, values: list[float]) -> None:
    message = refusal(tmp_path, tensors={"rope_freqs.weight": np.array(values, np.float32)})
    assert "tensor rope_freqs.weight holds" in message and "Llama 3's rotary scheme for heads of 16" in message


def test_mixtral_is_llama_with_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, expert_count=(4, U32), expert_used_count=(2, U32))
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)


@pytest.mark.parametrize(("architecture", "is_usual"), [("qwen2moe", False), ("qwen3moe", True)])
def test_whether_scores_are_normalized_may_be_stated(tmp_path: Path, architecture: str, is_usual: bool) -> None:
    experts = {"expert_count": (4, U32), "expert_used_count": (2, U32)}
    assert config_of(tmp_path, architecture, **experts)["norm_topk_prob"] is is_usual
    stated = config_of(tmp_path, architecture, expert_weights_norm=(not is_usual, BOOL), **experts)
    assert stated["norm_topk_prob"] is not is_usual


def test_the_largest_gemmas_scale_their_scores_otherwise(tmp_path: Path) -> None:
    sizes = {"attention__key_length": (20, U32), "attention__value_length": (20, U32)}
    for architecture, num_layers in (("gemma2", 46), ("gemma3", 62)):
        fill = {f"blk.{i}.attn_norm.weight": np.ones(HIDDEN, np.float32) for i in range(num_layers)}
        small = config_of(tmp_path, architecture, fill, block_count=(num_layers - 1, U32), **sizes)
        large = config_of(tmp_path, architecture, fill, block_count=(num_layers, U32), **sizes)
        assert (small["query_pre_attn_scalar"], large["query_pre_attn_scalar"]) == (20, HIDDEN // 2)


def test_windows_of_gemma_3_follow_the_pattern(tmp_path: Path) -> None:
    window = {"attention__sliding_window": (8, U32)}
    full, sliding = "full_attention", "sliding_attention"
    assert config_of(tmp_path, "gemma3", **window)["layer_types"] == [sliding, sliding]
    assert config_of(tmp_path, "gemma3")["layer_types"] == [full, full]
    listed = config_of(tmp_path, "gemma3", attention__sliding_window_pattern=([False, True], ARRAY), **window)
    assert listed["layer_types"] == [full, sliding]
    every_second = config_of(tmp_path, "gemma3", attention__sliding_window_pattern=(2, U32), **window)
    assert every_second["layer_types"] == [sliding, full]
    message = refusal(tmp_path, "gemma3", attention__sliding_window_pattern=([1, 0, 1], ARRAY), **window)
    assert "an integer, or a list of true and false for 2 layers" in message


def test_ids_of_special_tokens(tmp_path: Path) -> None:
    ids = {"bos": 1, "eos": 2, "padding": 4294967295, "eot": 7, "eom": 2}
    extra = {f"tokenizer.ggml.{name}_token_id": (value, U32) for name, value in ids.items()}
    checkpoint = open_gguf(write(tmp_path / "model.gguf", "llama", extra))
    assert {key: value for key, value in checkpoint.config.items() if key.endswith("_id")} == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.generation == {"eos_token_id": [2, 7]}


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    extra = {"general.sampling.temp": (0.6, F32), "general.sampling.top_k": (20, Kind.INT32)}
    checkpoint = open_gguf(write(tmp_path / "model.gguf", "llama", extra))
    assert checkpoint.generation == {"temperature": 0.6, "top_k": 20, "do_sample": True}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"magic_scale": (2.0, F32)}, "llama.magic_scale is 2.0; expected no such key"),
        ({"attention__causal": (False, BOOL)}, "llama.attention.causal is False; expected True"),
        ({"attention__clamp_kqv": (8.0, F32)}, "llama.attention.clamp_kqv is 8.0; expected 0.0"),
        ({"rope__scaling__type": ("spiral", STRING)}, "is 'spiral'; expected none, linear, yarn or longrope"),
        ({"rope__scaling__type": ("longrope", STRING)}, " does not hold tensor rope_factors_long.weight"),
        ({"rope__dimension_count": (8, U32)}, "llama.rope.dimension_count is 8; expected the size of a head, 16"),
        ({"attention__value_length": (8, U32)}, "is 8; expected the same as attention.key_length, 16"),
        ({"block_count": (10**9, U32)}, "llama.block_count is 1000000000; expected at most the number of tensors, 2"),
        ({"block_count": None}, "llama.block_count is missing; expected an integer of at least 1"),
        ({"embedding_length": ("32", STRING)}, "llama.embedding_length is '32'; expected an integer of at least 1"),
        ({"attention__layer_norm_rms_epsilon": (float("nan"), F32)}, "is nan; expected a number"),
        ({"tokenizer__ggml__eos_token_id": ("</s>", STRING)}, "is '</s>'; expected an integer"),
        ({"nextn_predict_layers": (1, U32)}, "llama.nextn_predict_layers is 1; expected 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, **extra)


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, "rwkv7")
    assert message.startswith(
        ": general.architecture is 'rwkv7'; expected one of deepseek2, gemma, gemma2, gemma3, gpt-oss"
    )


def test_an_expert_stack_of_another_size_is_refused(tmp_path: Path) -> None:
    stack = {"blk.0.ffn_gate_exps.weight": np.zeros((3, 48, HIDDEN), np.float32)}
    message = refusal(tmp_path, tensors=stack, expert_count=(4, U32), expert_used_count=(2, U32))
    assert message == (
        ": tensor blk.0.ffn_gate_exps.weight has shape [3, 48, 32]; expected one entry for each of expert_count, 4, of "
        "at most 16384"
    )


def test_half_of_the_latent_keys_and_values_is_refused(tmp_path: Path) -> None:
    extra = {
        "attention__kv_lora_rank": (8, U32), "attention__key_length": (12, U32), "attention__value_length": (8, U32),
        "attention__key_length_mla": (12, U32), "attention__value_length_mla": (8, U32),
        "rope__dimension_count": (4, U32), "expert_count": (4, U32), "expert_used_count": (2, U32),
        "expert_shared_count": (1, U32), "expert_feed_forward_length": (16, U32),
    }  # fmt: skip
    half = {"blk.0.attn_v_b.weight": np.zeros((2, 8, 8), np.float32)}
    message = refusal(tmp_path, "deepseek2", half, **extra)
    assert message == " does not hold tensor blk.0.attn_k_b.weight, which blk.0.attn_v_b.weight needs"


def test_a_tensor_that_nobody_knows_keeps_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", {}, {"blk.0.attn_q.scale": np.ones(1, np.float32)})
    assert "blk.0.attn_q.scale" in open_gguf(path).open_tensors()[0].names()


def test_latent_names_mean_nothing_in_other_models(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", {}, {"blk.0.attn_k_b.weight": np.ones((2, 4, 4), np.float32)})
    assert "blk.0.attn_k_b.weight" in open_gguf(path).open_tensors()[0].names()


def test_norms_of_gemma_in_a_type_without_a_decoder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "gemma", {}, {"blk.0.attn_norm.weight": np.zeros((1, 292), np.int8)})
    data = path.read_bytes()
    at = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4
    path.write_bytes(data[:at] + struct.pack("<QQI", 256, 1, gguf.GGMLQuantizationType.Q8_K) + data[at + 20 :])
    (reader,) = open_gguf(path).open_tensors()
    with pytest.raises(ModelLoadError, match=r"blk.0.attn_norm.weight is of type Q8_K, which cannot be decoded"):
        reader.read("model.layers.0.input_layernorm.weight")
