"""Layers that were recorded at start against the layers themselves, for every family; and when they are not."""

import logging
from pathlib import Path

import pytest
import torch

from backend_engine.model_engine.recorded_layers import RecordedLayers
from backend_engine.ops.native_runtime import OpKind
from tests.support.engine_driver import EngineDriver
from tests.support.parity import prompt
from tests.support.tiny_models import TINY_MODELS, build_tiny_model

# Layers of these do something between two native operations that torch computes: experts, recurrent states, latent
# attention, and rotations of neighbours.
_BY_TORCH = ("Moe", "Mixtral", "Mamba", "Deepseek", "MiniMax", "GptOss", "Hybrid")


def recorded(driver: EngineDriver) -> RecordedLayers | None:
    return driver.engine.recorded_layers


@pytest.mark.parametrize("precision", ["int16", "int8", "w8a8"])
def test_products_of_integers_gate_their_results_themselves(precision: str, tmp_path: Path) -> None:
    """In a model whose layers are whole panels there is no activation left, and the bits are the same."""
    build_tiny_model("llama", tmp_path)
    plain = EngineDriver(tmp_path, record_layers=False, weight_only_precision=precision)
    driver = EngineDriver(tmp_path, weight_only_precision=precision)
    layers = recorded(driver)
    assert layers is not None
    kinds = [OpKind(op.kind) for op in layers.recording.ops]
    assert OpKind.DENSE in kinds and OpKind.ACTIVATION not in kinds
    for engine in (driver, plain):
        request = engine.add(0, prompt(45))
        engine.step(context=[(request, 45)])
        engine.step(generation=[request])
    assert all(torch.equal(a, b) for a, b in zip(driver.logits[0], plain.logits[0], strict=True))
    floats = recorded(EngineDriver(tmp_path))
    assert floats is not None and OpKind.ACTIVATION in {OpKind(op.kind) for op in floats.recording.ops}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_recorded_layers_give_the_bits_of_the_layers_themselves(name: str, tmp_path: Path) -> None:
    build_tiny_model(name, tmp_path)
    driver, plain = EngineDriver(tmp_path), EngineDriver(tmp_path, record_layers=False)
    assert recorded(plain) is None
    is_dense = not any(part in TINY_MODELS[name].architecture for part in _BY_TORCH)
    head_dims = {spec.head_dim for spec in driver.traits.attention_specs}
    assert (recorded(driver) is not None) == (is_dense and all(dim % 8 == 0 for dim in head_dims)), head_dims
    for engine in (driver, plain):
        first, second = engine.add(0, prompt(45)), engine.add(1, prompt(5, 1))
        engine.step(context=[(first, 20)])
        engine.step(context=[(first, 25), (second, 5)])
        for _ in range(3):
            engine.step(generation=[first, second])
    for request_id in (0, 1):
        for ours, theirs in zip(driver.logits[request_id], plain.logits[request_id], strict=True):
            assert torch.equal(ours, theirs)


def test_what_torch_computes_in_place_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change that leaves no trace in the recording: the trial at start shows that the numbers differ."""
    from backend_engine.layers.mlp import GatedMlp

    forward = GatedMlp.forward
    monkeypatch.setattr(GatedMlp, "forward", lambda self, x: forward(self, x).mul_(1.5))
    monkeypatch.setattr(logging.getLogger("backend_engine"), "propagate", True)
    build_tiny_model("llama", tmp_path)
    assert recorded(EngineDriver(tmp_path)) is None
    assert "recorded, they give other numbers" in caplog.text
