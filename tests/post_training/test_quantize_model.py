"""Whole models quantized by every recipe: near what they were, the same in transformers, and better with calibration
than without; what is refused before any work.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.errors import ConfigError
from backend_engine.model_engine.model_loader import describe_model, load_model
from backend_engine.post_training import block_rounding
from backend_engine.post_training.quantize_model import QuantizationReport, quantize_checkpoint
from backend_engine.post_training.recipes import KV_SCHEMES, QFORMATS, Recipe, recipe_of
from backend_engine.quantization.packed import Packed
from tests.support.parity import prompt
from tests.support.tiny_models import build_tiny_model
from tests.support.window_logits import window_logits

WINDOWS = [prompt(40, seed) for seed in range(6)]
OTHERS = [prompt(24, seed) for seed in range(100, 104)]
# Of the logits' size: more than rounding such small random models costs, less than one wrong weight does, which makes
# them other logits altogether (1.0 and more).
ERRORS = {"int8": 0.25, "fp8": 0.4, "int4": 0.75, "nvfp": 0.75}


def quantized(source: Path, output: Path, recipe: Recipe | str, **options: Any) -> QuantizationReport:
    found = recipe_of(recipe, 16 if recipe.startswith("int4") else None) if isinstance(recipe, str) else recipe
    return quantize_checkpoint(open_checkpoint(source), output, found, WINDOWS, **options)


def logits_of(folder: Path) -> torch.Tensor:
    return window_logits(load_model(folder, "float32", "cpu"), OTHERS)


def error_of(folder: Path, expected: torch.Tensor) -> float:
    return float((logits_of(folder) - expected).norm() / expected.norm())


@pytest.mark.parametrize("qformat", QFORMATS)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gpt2", "deepseek_v2", "granite_hybrid"])
def test_every_recipe_is_near_the_model(name: str, qformat: str, tmp_path: Path) -> None:
    """Dense, with experts, norms as distances to 1, transposed products, latent attention, recurrent layers."""
    build_tiny_model(name, tmp_path / "source")
    expected = logits_of(tmp_path / "source")
    report = quantized(tmp_path / "source", tmp_path / "output", qformat)
    assert report.num_weights and error_of(tmp_path / "output", expected) < ERRORS[qformat[:4]]
    packed = [m for m in load_model(tmp_path / "output", "float32", "cpu").model.modules() if hasattr(m, "quant")]
    assert sum(isinstance(module.quant, Packed) for module in packed) >= report.num_weights


@pytest.mark.parametrize("qformat", QFORMATS)
def test_transformers_answers_as_the_engine_does(qformat: str, tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "output", qformat)
    # transformers decodes NVFP4 to bfloat16 whatever it is asked for.
    dtype = torch.bfloat16 if qformat == "nvfp4" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "output", dtype=dtype).eval()
    with torch.no_grad():
        expected = model(torch.tensor(OTHERS)).logits.float().flatten(0, 1)
    error = float((logits_of(tmp_path / "output") - expected).norm() / expected.norm())
    # Where inputs are rounded, the last bit of a sum can put one on another step.
    limits = {torch.bfloat16: 5e-2, torch.float32: 2e-2 if recipe_of(qformat).inputs else 1e-4}
    assert error < limits[dtype]


@pytest.mark.parametrize(
    ("qformat", "kept"), [("fp8", ("down_proj", "q_proj", "k_proj", "v_proj")), ("int8_sq", ("down_proj",))]
)
def test_inputs_that_are_not_rounded(qformat: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "output", qformat)
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    rounded, plain = config["quantization_config"]["config_groups"].values()
    assert rounded["targets"] == ["Linear"] and rounded["input_activations"]["num_bits"] == 8
    assert plain["input_activations"] is None and plain["weights"] == rounded["weights"]
    num_layers = config["num_hidden_layers"]
    assert {target.split(".")[-1] for target in plain["targets"]} == set(kept)
    assert len(plain["targets"]) == num_layers * len(kept)


def plainer(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, smoothing="none", compensates=False)


@pytest.mark.parametrize("qformat", ["int4_gptq", "int4_awq", "nvfp4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_calibration_is_better_than_rounding_to_the_nearest(name: str, qformat: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path / "source")
    expected = logits_of(tmp_path / "source")
    recipe = recipe_of(qformat, 16 if qformat.startswith("int4") else None)
    quantized(tmp_path / "source", tmp_path / "calibrated", recipe)
    quantized(tmp_path / "source", tmp_path / "nearest", plainer(recipe))
    assert error_of(tmp_path / "calibrated", expected) < error_of(tmp_path / "nearest", expected)


@torch.no_grad()
def make_outliers(source: Path) -> None:
    """Some channels of the norms are a hundred times as large, the products after them as much smaller."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for layer in model.model.layers:
        for norm, products in (
            (layer.input_layernorm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
            (layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)),
        ):
            norm.weight[::9] *= 100
            for product in products:
                product.weight[:, ::9] /= 100
    model.save_pretrained(source)


def test_smoothquant_takes_outliers_out_of_the_inputs(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    make_outliers(tmp_path / "source")
    expected = logits_of(tmp_path / "source")
    errors = {}
    for smoothing in ("none", "smoothquant"):
        recipe = dataclasses.replace(recipe_of("int8_sq"), smoothing=smoothing)
        quantized(tmp_path / "source", tmp_path / smoothing, recipe)
        errors[smoothing] = error_of(tmp_path / smoothing, expected)
    assert errors["smoothquant"] < errors["none"] / 3, errors


@pytest.mark.parametrize("qformat", ["int4_awq", "int8_sq"])
def test_experts_are_calibrated_some_at_a_time(qformat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their statistics would not fit together, with nearly the same result."""
    build_tiny_model("mixtral", tmp_path / "source")
    expected = logits_of(tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "together", qformat)
    monkeypatch.setattr(block_rounding, "_MAX_HESSIAN_BYTES", 4 * 64**2 * 3)
    quantized(tmp_path / "source", tmp_path / "apart", qformat)
    errors = [error_of(tmp_path / name, expected) for name in ("together", "apart")]
    assert abs(errors[0] - errors[1]) < 0.1 and max(errors) < ERRORS[qformat[:4]], errors


@pytest.mark.parametrize("kv_cache_dtype", KV_SCHEMES)
def test_the_kv_cache_that_was_asked_for(kv_cache_dtype: str, tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "output", "int8_wo", kv_cache_dtype=kv_cache_dtype)
    facts = describe_model(tmp_path / "output")
    assert facts.kv_cache_dtype == (None if kv_cache_dtype == "auto" else kv_cache_dtype)
    scales = load_model(tmp_path / "output", "float32", "cpu").kv_scales
    assert (scales != {}) == (kv_cache_dtype == "fp8")
    # Largest keys and values of such a model are around 10, the largest number of the format is 448.
    assert all(0.001 < scale < 0.5 for pair in scales.values() for scale in pair)


def test_products_that_a_format_cannot_hold_stay_plain(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    report = quantized(tmp_path / "source", tmp_path / "output", recipe_of("int4_gptq", 32))
    assert {name.split(".")[-2] for name in report.left_plain} == {"down_proj"}
    assert set(report.left_plain.values()) == {"groups of 32 columns do not divide its 112"}
    ignored = json.loads((tmp_path / "output" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignored and "lm_head" in ignored
    with pytest.raises(ConfigError, match=r"has no product that the format can hold; .* groups of 128 columns"):
        quantized(tmp_path / "source", tmp_path / "none", recipe_of("int4_gptq", 128))
    assert not (tmp_path / "none").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source")
    for arguments, message in (
        ({"qformat": "int3"}, "qformat 'int3' is not allowed; use int8_wo, int8_dyn, int8_sq, int4_awq"),
        ({"qformat": "fp8", "group_size": 16}, "group_size 16 is not allowed with qformat fp8"),
        ({"qformat": "int4_awq", "group_size": 0}, "group_size 0 is out of range"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe_of(**arguments)
    with pytest.raises(ConfigError, match="kv_cache_dtype 'int4' is not allowed; use auto, fp8, int8"):
        quantize_checkpoint(checkpoint, tmp_path / "output", recipe_of("int8_wo"), [], "int4")
    with pytest.raises(ConfigError, match="there are no texts to calibrate with"):
        quantize_checkpoint(checkpoint, tmp_path / "output", recipe_of("int4_gptq"), [])
    with pytest.raises(ConfigError, match="there are no texts to calibrate with"):
        quantize_checkpoint(checkpoint, tmp_path / "output", recipe_of("int8_wo"), [], "fp8")
    (tmp_path / "output").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        quantize_checkpoint(checkpoint, tmp_path / "output", recipe_of("int8_wo"), [])
    assert (tmp_path / "output").read_text() == "mine"


def test_an_already_quantized_checkpoint_is_quantized_anew(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    expected = logits_of(tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "int8", "int8_wo")
    quantized(tmp_path / "int8", tmp_path / "int4", "int4_gptq")
    assert error_of(tmp_path / "int4", expected) < ERRORS["int4"]


def test_nan_in_a_weight_is_told_by_its_name(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"layers\.1\.mixer\.qkv_proj\.weight: .*finite"):
        quantized(tmp_path / "source", tmp_path / "output", "int8_wo")
    assert not (tmp_path / "output").exists()
