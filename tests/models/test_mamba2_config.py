"""config.json and checkpoints of Mamba-2 and Granite 4 as their authors publish them, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine.core.kv_spec import KvSpec, StateSpec
from backend_engine.errors import ModelLoadError
from backend_engine.layers.attention_layer import AttentionDecl
from backend_engine.layers.mamba2 import Mamba2Decl
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.model_engine.model_loader import describe_model
from backend_engine.models.families import granite_hybrid, mamba2
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_models import build_tiny_model

CODESTRAL: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0,
    "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 8,
    "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0,
    "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
    "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "time_step_scale": 1.0, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "vocab_size": 32768,
}  # fmt: skip
GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 512,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4, "logits_scaling": 6, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 10, "num_key_value_heads": 4, "num_local_experts": 64,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
# Attention alone; what is said about the other kind of layer is about none.
GRANITE_4_MICRO = {
    **GRANITE_4, "layer_types": ["attention"] * 10, "mamba_n_heads": 47, "num_experts_per_tok": 0,
    "num_local_experts": 0, "position_embedding_type": "rope", "shared_intermediate_size": 8192,
}  # fmt: skip


def test_codestral_is_a_state_in_every_layer_and_nothing_else() -> None:
    spec = mamba2.FAMILY.from_hf(CODESTRAL)
    assert spec.cache_specs == (StateSpec(((3, 8192 + 2 * 8 * 128), (128, 64, 128))),) * 64
    assert all(layer.mlp is None for layer in spec.layers) and spec.attention_specs() == ()
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Mamba2Decl)
    assert (mixer.num_groups, mixer.time_step_limit, mixer.bias, mixer.conv_bias) == (8, (0.0, math.inf), False, True)
    assert (mixer.eps, spec.max_positions, spec.tie_embeddings) == (1e-5, None, False)
    assert mamba2.FAMILY.unknown_keys(CODESTRAL) == []


def test_granite_4_has_attention_without_positions_between_states_and_experts_beside_a_shared_layer() -> None:
    spec = granite_hybrid.FAMILY.from_hf(GRANITE_4)
    state = StateSpec(((3, 3072 + 2 * 128), (48, 64, 128)))
    assert spec.cache_specs == (state,) * 5 + (KvSpec(4, 128),) + (state,) * 4
    attention, moe = spec.layers[5].mixer, spec.layers[0].mlp
    assert isinstance(attention, AttentionDecl) and isinstance(moe, MoeDecl)
    assert (attention.rope, attention.scale) == (None, 0.0078125)
    assert (moe.size, moe.shared_size, moe.routing.num_experts, moe.routing.top_k) == (512, 1024, 64, 6)
    assert (moe.routing.score, moe.routing.normalize, moe.shared_gate) == ("softmax", True, False)
    assert (spec.embedding_scale, spec.residual_scale, spec.logits_scale) == (12.0, 0.22, 1 / 6)
    assert (spec.max_positions, spec.tie_embeddings) == (131072, True)
    assert granite_hybrid.FAMILY.unknown_keys(GRANITE_4) == []


def test_granite_4_may_be_attention_alone_and_dense() -> None:
    spec = granite_hybrid.FAMILY.from_hf(GRANITE_4_MICRO)
    assert spec.cache_specs == (KvSpec(4, 128),) * 10
    assert isinstance(spec.layers[0].mlp, GatedMlpDecl) and spec.layers[0].mlp.size == 8192
    assert spec.ropes and spec.ropes[0].theta == 10000.0


@pytest.mark.parametrize("types", [{"layer_types": None}, {"layer_types": None, "layers_block_type": ["mamba"] * 10}])
def test_layers_without_a_type_are_mamba_and_the_types_have_an_older_name(types: dict[str, Any]) -> None:
    spec = granite_hybrid.FAMILY.from_hf({**GRANITE_4, **types})
    assert {type(cache) for cache in spec.cache_specs} == {StateSpec}
    older = {"layer_types": None, "layers_block_type": ["attention", *["linear_attention"] * 9]}
    assert isinstance(granite_hybrid.FAMILY.from_hf({**GRANITE_4, **older}).layers[0].mixer, AttentionDecl)


@pytest.mark.parametrize("head_dim", [None, "auto", 64])
def test_a_head_is_as_wide_as_fits(head_dim: Any) -> None:
    mixer = granite_hybrid.FAMILY.from_hf({**GRANITE_4, "mamba_d_head": head_dim}).layers[0].mixer
    assert isinstance(mixer, Mamba2Decl) and mixer.head_dim == 64


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
        ([1, 1], (1.0, 1.0)),
    ],
)
def test_the_time_step_has_bounds_which_may_be_infinite(limit: Any, expected: tuple[float, float]) -> None:
    mixer = mamba2.FAMILY.from_hf({**CODESTRAL, "time_step_limit": limit}).layers[0].mixer
    assert isinstance(mixer, Mamba2Decl) and mixer.time_step_limit == expected


LIMIT = r"expected two numbers, the second not below the first, and none below 0"


@pytest.mark.parametrize(
    ("family", "values", "changes", "message"),
    [
        (mamba2, CODESTRAL, {"num_heads": 100}, r"num_heads is 100; expected a divisor of expand \* hidden_size, 8192"),
        (mamba2, CODESTRAL, {"n_groups": 7}, "n_groups is 7; expected a divisor of num_heads, 128"),
        (mamba2, CODESTRAL, {"head_dim": 32}, "head_dim is 32; expected 64, so that 128 heads are 8192 wide"),
        (mamba2, CODESTRAL, {"expand": 1.5}, "expand is 1.5; expected an integer of at least 1"),
        (mamba2, CODESTRAL, {"conv_kernel": 0}, "conv_kernel is 0; expected an integer of at least 1"),
        (mamba2, CODESTRAL, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected one of silu, swish"),
        (mamba2, CODESTRAL, {"rms_norm": False}, "rms_norm is False; expected True"),
        (mamba2, CODESTRAL, {"use_bias": "no"}, "use_bias is 'no'; expected true or false"),
        (mamba2, CODESTRAL, {"time_step_limit": [0.1]}, rf"time_step_limit is \[0.1\]; {LIMIT}"),
        (mamba2, CODESTRAL, {"time_step_limit": [0.2, 0.1]}, rf"time_step_limit is \[0.2, 0.1\]; {LIMIT}"),
        (mamba2, CODESTRAL, {"time_step_limit": [-1, 0.1]}, rf"time_step_limit is \[-1, 0.1\]; {LIMIT}"),
        (mamba2, CODESTRAL, {"time_step_limit": [0, "inf"]}, rf"time_step_limit is \[0, 'inf'\]; {LIMIT}"),
        (mamba2, CODESTRAL, {"time_step_limit": [math.inf, math.inf]}, rf"time_step_limit is .*; {LIMIT}"),
        (mamba2, CODESTRAL, {"time_step_limit": [0, math.nan]}, rf"time_step_limit is .*; {LIMIT}"),
        (
            granite_hybrid,
            GRANITE_4,
            {"layer_types": ["mamba"] * 9},
            "layer_types is .*; expected a list of 10 names, one for each of num_hidden_layers",
        ),
        (
            granite_hybrid,
            GRANITE_4,
            {"layer_types": ["mamba"] * 9 + ["moe"]},
            "layer_types is .*; expected mamba or attention for each layer",
        ),
        (
            granite_hybrid,
            GRANITE_4,
            {"position_embedding_type": "alibi"},
            "position_embedding_type is 'alibi'; expected",
        ),
        (granite_hybrid, GRANITE_4, {"normalization_function": "layernorm"}, "normalization_function is 'layernorm'"),
        (
            granite_hybrid,
            GRANITE_4,
            {"num_experts_per_tok": 65},
            "num_experts_per_tok is 65; expected at most the number",
        ),
        (granite_hybrid, GRANITE_4, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; expected an integer of at"),
        (granite_hybrid, GRANITE_4, {"intermediate_size": 0}, "intermediate_size is 0; expected an integer of at"),
        (granite_hybrid, GRANITE_4, {"shared_intermediate_size": 0}, "shared_intermediate_size is 0; expected an"),
        (granite_hybrid, GRANITE_4, {"mamba_d_head": 63}, "mamba_d_head is 63; expected 64"),
        (granite_hybrid, GRANITE_4, {"mamba_d_head": "half"}, "mamba_d_head is 'half'; expected an integer"),
        (granite_hybrid, GRANITE_4, {"sliding_window": 64}, "sliding_window is 64; expected no such key"),
    ],
)
def test_what_it_cannot_be_faithful_to_is_refused(
    family: Any, values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=rf"^config\.json: {message}"):
        family.FAMILY.from_hf({**values, **changes})


def test_what_the_engine_hears_about_a_state_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_4))
    facts = describe_model(tmp_path)
    state = 4 * (3 * (3072 + 256) + 48 * 64 * 128)
    assert (facts.state_bytes, facts.elements_per_token, facts.max_positions) == (9 * state, 2 * 4 * 128, 131072)
    (tmp_path / "config.json").write_text(json.dumps(CODESTRAL))
    facts = describe_model(tmp_path)
    assert (facts.elements_per_token, facts.max_positions) == (0, None)


RENAMED = {
    "mamba2": (("backbone.embeddings.weight", "backbone.embedding.weight"),),
    "granite_hybrid": (
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_tensors_may_have_either_of_their_names(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    expected = EngineDriver(tmp_path)
    expected.generate(expected.add(0, [5, 6, 7]), 2)
    weights = load_file(tmp_path / "model.safetensors")
    for old, new in RENAMED[name]:
        assert any(old in tensor for tensor in weights)
        weights = {tensor.replace(old, new): values for tensor, values in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    found = EngineDriver(tmp_path)
    found.generate(found.add(0, [5, 6, 7]), 2)
    assert torch.equal(torch.stack(found.logits[0]), torch.stack(expected.logits[0]))
