"""No key of a configuration is passed over in silence: families read it, know it to be without effect, or refuse it."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_engine import LLM
from backend_engine.config.hf_config import HfConfig
from backend_engine.errors import ModelLoadError
from backend_engine.models.config_keys import HARMLESS, NEUTRAL
from backend_engine.plugins.catalog import ARCHITECTURES
from tests.support.tiny_models import TINY_MODELS, build_tiny_model

ARCHITECTURES_TESTED = sorted({row.architecture for row in TINY_MODELS.values()})


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_key_that_transformers_writes_is_understood(name: str) -> None:
    row = TINY_MODELS[name]
    written = row.config().to_dict()
    values = {"architectures": [row.architecture], **json.loads(json.dumps(written))}
    family = ARCHITECTURES.get(row.architecture)
    family.from_hf(values)
    assert family.unknown_keys(values) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES_TESTED)
def test_a_key_that_would_change_the_maths_is_refused_unless_the_family_reads_it(architecture: str) -> None:
    row = next(row for row in TINY_MODELS.values() if row.architecture == architecture)
    values = row.config().to_dict()
    family = ARCHITECTURES.get(architecture)
    section = values if family.section is None else values[family.section]
    config = HfConfig(section)
    family.build(config)
    foreign = [key for key in NEUTRAL if not config.has_read(key)]
    assert foreign, "every family leaves some keys to others"
    for key in foreign:
        section[key] = "surprise"
        with pytest.raises(ModelLoadError, match=rf"^config\.json: (text_config: )?{key} is 'surprise'; expected "):
            family.from_hf(values)
        del section[key]


def test_the_lists_of_keys_do_not_contradict_each_other() -> None:
    assert not HARMLESS & set(NEUTRAL)


def test_keys_that_older_tools_left_in_a_config_are_not_warned_of() -> None:
    values = {**TINY_MODELS["llama"].config().to_dict(), "_model_name_or_path": "a name", "unk_token_id": 0}
    assert ARCHITECTURES.get("LlamaForCausalLM").unknown_keys(values) == []


def test_keys_that_nobody_knows_are_told_when_the_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_tiny_model("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "zebra": 1, "quagga": True}))
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), skip_tokenizer_init=True):
        pass
    assert "keys that are not understood and have no effect: quagga, zebra" in caplog.text


def test_weights_that_are_not_numbers_are_told_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_tiny_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    tensors["model.norm.weight"][0] = float("inf")
    tensors["model.norm.weight"][1] = float("-inf")
    save_file(tensors, path, {"format": "pt"})
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), skip_tokenizer_init=True):
        pass
    lines = [record.message for record in caplog.records if "NaN" in record.message]
    assert len(lines) == 1 and "model.layers.1.mlp.up_proj.weight" in lines[0]


def test_half_precision_weights_without_nan_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sum in half precision overflows to infinity, which is no NaN."""
    build_tiny_model("llama", tmp_path).to(torch.float16).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"].fill_(60000.0)
    save_file(tensors, path, {"format": "pt"})
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), skip_tokenizer_init=True):
        pass
    assert "NaN" not in caplog.text
