"""What the transformers backend cannot serve, and folders at fault: one line at load, with the reason."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from backend_engine.errors import ConfigError, ModelLoadError
from backend_engine.model_engine.model_loader import describe_model, load_model
from backend_engine.models.transformers_room.recording import (
    UnservedCallError,
    record,
    recording_attention,
    recording_mask,
)
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_transformers import REFUSED_MODELS, build, change_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fallback") / "llama"
    build_tiny_llama(folder, tie_word_embeddings=True)
    return folder


def refusal(folder: Path, **arguments: Any) -> str:
    """The one line with which the folder is refused."""
    with pytest.raises(ModelLoadError) as caught:
        describe_model(folder, **arguments)
        load_model(folder, "float32", "cpu", **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_what_the_paged_cache_cannot_serve_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    architecture, values, reason = REFUSED_MODELS[name]
    build(architecture, tmp_path, values)
    expected = f"transformers' {architecture} cannot be run on the paged cache: {reason}"
    found = refusal(tmp_path)
    assert re.fullmatch(expected, found), found


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    build("T5ForConditionalGeneration", tmp_path, {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1})
    assert "T5ForConditionalGeneration cannot be run on the paged cache: it is an encoder-decoder" in refusal(
        tmp_path, model_backend="transformers"
    )


def drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda f: drop(f, UP), f"checkpoint .*: tensor {UP} is not in the checkpoint"),
    "left over": (lambda f: add(f, "model.extra"), r"checkpoint .*: tensor model\.extra has no place in the model"),
    "shapes": (lambda f: change_config(f, intermediate_size=40), "transformers cannot load .*"),
    "a value of another type": (lambda f: change_config(f, hidden_size="x"), "transformers cannot read config.json .*"),
    "values that contradict": (lambda f: change_config(f, num_attention_heads=7), "transformers cannot .*"),
    "quantized": (
        lambda f: change_config(f, quantization_config={"quant_method": "quip"}),
        "config.json of .*: quantization_config: quant_method is 'quip'; expected one of awq, .*",
    ),
    "another class": (
        lambda f: change_config(f, architectures=["OlmoForCausalLM"]),
        "config.json of .*: architectures names OlmoForCausalLM, but transformers runs model_type 'stablelm' as "
        "StableLmForCausalLM",
    ),
    "unknown to both": (
        lambda f: change_config(f, architectures=["StableLMForCausalLM"]),
        "config.json of .*: unknown architecture 'StableLMForCausalLM'; known: .*; transformers has no such causal "
        "language model either, the nearest there is 'StableLmForCausalLM'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    edit, pattern = FAULTS[name]
    build("StableLmForCausalLM", tmp_path, {})
    edit(tmp_path)
    found = refusal(tmp_path)
    assert re.fullmatch(pattern, found), found


def test_a_native_model_that_is_refused_is_not_run_otherwise(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    change_config(folder, residual_multiplier=0.5)
    assert refusal(folder).endswith("; model_backend:transformers may run it all the same")
    assert "model_backend" not in refusal(folder, model_backend="native")


def test_a_native_backend_by_name_wants_a_family(tmp_path: Path) -> None:
    build("StableLmForCausalLM", tmp_path, {})
    message = refusal(tmp_path, model_backend="native")
    assert re.search("unknown architecture 'StableLmForCausalLM'; known: .*; model_backend:transformers may", message)
    with pytest.raises(ConfigError, match=r"^model_backend 'fast' is not allowed; use auto, native, transformers$"):
        describe_model(tmp_path, "fast")


def test_weights_with_nan_are_run_with_a_warning(tmp_path: Path) -> None:
    build("StableLmForCausalLM", tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[UP][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(tmp_path, "float32", "cpu").warnings == (
        f"tensor {UP} of {tmp_path} holds NaN: what the model says will not be of use",
    )


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class NovelConfig(LlamaConfig):
    model_type = "novel"

class NovelForCausalLM(LlamaForCausalLM):
    config_class = NovelConfig
"""


def test_code_in_the_folder_runs_only_when_it_is_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (folder / "novel.py").write_text(CODE)
    auto_map = {"AutoConfig": "novel.NovelConfig", "AutoModelForCausalLM": "novel.NovelForCausalLM"}
    change_config(folder, architectures=["NovelForCausalLM"], model_type="novel", auto_map=auto_map)
    assert refusal(folder).endswith("the folder brings code of its own, which runs only with trust_remote_code")
    assert describe_model(folder, trust_remote_code=True).max_positions == 256
    loaded = load_model(folder, "float32", "cpu", trust_remote_code=True)
    assert type(loaded.model.model).__name__ == "NovelForCausalLM"


class OneCall(torch.nn.Module):
    """A model that attends once, with arguments of the test's choice."""

    def __init__(self, arguments: dict[str, Any], mask: Any = None, kv_heads: int = 2) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 8)
        self.arguments, self.mask, self.kv_heads = arguments, mask, kv_heads

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        q, k = (torch.zeros(1, heads, input_ids.shape[1], 8) for heads in (4, self.kv_heads))
        recording_attention(self, q, k, k, self.mask, **self.arguments)
        return SimpleNamespace(logits=self.table(input_ids))


def test_a_model_without_masks_leaves_its_window_to_attention() -> None:
    (call,) = record(OneCall({"sliding_window": 300, "softcap": 3, "dropout": 0.0}), ()).calls
    assert (call.window, call.softcap, call.scale, call.has_sinks) == (300, 3.0, 8**-0.5, False)
    assert record(OneCall({"scaling": 0.25}, recording_mask(causal_mask_function, 5, 5)), ()).calls[0].window is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OneCall({}, kv_heads=3), r"OneCall attends with queries, keys and values of shapes .*"),
        (OneCall({"is_causal": False}), "OneCall is not causal: tokens see later ones"),
        (OneCall({"position_bias": torch.zeros(1)}), "OneCall hands position_bias to attention, .*"),
        (OneCall({}, torch.ones(5, 5).tril()), "OneCall adds a mask or a bias of its own .*"),
        (OneCall({}, recording_mask(bidirectional_mask_function, 5, 5)), "OneCall has a mask that is neither .*"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused(model: OneCall, reason: str) -> None:
    with pytest.raises(UnservedCallError) as caught:
        record(model, ())
    assert re.fullmatch(reason, str(caught.value))
