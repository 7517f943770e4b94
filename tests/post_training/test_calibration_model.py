"""``load_for_calibration``: the weights that the checkpoint stands for, plain, whatever form it has them in."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.errors import ConfigError
from backend_engine.model_engine.model_backend import LoadedModel
from backend_engine.post_training.calibration_model import load_for_calibration
from backend_engine.quantization.quant_method import WeightedLayer
from tests.checkpoints.test_packed_loading import export
from tests.support.parity import prompt
from tests.support.tiny_gguf import build_tiny, packed_as, write_gguf
from tests.support.tiny_models import build_tiny_model, reference_logits
from tests.support.window_logits import window_logits


def opened(path: Path) -> LoadedModel:
    return load_for_calibration(open_checkpoint(path), "cpu")


def check_plain(loaded: LoadedModel) -> None:
    layers = [layer for layer in loaded.model.modules() if isinstance(layer, WeightedLayer)]
    for layer in layers:
        assert layer.weight is not None and layer.weight.dtype == torch.float32
        assert layer.packed_weight is None and not layer.packed_parts


def check_logits(loaded: LoadedModel, reference: Any) -> None:
    windows = [prompt(21, seed) for seed in range(2)]
    found = window_logits(loaded, windows).view(2, 21, -1)
    for row, window in zip(found, windows, strict=True):
        expected = reference_logits(reference, window[:1], [*window[1:], 0])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gpt2", "deepseek_v3", "gemma", "granite_hybrid"])
def test_weights_are_plain_tensors(name: str, tmp_path: Path) -> None:
    """Routers and gates too, and the head that shares the embedding's table."""
    reference = build_tiny_model(name, tmp_path)
    loaded = opened(tmp_path)
    check_plain(loaded)
    check_logits(loaded, reference)
    if loaded.model.spec.tie_embeddings:
        assert loaded.model.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("leave", ["", "k_proj", "up_proj"])
def test_packed_weights_are_decoded_in_whole_and_in_parts(leave: str, tmp_path: Path) -> None:
    reference = export(tmp_path, lambda name: bool(leave) and leave in name)
    loaded = opened(tmp_path)
    check_plain(loaded)
    check_logits(loaded, reference)
    layer, theirs = loaded.model.layers[1], reference.model.layers[1]
    attention = theirs.self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(layer.mixer.qkv_proj.weight, torch.cat(parts))
    assert torch.equal(layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight)


@pytest.mark.parametrize(("name", "kind"), [("mixtral", Type.Q8_0), ("gpt_oss", Type.MXFP4), ("gemma2", Type.Q4_0)])
def test_stacked_experts_and_tables_are_decoded(name: str, kind: Type, tmp_path: Path) -> None:
    reference = build_tiny(name, tmp_path / "hf", kind)
    path = write_gguf(tmp_path / "hf", tmp_path / "model.gguf", packed_as(kind))
    loaded = opened(path)
    check_plain(loaded)
    check_logits(loaded, reference)
    plain = dict(opened(tmp_path / "hf").model.named_parameters())
    for key, parameter in loaded.model.named_parameters():
        if "norm" not in key:
            assert torch.equal(parameter, plain[key]), key


def test_progress_is_told(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    calls: list[tuple[int, int, str]] = []
    load_for_calibration(open_checkpoint(tmp_path), "cpu", lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == list(range(1, calls[-1][1] + 1))


def test_a_model_without_a_family_file_is_refused(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["OPTForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"config.json of .*: architecture OPTForCausalLM has no family file,") as e:
        opened(tmp_path)
    assert "\n" not in str(e.value)


def test_an_engine_folder_is_refused(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path)
    checkpoint = replace(open_checkpoint(tmp_path), engine=cast(Any, object()))
    with pytest.raises(ConfigError, match="is an engine folder"):
        load_for_calibration(checkpoint, "cpu")
