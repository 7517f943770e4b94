"""Models without a family file, run by transformers' modules over our cache: right however it is cut up, or refused."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.resolve import DeviceInfo, resolve
from backend_engine.errors import ConfigError
from backend_engine.layers.linear import Linear
from backend_engine.model_engine.model_loader import describe_model, load_model
from backend_engine.models.transformers_room.norms import FusedRmsNorm
from backend_engine.plugins.catalog import ARCHITECTURES
from backend_engine.triton_io import parameters
from tests.support.engine_driver import EngineDriver
from tests.support.parity import TOLERANCE, check, prompt
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import reference_logits
from tests.support.tiny_transformers import FALLBACK_MODELS, build

NEW_TOKENS = 6


class Built(NamedTuple):
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=FALLBACK_MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("fallback") / request.param
    return Built(folder, build(request.param, folder, FALLBACK_MODELS[request.param]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fallback") / "llama"
    build_tiny_llama(folder, tie_word_embeddings=True)
    return folder


def test_these_architectures_have_no_family_file() -> None:
    assert not [name for name in FALLBACK_MODELS if name in ARCHITECTURES]


def test_a_text_is_right_at_once_in_chunks_token_by_token_and_after_a_pause(built: Built) -> None:
    driver = EngineDriver(built.folder)
    for request_id, chunk in enumerate((1000, 7, 1)):
        output = driver.generate(driver.add(request_id, prompt(37)), NEW_TOKENS, chunk)
        check(driver, built.model, request_id, prompt(37), output)
    paused = driver.add(3, prompt(20))
    driver.generate(paused, 3)
    paused.pause()
    check(driver, built.model, 3, prompt(20), driver.generate(paused, NEW_TOKENS, chunk=9))


def test_requests_that_share_steps_answer_as_if_alone(built: Built) -> None:
    driver = EngineDriver(built.folder)
    prompts = [prompt(31, 1), prompt(5, 2), prompt(1, 3), prompt(30, 4)]
    first, second, third, fourth = (driver.add(i, ids) for i, ids in enumerate(prompts))
    driver.step(context=[(first, 11)])
    driver.step(context=[(first, 3), (second, 5)])
    driver.step(context=[(first, 17), (third, 1), (fourth, 17)], generation=[second])
    driver.step(context=[(fourth, 1)], generation=[third, first])
    driver.step(context=[(fourth, 12)], generation=[first, second])
    for _ in range(3):
        driver.step(generation=[third, first, fourth, second])
    for request, ids in zip((first, second, third, fourth), prompts, strict=True):
        check(driver, built.model, request.request_id, ids, request.output_token_ids)


def test_what_a_model_keeps_is_learnt_from_its_calls(tmp_path: Path) -> None:
    build("VaultGemmaForCausalLM", tmp_path / "windows", FALLBACK_MODELS["VaultGemmaForCausalLM"])
    build("MiniCPM3ForCausalLM", tmp_path / "latent", FALLBACK_MODELS["MiniCPM3ForCausalLM"])
    windows = load_model(tmp_path / "windows", "float32", "cpu").traits
    assert [spec.sliding_window for spec in windows.attention_specs] == [9, None]
    assert {spec.logit_softcap for spec in windows.attention_specs} == {5.0}
    build("GraniteSWAForCausalLM", tmp_path / "sinks", FALLBACK_MODELS["GraniteSWAForCausalLM"])
    sinks = load_model(tmp_path / "sinks", "float32", "cpu").traits.attention_specs
    assert [(spec.sliding_window, spec.has_sinks) for spec in sinks] == [(9, True), (None, True)]
    assert windows.vocab_size == 96 and windows.exact_up_to is None
    latent = load_model(tmp_path / "latent", "float32", "cpu").traits
    # Keys of 12 + 8 elements, values of 16: both take the wider place.
    assert [tuple(spec) for spec in latent.cache_specs] == [(4, 20), (4, 20)]


def test_a_window_longer_than_the_check_is_found_all_the_same(tmp_path: Path) -> None:
    model = build("Starcoder2ForCausalLM", tmp_path, {"sliding_window": 60})
    driver = EngineDriver(tmp_path)
    check(driver, model, 0, prompt(90), driver.generate(driver.add(0, prompt(90)), NEW_TOKENS, chunk=40))


def test_the_users_windows_bound_those_of_the_model(llama: Path) -> None:
    native = EngineDriver(llama, max_attention_window=(5, 30))
    ours = EngineDriver(llama, max_attention_window=(5, 30), model_backend="transformers")
    for driver in (native, ours):
        driver.generate(driver.add(0, prompt(40)), NEW_TOKENS, chunk=13)
    torch.testing.assert_close(torch.stack(ours.logits[0]), torch.stack(native.logits[0]), **TOLERANCE)


def test_linear_layers_and_norms_are_ours_and_the_embedding_stays(llama: Path) -> None:
    model = load_model(llama, "float32", "cpu", model_backend="transformers").model
    kinds = [type(module) for module in model.modules()]
    # Four of attention, three of the MLP, two norms, in each of two layers; the head and the last norm.
    assert sum(issubclass(kind, Linear) for kind in kinds) == 15
    assert kinds.count(FusedRmsNorm) == 5 and torch.nn.Linear not in kinds
    table = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.model.get_input_embeddings().weight, table)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_stays_close_to_float32(dtype: str, limit: float, tmp_path: Path) -> None:
    model = build("StableLmForCausalLM", tmp_path, {})
    driver = EngineDriver(tmp_path, dtype)
    output = driver.generate(driver.add(0, prompt(30)), 1, chunk=11)
    expected = reference_logits(model, prompt(30), output)[0]
    assert (driver.logits[0][0] - expected).norm() / expected.norm() < limit


def generate(folder: Path, backend: str, prompts: list[list[int]]) -> list[list[int]]:
    """What an ``LLM`` with little memory says; prompts begin alike, some requests are cancelled on their way."""
    with LLM(
        str(folder),
        skip_tokenizer_init=True,
        model_backend=backend,
        max_seq_len=96,
        kv_cache_config=KvCacheConfig(tokens_per_block=4, max_tokens=160),
        scheduler_config=SchedulerConfig(
            max_batch_size=6, max_num_tokens=24, capacity_policy="max_utilization", chunk_unit_size=3
        ),
    ) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False)
        running = [llm.generate_async(ids, params) for ids in prompts]
        for handle in running[::3]:
            handle.abort()
        results = [handle.result() for handle in running]
        assert any(step.num_paused for step in llm.get_stats())
    assert any(result.num_cached_tokens for result in results)
    assert {result.outputs[0].finish_reason for result in results[::3]} <= {"cancelled", "length"}
    return [list(result.outputs[0].token_ids) for i, result in enumerate(results) if i % 3]


def test_an_llm_says_the_same_with_either_backend(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CHECK_INVARIANTS", "1")
    shared = prompt(17)
    prompts = [[*shared[: random.Random(i).randrange(4, 18)], *prompt(1 + i % 7, i)] for i in range(24)]
    assert generate(llama, "transformers", prompts) == generate(llama, "native", prompts)


def test_the_choice_of_a_backend_is_resolved_and_explained(llama: Path, tmp_path: Path) -> None:
    build("StableLmForCausalLM", tmp_path, {})
    machine = DeviceInfo(False, 2)
    chosen = resolve(EngineArgs(str(tmp_path)), describe_model(tmp_path), machine)
    assert chosen.config.model_backend == "transformers"
    assert "model_backend transformers: there is no family file for the architecture" in chosen.reasons
    usual = resolve(EngineArgs(str(llama)), describe_model(llama), machine)
    assert usual.config.model_backend == "native" and not [r for r in usual.reasons if "model_backend" in r]


def test_a_rope_that_depends_on_the_length_limits_the_texts(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    build("StableLmForCausalLM", tmp_path / "dynamic", {"max_position_embeddings": 40, "rope_parameters": {**rope}})
    assert describe_model(tmp_path / "dynamic").max_positions == 40
    assert load_model(tmp_path / "dynamic", "float32", "cpu").traits.exact_up_to == 40
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    build("SmolLM3ForCausalLM", tmp_path / "long", {"rope_parameters": {**rope, "rope_type": "longrope", **factors}})
    assert describe_model(tmp_path / "long").max_positions == 32


def test_the_option_reaches_the_engine_by_every_way(llama: Path) -> None:
    config = {"parameters": {name: {"string_value": value} for name, value in {
        "gpt_model_path": str(llama), "model_backend": "transformers",
    }.items()}}  # fmt: skip
    arguments = parameters.read_engine(config).llm_arguments
    assert arguments["model_backend"] == "transformers"
    with LLM(str(llama), skip_tokenizer_init=True, model_backend="transformers", max_seq_len=64) as llm:
        assert llm.config.model_backend == "transformers"
    config["parameters"]["model_backend"]["string_value"] = "fast"
    with pytest.raises(ConfigError, match=r"model_backend 'fast' is not allowed; .*auto, native, transformers"):
        parameters.read_engine(config)
