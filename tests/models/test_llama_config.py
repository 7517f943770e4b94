"""config.json of the Llama family: both spellings of the rotary settings, defaults, and what is refused."""

import copy
from typing import Any

import pytest

from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.layers.rotary import LinearScaling, Llama3Scaling, NoScaling
from backend_engine.models.families.llama import FAMILY
from backend_engine.plugins.catalog import ARCHITECTURES
from tests.support.tiny_llama import TINY

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def spec(**changes: Any) -> Any:
    return FAMILY.from_hf({**copy.deepcopy(TINY), **changes})


def test_the_family_is_found_by_its_class_name() -> None:
    assert ARCHITECTURES.get("LlamaForCausalLM") is FAMILY
    with pytest.raises(ConfigError, match="did you mean 'LlamaForCausalLM'"):
        ARCHITECTURES.get("LlamaForCausalML")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}},
        ),
        ({"rope_scaling": {"type": "default"}}, {}),
        ({"rope_theta": 7e4}, {"rope_parameters": {"rope_theta": 7e4}}),
    ],
)
def test_old_and_new_rotary_spellings_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert spec(**old) == spec(**new)


def test_rotary_settings_arrive() -> None:
    assert spec(rope_theta=5e5).ropes[0].theta == 5e5
    assert spec(rope_scaling={"type": "linear", "factor": 2}).ropes[0].scaling == LinearScaling(2.0)
    assert spec(rope_scaling=LLAMA3).ropes[0].scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    dynamic = spec(rope_scaling={"type": "dynamic", "factor": 2.0}).ropes[0]
    assert (dynamic.scaling, dynamic.exact_up_to) == (NoScaling(), 256)
    without = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert spec(rope_scaling=without).ropes[0].scaling == Llama3Scaling(8.0, 1.0, 4.0, 256)


def test_absent_values_take_the_defaults_of_the_format() -> None:
    config = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    plain = FAMILY.from_hf({**config, "head_dim": None})
    attention, mlp = plain.layers[0].mixer, plain.layers[0].mlp
    assert (attention.num_kv_heads, attention.head_dim) == (4, 16)
    assert not plain.tie_embeddings and not attention.qkv_bias and not mlp.bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_act": "tanh"},
            "config.json: hidden_act is 'tanh'; expected one of gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish",
        ),
        ({"pretraining_tp": 2}, "config.json: pretraining_tp is 2; expected 1"),
        ({"sliding_window": 64}, "config.json: sliding_window is 64; expected no such key"),
        ({"final_logit_softcapping": 30.0}, "config.json: final_logit_softcapping is 30.0; expected no such key"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "config.json: rope_scaling: short_factor is missing; expected a list of 8 numbers",
        ),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            "config.json: rope_scaling: type is 'ntk'; expected default, linear, dynamic, llama3, yarn or longrope",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            "config.json: rope_scaling: mrope_section is [16, 24, 24]; expected no such key",
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            "config.json: rope_scaling: rope_type is missing; expected default, linear, dynamic, llama3, yarn or ",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "config.json: rope_parameters: full_attention is {'rope_type': 'default'}; expected no such key",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "config.json: rope_scaling: factor is 0; expected a number above 0",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}},
            "config.json: rope_scaling: high_freq_factor is 0.5; expected a number above low_freq_factor, 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "config.json: rope_parameters: partial_rotary_factor is 0.5; expected 1",
        ),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling is 'linear'; expected an object"),
        ({"hidden_size": None}, "config.json: hidden_size is missing; expected an integer of at least 1"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0; expected an integer of at least 1"),
        ({"vocab_size": "96"}, "config.json: vocab_size is '96'; expected an integer of at least 1"),
        ({"vocab_size": True}, "config.json: vocab_size is True; expected an integer of at least 1"),
        ({"rms_norm_eps": -1e-5}, "config.json: rms_norm_eps is -1e-05; expected a number above 0"),
        ({"rope_theta": float("inf")}, "config.json: rope_theta is inf; expected a number above 0"),
        ({"attention_bias": 1}, "config.json: attention_bias is 1; expected true or false"),
        (
            {"num_key_value_heads": 3},
            "config.json: num_key_value_heads is 3; expected a divisor of num_attention_heads, 4",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            "config.json: num_attention_heads is 6; expected a divisor of hidden_size, 64, or a head_dim",
        ),
        ({"head_dim": 15}, "config.json: head_dim is 15; expected an even number (it is 15)"),
    ],
)
def test_what_cannot_be_served_faithfully_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
