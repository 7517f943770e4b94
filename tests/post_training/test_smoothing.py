"""Factors between producers and consumers: whatever they are, the model's answers stay the same."""

from pathlib import Path

import pytest
import torch

from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.layers.activations import GATED, PLAIN, ClampedSwiglu, multiplies_up
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.model_engine.model_loader import load_model
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.post_training.calibration_model import load_for_calibration
from backend_engine.post_training.smoothing import Site, apply_factors, smoothing_sites, stored_parameters
from tests.support.parity import prompt
from tests.support.tiny_models import TINY_MODELS, build_tiny_model
from tests.support.window_logits import window_logits

WINDOWS = [prompt(29, seed) for seed in range(3)]
# Sites of each layer that tell families apart: producers in the first layer.
PRODUCERS = {
    "llama": ["mixer_norm", "mlp_norm", "mlp.gate_up_proj"],
    "gpt2": ["mixer_norm", "mixer.qkv_proj", "mlp_norm"],
    "gpt_neox": ["mixer_norm", "mixer.qkv_proj", "mlp_norm"],
    "gpt_oss": ["mixer_norm", "mlp_norm"],
    "olmo2": ["mlp.gate_up_proj"],
    "gemma2": ["mixer_norm", "mlp_norm", "mlp.gate_up_proj"],
    "mamba2": ["mixer_norm", "mixer.norm"],
    "deepseek_v2": ["mixer_norm", "mixer.q_a_norm", "mlp_norm", "mlp.gate_up_proj"],
    "mixtral": ["mixer_norm", "mlp_norm", *(f"mlp.experts.{i}.gate_up_proj" for i in range(8))],
}


def sites_of(loaded: LoadedModel) -> list[Site]:
    return [site for i in range(loaded.model.spec.num_layers) for site in smoothing_sites(loaded.model, i)]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_any_factors_leave_the_answers_as_they_are(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    loaded = load_for_calibration(open_checkpoint(tmp_path), "cpu")
    expected = window_logits(loaded, WINDOWS)
    before = {key: value.clone() for key, value in loaded.model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    changed: set[str] = set()
    for site in sites_of(loaded):
        factors = torch.rand(site.num_channels, generator=generator).mul(2).sub(1).exp()
        names = apply_factors(site, factors)
        assert len(set(names)) == len(names) and set(site.consumers) <= set(names)
        changed.update(names)
    assert changed
    after = dict(loaded.model.named_parameters())
    assert {key for key in before if not torch.equal(before[key], after[key])} == changed
    found = window_logits(loaded, WINDOWS)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PRODUCERS)
def test_sites_are_where_the_families_have_them(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    loaded = load_for_calibration(open_checkpoint(tmp_path), "cpu")
    assert [site.producer for site in smoothing_sites(loaded.model, 0)] == [f"layers.0.{p}" for p in PRODUCERS[name]]


def test_all_products_that_read_a_norm_are_its_consumers(tmp_path: Path) -> None:
    build_tiny_model("qwen2_moe", tmp_path)
    loaded = load_for_calibration(open_checkpoint(tmp_path), "cpu")
    site = next(site for site in smoothing_sites(loaded.model, 1) if site.producer == "layers.1.mlp_norm")
    experts = (f"experts.{i}.gate_up_proj" for i in range(9))
    names = ["router", "shared_gate", *experts, "shared.gate_up_proj"]
    assert list(site.consumers) == [f"layers.1.mlp.{name}.weight" for name in names]


def test_stored_parameters_are_what_a_checkpoint_has(tmp_path: Path) -> None:
    model = build_tiny_model("gemma", tmp_path)
    loaded = load_for_calibration(open_checkpoint(tmp_path), "cpu")
    names = ["layers.1.mlp_norm.weight", "layers.1.mlp.down_proj.weight"]
    stored = stored_parameters(loaded.model, names)
    layer = model.model.layers[1]
    torch.testing.assert_close(stored[names[0]], layer.post_attention_layernorm.weight.detach())
    assert torch.equal(stored[names[1]], layer.mlp.down_proj.weight)
    # Halved, as loading it again would have it.
    site = smoothing_sites(loaded.model, 1)[1]
    apply_factors(site, torch.full((site.num_channels,), 2.0))
    halved = stored_parameters(loaded.model, names)[names[0]]
    torch.testing.assert_close(halved + 1, (layer.post_attention_layernorm.weight.detach() + 1) / 2)


def test_factors_that_are_none_are_refused(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    loaded = load_for_calibration(open_checkpoint(tmp_path), "cpu")
    site = smoothing_sites(loaded.model, 0)[0]
    for wrong in (torch.zeros(64), torch.full((64,), torch.inf), torch.full((64,), torch.nan), torch.ones(63)):
        with pytest.raises(AssertionError, match="mixer_norm"):
            apply_factors(site, wrong)


def test_weights_that_a_library_has_packed_are_refused(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    loaded = load_model(tmp_path, "float32", "cpu")
    loaded.model.layers[0].mixer.qkv_proj.weight = None
    site = smoothing_sites(loaded.model, 0)[0]
    with pytest.raises(AssertionError, match="not plain"):
        apply_factors(site, torch.ones(64))


def test_what_multiplies_up_is_linear_in_it() -> None:
    x, factors = torch.randn(5, 12), torch.rand(6) + 0.5
    for act in (*GATED.values(), ClampedSwiglu(1.7, 2.0), PLAIN["relu"]):
        scaled = torch.cat((x[:, :6], x[:, 6:] * factors), 1)
        got, plain = act(TorchOps(), scaled), act(TorchOps(), x)
        is_linear = got.shape == (5, 6) and torch.allclose(got, plain * factors)
        assert is_linear == multiplies_up(act)
