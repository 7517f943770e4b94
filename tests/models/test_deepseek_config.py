"""config.json and checkpoints of DeepSeek-V2, V3 and Kimi K2 as their authors publish them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine.core.kv_spec import LatentSpec
from backend_engine.errors import ModelLoadError
from backend_engine.layers.latent_attention import LatentAttentionDecl
from backend_engine.layers.mlp import GatedMlpDecl
from backend_engine.layers.moe import MoeDecl
from backend_engine.layers.rotary import NoScaling, YarnScaling
from backend_engine.models.families import deepseek_v2, deepseek_v3
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_models import build_tiny_model

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V2 = {
    **V2_LITE, "hidden_size": 5120, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
    "n_routed_experts": 160, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "num_hidden_layers": 60, "intermediate_size": 12288, "moe_intermediate_size": 1536, "routed_scaling_factor": 16.0,
}  # fmt: skip
V3 = {
    **V2, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "ep_size": 1,
    "first_k_dense_replace": 3, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
KIMI_K2 = {
    **V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    "rope_scaling": {**V3["rope_scaling"], "factor": 32.0},
}  # fmt: skip


def parts(family: Any, values: dict[str, Any], layer: int) -> tuple[LatentAttentionDecl, MoeDecl]:
    """Mixer and experts of a layer."""
    decl = family.FAMILY.from_hf(values).layers[layer]
    assert isinstance(decl.mixer, LatentAttentionDecl) and isinstance(decl.mlp, MoeDecl)
    return decl.mixer, decl.mlp


@pytest.mark.parametrize(
    ("family", "values", "num_dense", "num_layers"),
    [
        (deepseek_v2, V2_LITE, 1, 27),
        (deepseek_v2, V2, 1, 60),
        (deepseek_v3, V3, 3, 61),
        (deepseek_v3, KIMI_K2, 1, 61),
    ],
)
def test_the_first_layers_are_dense_and_every_layer_stores_one_vector(
    family: Any, values: dict[str, Any], num_dense: int, num_layers: int
) -> None:
    spec = family.FAMILY.from_hf(values)
    kinds = [type(layer.mlp) for layer in spec.layers]
    assert kinds == [GatedMlpDecl] * num_dense + [MoeDecl] * (num_layers - num_dense)
    assert spec.cache_specs == (LatentSpec(576),) * num_layers
    assert family.FAMILY.unknown_keys(values) == []


def test_v2_lite_makes_queries_from_the_input_and_has_no_groups() -> None:
    mixer, moe = parts(deepseek_v2, V2_LITE, 1)
    assert (mixer.q_rank, mixer.kv_rank, mixer.nope_dim, mixer.rope_dim, mixer.value_dim) == (None, 512, 128, 64, 128)
    assert mixer.rope.is_interleaved and (mixer.qkv_bias, mixer.out_bias, mixer.eps) == (False, False, 1e-6)
    # 0.1 * 0.707 * ln 40 + 1, squared, over the root of 192.
    assert mixer.scale == pytest.approx(0.11472, rel=1e-4)
    assert isinstance(mixer.rope.scaling, YarnScaling) and mixer.rope.scaling.attention_factor == 1.0
    assert (moe.size, moe.shared_size, moe.routing.num_experts, moe.routing.top_k) == (1408, 2816, 64, 6)
    assert (moe.routing.score, moe.routing.normalize, moe.routing.num_groups) == ("softmax", False, 1)


def test_v2_chooses_from_the_groups_with_the_best_expert() -> None:
    mixer, moe = parts(deepseek_v2, V2, 1)
    assert mixer.q_rank == 1536
    assert (moe.routing.num_groups, moe.routing.top_groups, moe.routing.group_score) == (8, 3, "max")
    assert (moe.routing.scale, moe.routing.has_correction) == (16.0, False)


def test_v3_corrects_the_choice_and_chooses_from_the_groups_with_the_best_two() -> None:
    mixer, moe = parts(deepseek_v3, V3, 3)
    assert mixer.rope.is_interleaved and mixer.scale == pytest.approx(192**-0.5 * 1.368888**2, rel=1e-5)
    routing = moe.routing
    assert (routing.score, routing.normalize, routing.scale, routing.has_correction) == ("sigmoid", True, 2.5, True)
    assert (routing.num_groups, routing.top_groups, routing.group_score) == (8, 4, "top2")


def test_kimi_k2_is_v3_without_groups() -> None:
    mixer, moe = parts(deepseek_v3, KIMI_K2, 1)
    assert (mixer.rope.theta, moe.routing.num_experts, moe.routing.num_groups) == (50000.0, 384, 1)
    assert (moe.routing.scale, moe.shared_size) == (2.827, 2048)


def test_experts_may_stand_in_every_second_layer_only() -> None:
    layers = deepseek_v3.FAMILY.from_hf({**V3, "moe_layer_freq": 2, "num_hidden_layers": 7}).layers
    assert [isinstance(layer.mlp, MoeDecl) for layer in layers] == [False, False, False, False, True, False, True]


@pytest.mark.parametrize("settings", [None, {"type": "default", "mscale_all_dim": 1.0}])
def test_a_context_that_is_not_stretched_leaves_the_scale(settings: dict[str, Any] | None) -> None:
    mixer, _ = parts(deepseek_v3, {**V3, "rope_scaling": settings}, 3)
    assert mixer.scale == 192**-0.5 and mixer.rope.scaling == NoScaling()


@pytest.mark.parametrize(
    ("family", "values", "changes", "message"),
    [
        (deepseek_v3, V3, {"n_group": 7}, "n_group is 7; expected a divisor of n_routed_experts, 256"),
        (deepseek_v3, V3, {"n_group": 256}, "n_group is 256; expected a divisor .* at least 2 experts a group"),
        (deepseek_v3, V3, {"n_group": None}, "n_group is missing"),
        (deepseek_v3, V3, {"topk_group": 9}, "topk_group is 9; expected at most n_group, 8"),
        (deepseek_v3, {**V3, "n_group": 128}, {"topk_group": 3}, "topk_group is 3; .* num_experts_per_tok, 8"),
        (deepseek_v3, V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
        (deepseek_v3, V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; expected 'noaux_tc'"),
        (deepseek_v3, V3, {"num_key_value_heads": 8}, "num_key_value_heads is 8; expected 128"),
        (deepseek_v3, V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; expected an even number"),
        (deepseek_v3, V3, {"mlp_bias": True}, "mlp_bias is True; expected False"),
        (deepseek_v3, V3, {"sliding_window": 64}, "sliding_window is 64"),
        (deepseek_v2, V2, {"norm_topk_prob": True}, "norm_topk_prob is True; expected False"),
        (deepseek_v2, V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; expected one of greedy, group_lim"),
        (deepseek_v2, V2, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (deepseek_v2, V2, {"q_lora_rank": 0}, "q_lora_rank is 0"),
        (deepseek_v2, V2, {"n_shared_experts": 0}, "n_shared_experts is 0"),
    ],
)
def test_what_it_cannot_be_faithful_to_is_refused(
    family: Any, values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=rf"^config\.json: {message}"):
        family.FAMILY.from_hf({**values, **changes})


def test_a_config_without_a_word_on_queries_is_refused() -> None:
    values = {key: value for key, value in V3.items() if key != "q_lora_rank"}
    with pytest.raises(ModelLoadError, match="q_lora_rank is missing; expected an integer of at least 1, or null"):
        deepseek_v3.FAMILY.from_hf(values)


@pytest.mark.parametrize("has_marker", [True, False])
def test_a_layer_behind_the_last_is_ignored_where_it_predicts_several_tokens(tmp_path: Path, has_marker: bool) -> None:
    build_tiny_model("deepseek_v3", tmp_path)
    expected = EngineDriver(tmp_path)
    expected.generate(expected.add(0, [5, 6, 7]), 2)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in weights.items() if "layers.2." in name}
    if has_marker:
        extra |= {f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
        extra["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file({**weights, **extra}, tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3
    if not has_marker:
        with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.3\..* has no place in the model"):
            EngineDriver(tmp_path)
        return
    found = EngineDriver(tmp_path)
    found.generate(found.add(0, [5, 6, 7]), 2)
    assert torch.equal(torch.stack(found.logits[0]), torch.stack(expected.logits[0]))
