"""generation_config.json: end ids from wherever they are, and recommended sampling for what a request leaves unset."""

import json
from pathlib import Path
from typing import Any

import pytest

from backend_engine.checkpoint.generation_config import generation_defaults, sampling_defaults
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.config.sampling_defaults import SamplingDefaults
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.errors import ModelLoadError

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}


def model_folder(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    """A folder with these two files."""
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "end_ids"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [1, 106]}, (1, 106)),
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [1, 106]}, {}, (1, 106)),
        ({"eos_token_id": 5}, None, (5,)),
        ({"text_config": {"eos_token_id": [1, 106], "pad_token_id": 0}}, None, (1, 106)),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": 3}}, {"eos_token_id": None}, (2,)),
        ({"text_config": {"eos_token_id": 3}}, {"eos_token_id": [9, 9, 8]}, (9, 8)),
        ({}, {}, ()),
    ],
)
def test_end_ids(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, end_ids: tuple[int, ...]
) -> None:
    assert generation_defaults(open_checkpoint(model_folder(tmp_path, config, generation))).end_ids == end_ids


def test_end_ids_that_are_none(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {"text_config": {"eos_token_id": "x"}})
    with pytest.raises(ModelLoadError, match=r"config\.json: text_config: eos_token_id is 'x'; expected an integer"):
        generation_defaults(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        ({}, SamplingDefaults()),
        (SAMPLED, SamplingDefaults(0.6, 20, 0.95, 0.05, None)),
        (SAMPLED | {"do_sample": False}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20}, SamplingDefaults()),  # greedy, as transformers is without do_sample
        ({"do_sample": True}, SamplingDefaults(temperature=1.0)),
        ({"max_new_tokens": 100, "repetition_penalty": 1.1}, SamplingDefaults(repetition_penalty=1.1)),
        ({"do_sample": True, "temperature": None, "top_k": 0}, SamplingDefaults(temperature=1.0, top_k=0)),
    ],
)
def test_what_a_model_recommends(tmp_path: Path, values: dict[str, Any], defaults: SamplingDefaults) -> None:
    assert sampling_defaults(open_checkpoint(model_folder(tmp_path, {}, values))) == defaults


def test_what_a_request_sets_wins() -> None:
    defaults = SamplingDefaults.of(SAMPLED | {"max_new_tokens": 100, "repetition_penalty": 1.1}, "x")
    filled = defaults.fill(SamplingParams(top_p=0.5, n=2))
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (0.6, 20, 0.5, 0.05)
    assert (filled.max_tokens, filled.repetition_penalty, filled.n) == (32, 1.1, 2)
    explicit = SamplingParams(max_tokens=5, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert defaults.fill(explicit) is explicit and explicit.is_greedy
    untouched = SamplingParams()
    assert SamplingDefaults().fill(untouched) is untouched and untouched.is_greedy


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -1, "temperature -1 is out of range; it must be at least 0"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("top_k", 1.5, "top_k must be an integer, got 1.5"),
        ("top_p", 1.5, "top_p 1.5 is out of range; it must be at most 1"),
        ("min_p", 2, "min_p 2 is out of range"),
        ("repetition_penalty", 0, "repetition_penalty 0 is not allowed; it must be more than 0"),
        ("do_sample", "yes", "do_sample is 'yes'; expected true or false"),
        ("do_sample", 1, "do_sample is 1; expected true or false"),
    ],
)
def test_a_value_out_of_range(tmp_path: Path, key: str, value: Any, words: str) -> None:
    """Named with its file, whether it would be used or not."""
    folder = model_folder(tmp_path, {}, {key: value})
    with pytest.raises(ModelLoadError) as caught:
        sampling_defaults(open_checkpoint(folder))
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: {words}")


def test_defaults_of_a_model_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no generation_config\.json, and generation_config is model"):
        sampling_defaults(open_checkpoint(model_folder(tmp_path, {})))
