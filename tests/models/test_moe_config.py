"""Families with experts: config.json as published, other spellings of their checkpoints, MXFP4, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backend_engine.errors import ModelLoadError
from backend_engine.layers.activations import ClampedSwiglu
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.rotary import NoScaling, YarnScaling
from backend_engine.layers.routing import RoutingDecl
from backend_engine.models.families import gpt_oss, minimax_m2, mixtral, qwen2_moe, qwen3_moe
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_models import TINY_MODELS, build_tiny_model

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN2_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
    "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2",
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": False,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid", "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
PUBLISHED = {mixtral: MIXTRAL, qwen2_moe: QWEN2_MOE, qwen3_moe: QWEN3_MOE, gpt_oss: GPT_OSS, minimax_m2: MINIMAX_M2}


def parts(family: Any, values: dict[str, Any], layer: int = 0) -> tuple[AttentionDecl, MoeDecl]:
    """Attention and experts of a layer."""
    decl = family.FAMILY.from_hf(values).layers[layer]
    assert isinstance(decl.mixer, AttentionDecl) and isinstance(decl.mlp, MoeDecl)
    return decl.mixer, decl.mlp


@pytest.mark.parametrize("family", PUBLISHED, ids=lambda family: family.__name__.split(".")[-1])
def test_every_key_of_a_published_config_is_understood(family: Any) -> None:
    assert family.FAMILY.unknown_keys(PUBLISHED[family]) == []


def test_mixtral_8x7b() -> None:
    attention, moe = parts(mixtral, MIXTRAL)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 128)
    assert (attention.sliding_window, attention.qkv_bias, attention.rope.theta) == (None, False, 1e6)
    assert moe.routing == RoutingDecl(8, 2) and (moe.size, moe.shared_size) == (14336, 0)


def test_qwen15_moe_a2_7b() -> None:
    attention, moe = parts(qwen2_moe, QWEN2_MOE)
    assert (attention.qkv_bias, attention.out_bias, attention.sliding_window) == (True, False, None)
    assert moe.routing == RoutingDecl(60, 4, normalize=False)
    assert (moe.size, moe.shared_size, moe.shared_gate) == (1408, 5632, True)


def test_qwen3_30b_a3b() -> None:
    attention, moe = parts(qwen3_moe, QWEN3_MOE)
    assert attention.qk_norm is not None and attention.qk_norm.per_head and attention.head_dim == 128
    assert moe.routing == RoutingDecl(128, 8) and (moe.size, moe.shared_size, moe.shared_gate) == (768, 0, False)


def test_gpt_oss_20b() -> None:
    (windowed, moe), (full, _) = (parts(gpt_oss, GPT_OSS, layer) for layer in (0, 1))
    assert (windowed.sliding_window, full.sliding_window) == (128, None)
    assert windowed.has_sinks and windowed.qkv_bias and windowed.out_bias and windowed.rope == full.rope
    scaling = windowed.rope.scaling
    assert isinstance(scaling, YarnScaling) and not scaling.truncate
    assert (scaling.factor, scaling.original_max_positions) == (32.0, 4096)
    # 0.1 * ln 32 + 1
    assert scaling.attention_factor == pytest.approx(1.3465736)
    assert moe.routing == RoutingDecl(32, 4, has_bias=True)
    assert moe.bias and moe.size == 2880 and moe.act == ClampedSwiglu(1.702, 7.0)


def test_minimax_m2() -> None:
    attention, moe = parts(minimax_m2, MINIMAX_M2)
    assert attention.qk_norm is not None and not attention.qk_norm.per_head
    assert (attention.rope.dim, attention.rope.theta, attention.head_dim) == (64, 5e6, 128)
    assert moe.routing == RoutingDecl(256, 8, "sigmoid", has_correction=True) and moe.size == 1536


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def test_what_a_config_does_not_state_is_the_format_s_default() -> None:
    attention, moe = parts(gpt_oss, without(GPT_OSS, "rope_scaling", "layer_types", "sliding_window", "swiglu_limit"))
    assert attention == parts(gpt_oss, GPT_OSS)[0] and moe.act == ClampedSwiglu(1.702, 7.0)
    attention, moe = parts(mixtral, without(MIXTRAL, "rope_theta", "num_local_experts", "num_key_value_heads"))
    assert (attention, moe) == parts(mixtral, MIXTRAL)
    assert parts(mixtral, {**MIXTRAL, "num_key_value_heads": None})[0].num_kv_heads == 32
    assert mixtral.FAMILY.from_hf(without(MIXTRAL, "rms_norm_eps")).norm.eps == 1e-5
    assert parts(qwen3_moe, without(QWEN3_MOE, "head_dim"))[0].head_dim == 64
    assert parts(minimax_m2, without(MINIMAX_M2, "rotary_dim"))[0].rope.dim == 128


def test_the_number_of_experts_goes_by_two_names() -> None:
    values = {**without(QWEN3_MOE, "num_experts"), "num_local_experts": 128}
    assert parts(qwen3_moe, values) == parts(qwen3_moe, QWEN3_MOE)
    assert qwen3_moe.FAMILY.unknown_keys(values) == []


@pytest.mark.parametrize("family", [qwen2_moe, qwen3_moe])
def test_dense_layers_stand_where_the_config_says(family: Any) -> None:
    def kinds(**changes: Any) -> str:
        layers = family.FAMILY.from_hf({**PUBLISHED[family], "num_hidden_layers": 6, **changes}).layers
        return "".join("d" if isinstance(layer.mlp, GatedMlpDecl) else "s" for layer in layers)

    assert kinds(mlp_only_layers=None) == "ssssss"
    assert kinds(mlp_only_layers=[0, 4]) == "dsssds"
    assert kinds(decoder_sparse_step=3) == "ddsdds"
    assert kinds(decoder_sparse_step=2, mlp_only_layers=[1]) == "dddsds"
    assert kinds(num_experts=0) == "dddddd"


def test_windows_of_qwen2_moe_are_on_every_second_of_the_lower_layers() -> None:
    values = {**QWEN2_MOE, "use_sliding_window": True, "num_hidden_layers": 6, "max_window_layers": 4}
    layers = qwen2_moe.FAMILY.from_hf(values).layers
    assert [layer.mixer.sliding_window for layer in layers] == [32768, None, 32768, None, None, None]
    layers = qwen2_moe.FAMILY.from_hf({**values, "layer_types": ["full_attention"] * 5 + ["sliding_attention"]}).layers
    assert [layer.mixer.sliding_window for layer in layers] == [None] * 5 + [32768]


def test_windows_of_qwen3_moe_are_on_every_layer() -> None:
    layers = qwen3_moe.FAMILY.from_hf({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 77}).layers
    assert {layer.mixer.sliding_window for layer in layers} == {77}


def test_a_stated_share_of_rotation_comes_before_the_stated_number_of_elements() -> None:
    settings = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    rope = parts(minimax_m2, {**MINIMAX_M2, "rope_parameters": settings})[0].rope
    assert (rope.dim, rope.theta, rope.scaling) == (32, 1e4, NoScaling())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (mixtral, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most the number of experts, 8"),
        (mixtral, {"num_local_experts": 0}, "num_local_experts is 0; expected an integer of at least 1"),
        (mixtral, {"num_experts": 4}, "num_experts is 4; expected 8"),
        (mixtral, {"hidden_act": "relu2"}, "hidden_act is 'relu2'; expected one of gelu"),
        (mixtral, {"attention_bias": True}, "attention_bias is True; expected False"),
        (mixtral, {"mlp_bias": True}, "mlp_bias is True; expected False"),
        (mixtral, {"sliding_window": 0}, "sliding_window is 0; expected an integer of at least 1"),
        (mixtral, {"n_shared_experts": 1}, "n_shared_experts is 1; expected 0"),
        (qwen2_moe, {"mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list of layers, each from 0 to 23"),
        (qwen2_moe, {"mlp_only_layers": [24]}, r"mlp_only_layers is \[24\]; expected .* from 0 to 23"),
        (qwen2_moe, {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
        (qwen2_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected an integer of at least 1"),
        (qwen2_moe, {"num_experts": -1}, "num_experts is -1; expected an integer of at least 0"),
        (qwen2_moe, {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; expected true or false"),
        (qwen2_moe, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (qwen2_moe, {"qkv_bias": 1}, "qkv_bias is 1; expected true or false"),
        (qwen2_moe, {"attention_bias": True}, "attention_bias is True; expected False"),
        (qwen2_moe, {"mlp_bias": True}, "mlp_bias is True; expected False"),
        (qwen2_moe, {"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        (qwen2_moe, {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is False; expected true, since"),
        (qwen3_moe, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; expected at most .* 128"),
        (qwen3_moe, {"moe_intermediate_size": 1.5}, "moe_intermediate_size is 1.5"),
        (qwen3_moe, {"layer_types": ["full_attention"] * 48}, "layer_types is .*; expected no such key"),
        (qwen3_moe, {"n_group": 2}, "n_group is 2; expected 1"),
        (gpt_oss, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        (gpt_oss, {"experts_per_token": 2}, "experts_per_token is 2; expected 4"),
        (gpt_oss, {"swiglu_limit": 0}, "swiglu_limit is 0; expected a number above 0"),
        (gpt_oss, {"swiglu_alpha": "high"}, "swiglu_alpha is 'high'"),
        (gpt_oss, {"sliding_window": None}, "sliding_window is missing; expected an integer of at least 1"),
        (gpt_oss, {"layer_types": ["full_attention"]}, r"layer_types is .*; expected a list of 24 names"),
        (gpt_oss, {"rope_scaling": {"rope_type": "ntk"}}, "rope_scaling: rope_type is 'ntk'"),
        (minimax_m2, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
        (minimax_m2, {"use_routing_bias": False}, "use_routing_bias is False; expected True"),
        (minimax_m2, {"use_qk_norm": False}, "use_qk_norm is False; expected True"),
        (minimax_m2, {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; expected 'per_layer'"),
        (minimax_m2, {"attn_type_list": [1] * 61 + [0]}, "attn_type_list is .*; expected "),
        (minimax_m2, {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta is 3.5; expected 1"),
        (minimax_m2, {"layernorm_full_attention_beta": 3.5}, "layernorm_full_attention_beta is 3.5; expected 1"),
        (minimax_m2, {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; expected 0"),
        (minimax_m2, {"attention_bias": True}, "attention_bias is True; expected False"),
        (minimax_m2, {"mlp_bias": True}, "mlp_bias is True; expected False"),
        (minimax_m2, {"rotary_dim": 63}, "partial_rotary_factor is missing; expected a share of head_dim 128"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_faithful_to_is_refused(family: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^config\.json: {message}"):
        family.FAMILY.from_hf({**PUBLISHED[family], **changes})


def logits(folder: Path) -> torch.Tensor:
    driver = EngineDriver(folder)
    driver.generate(driver.add(0, [5, 6, 7, 8, 9]), 3)
    return torch.stack(driver.logits[0])


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "minimax_m2"])
def test_experts_may_be_stored_stacked(name: str, tmp_path: Path) -> None:
    model = build_tiny_model(name, tmp_path / "numbered")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = [set(load_file(tmp_path / kind / "model.safetensors")) for kind in ("numbered", "stacked")]
    assert not any(".experts.0." in key for key in names[1]) and any(".experts.0." in key for key in names[0])
    assert torch.equal(logits(tmp_path / "stacked"), logits(tmp_path / "numbered"))


def mxfp4_weights(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random experts in MXFP4 in the place of plain ones, and plain ones of the same values."""
    generator = torch.Generator().manual_seed(9)
    packed, plain = {}, {}
    for name, tensor in weights.items():
        packed[name] = plain[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, columns, rows = tensor.shape
        blocks = torch.randint(256, (num_experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        del packed[name]
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return packed, plain


def tiny_gpt_oss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A checkpoint whose experts have whole blocks, as tensors."""
    row = TINY_MODELS["gpt_oss"]
    monkeypatch.setitem(TINY_MODELS, "gpt_oss", row._replace(values={**row.values, "intermediate_size": 96}))
    build_tiny_model("gpt_oss", folder)
    return load_file(folder / "model.safetensors")


def state_mxfp4(folder: Path) -> None:
    """Write into config.json that the experts are in MXFP4."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = GPT_OSS["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def test_experts_in_mxfp4_are_those_that_transformers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, plain = mxfp4_weights(tiny_gpt_oss(tmp_path, monkeypatch))
    assert sum(name.endswith("_blocks") for name in packed) == 6
    save_file(plain, tmp_path / "model.safetensors")
    expected = logits(tmp_path)
    save_file(packed, tmp_path / "model.safetensors")
    state_mxfp4(tmp_path)
    torch.testing.assert_close(logits(tmp_path), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[..., :8], "shape .*; config.json asks for"),
        (lambda t: t[:5], "shape .*; config.json asks for"),
        (lambda t: t.float(), "has dtype F32; expected one of U8"),
    ],
)
def test_mxfp4_of_the_wrong_form_is_refused(
    change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = mxfp4_weights(tiny_gpt_oss(tmp_path, monkeypatch))
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    packed[name] = change(packed[name]).contiguous()
    save_file(packed, tmp_path / "model.safetensors")
    state_mxfp4(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"tensor {name} .*{message}"):
        EngineDriver(tmp_path)


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    build_tiny_model("mixtral", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.7.w2.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not hold tensor .*layers\.1\.block_sparse_moe\.experts\.7\.w2\."):
        EngineDriver(tmp_path)
