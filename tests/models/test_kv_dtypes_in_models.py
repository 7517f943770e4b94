"""Whole models over every form of the KV cache: near the model without a cache, and the same however texts are cut up.

The pool starts full of NaN. Where a cache rounds, a number that lies between two codes may fall to either side when the
order of a sum differs, so that answers are compared within a part of what the rounding itself does.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.attention.paged_kv import Fp8Kv, Int8Kv, KvScales, PlainKv
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.core.kv_spec import KvSpec, LatentSpec, StateSpec
from backend_engine.errors import ConfigError
from backend_engine.executor import build as build_module
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.model_engine.model_engine import ModelEngine, layer_caches
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.model_engine.model_loader import load_model
from backend_engine.model_engine.weight_memory import weight_bytes
from backend_engine.triton_io import parameters
from tests.support.engine_driver import EngineDriver
from tests.support.parity import prompt
from tests.support.tiny_llama import build_tiny_llama
from tests.support.tiny_models import build_tiny_model, reference_logits

NEW_TOKENS = 32
# Distance of logits from the model's own, as a share of their length, over the rows: largest that rounding explains.
# The tiny models' attention is sharp, and their layers amplify what goes in.
LIMITS = {"float32": 1e-5, "bfloat16": 0.02, "float16": 0.003, "fp8": 0.2, "fp8_e5m2": 0.35, "int8": 0.04}
# The same between two ways to the same answer: a number that falls to the other side, at most.
SAME = 5e-3
MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "llama": (build_tiny_llama, "native"),
    "latent": (lambda folder: build_tiny_model("deepseek_v2", folder), "native"),
    "windows and sinks": (lambda folder: build_tiny_model("gpt_oss", folder), "native"),
    "transformers": (build_tiny_llama, "transformers"),
}


class Built(NamedTuple):
    folder: Path
    model: Any
    backend: str


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("kv_dtypes") / "model"
    build, backend = MODELS[request.param]
    return Built(folder, build(folder), backend)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv_dtypes") / "llama"
    build_tiny_llama(folder)
    return folder


def distances(found: list[torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
    """Of each row of logits, as a share of the length of the expected one."""
    return (torch.stack(found) - expected).norm(dim=-1) / expected.norm(dim=-1)


def check_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Rows are the same up to the first that chooses another token."""
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert float((row - wanted).norm() / wanted.norm()) <= SAME
        if row.argmax() != wanted.argmax():
            break


@pytest.mark.parametrize("name", KV_FORMATS)
def test_answers_are_near_the_models_own_and_do_not_depend_on_chunks_and_pauses(built: Built, name: str) -> None:
    driver = EngineDriver(built.folder, model_backend=built.backend, kv_dtype=name)
    output = driver.generate(driver.add(0, prompt(37)), NEW_TOKENS)
    errors = distances(driver.logits[0], reference_logits(built.model, prompt(37), output))
    assert float(errors.mean()) <= LIMITS[name]
    assert name == "float32" or float(errors.mean()) > 1e-4, "the cache is not of this format"
    driver.generate(driver.add(1, prompt(37)), NEW_TOKENS, 7)
    check_same(driver.logits[1], driver.logits[0])
    paused = driver.add(3, prompt(37))
    driver.generate(paused, 9)
    paused.pause()
    driver.generate(paused, NEW_TOKENS, chunk=9)
    check_same(driver.logits[3], driver.logits[0])


def test_a_batch_of_several_texts_is_answered_as_if_each_were_alone(built: Built) -> None:
    for name in ("fp8", "int8"):
        driver = EngineDriver(built.folder, model_backend=built.backend, num_blocks=130, kv_dtype=name)
        texts = [prompt(length, seed) for seed, length in enumerate((21, 5, 34))]
        for i, text in enumerate(texts):
            driver.generate(driver.add(i, text), 6)
        requests = [driver.add(10 + i, text) for i, text in enumerate(texts)]
        driver.step(context=[(request, len(text)) for request, text in zip(requests, texts, strict=True)])
        for _ in range(5):
            driver.step(generation=requests)
        for i in range(len(texts)):
            check_same(driver.logits[10 + i], driver.logits[i])


@pytest.mark.parametrize("name", ["bfloat16", "fp8", "int8"])
@pytest.mark.parametrize(
    ("scheduler", "kv_cache"),
    [
        ({"max_batch_size": 6, "max_num_tokens": 24, "capacity_policy": "max_utilization"}, {"max_tokens": 160}),
        ({"max_batch_size": 4, "max_num_tokens": 24, "chunk_unit_size": 3}, {"layout": "contiguous"}),
        ({"max_batch_size": 4, "enable_chunked_context": False}, {}),
    ],
    ids=["pauses in a small pool", "contiguous", "whole prompts"],
)
def test_the_engine_pauses_reuses_and_answers_as_if_alone(
    llama: Path, name: str, scheduler: dict[str, Any], kv_cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CHECK_INVARIANTS", "1")
    stem = prompt(24)
    prompts = [stem[:shared] + prompt(9 + seed, seed) for seed, shared in enumerate((24, 0, 24, 16, 8, 24))]
    config = KvCacheConfig(**{"tokens_per_block": 4, **kv_cache, "dtype": name})
    params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, return_generation_logits=True)
    with LLM(
        str(llama), skip_tokenizer_init=True, max_seq_len=96, kv_cache_config=config,
        scheduler_config=SchedulerConfig(**scheduler),
    ) as llm:  # fmt: skip
        assert llm.config.kv_cache.dtype == name
        together = llm.generate([prompts[0], *prompts], params)
        memory = llm._executor.stats().memory.cpu  # type: ignore[union-attr]
        pool = llm._executor._model_engine._pool  # type: ignore[union-attr]
        per_token = 2 * 2 * 2 * {"bfloat16": 32, "fp8": 16, "int8": 20}[name]  # layers, planes, heads
        assert pool.num_bytes == pool.num_blocks * pool.tokens_per_block * per_token
        assert memory == pool.num_bytes + weight_bytes(llm._executor._model_engine._loaded.model)  # type: ignore[union-attr]
    alone_config = KvCacheConfig(tokens_per_block=32, enable_block_reuse=False, dtype=name)
    with LLM(str(llama), skip_tokenizer_init=True, max_seq_len=96, kv_cache_config=alone_config) as llm:
        for answer, text in zip(together, [prompts[0], *prompts], strict=True):
            expected = llm.generate(text, params)
            rows = [
                list(torch.from_numpy(np.array(result.outputs[0].generation_logits))) for result in (answer, expected)
            ]
            check_same(rows[0], rows[1])
    if kv_cache.get("layout") != "contiguous":
        assert max(answer.num_cached_tokens for answer in together) >= 8


def test_the_memory_of_every_tensor_of_the_pool_is_taken_in_the_background(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(build_module, "populate_in_background", lambda owner, regions: taken.extend(regions))
    with LLM(
        str(llama),
        skip_tokenizer_init=True,
        max_seq_len=64,
        max_batch_size=2,
        kv_cache_config=KvCacheConfig(dtype="int8"),
    ) as llm:
        pool = llm._executor._model_engine._pool  # type: ignore[union-attr]
        assert taken == pool.memory_regions() and len(taken) == 4  # codes and scales of two layers
        assert sum(num_bytes for _, num_bytes in taken) == pool.num_bytes


def test_scales_of_the_checkpoint_reach_the_layer_they_belong_to() -> None:
    specs = [KvSpec(2, 8), StateSpec(((3,),)), LatentSpec(6), KvSpec(2, 8)]
    scales = {0: KvScales(0.5, 2.0), 2: KvScales(0.25, 1.0)}
    for dtype, kind in ((torch.float8_e4m3fn, Fp8Kv), (torch.int8, Int8Kv), (torch.float32, PlainKv)):
        pool = KVPool(specs, 3, 4, dtype, torch.device("cpu"))
        caches = layer_caches(specs, pool.layers, scales)
        assert [type(cache) for cache in caches] == [kind, tuple, kind, kind]
        assert caches[1] is pool.layers[1]
        fp8 = [cache.scales for cache in caches if isinstance(cache, Fp8Kv)]
        assert fp8 == ([scales[0], scales[2], KvScales(1.0, 1.0)] if kind is Fp8Kv else [])


def test_a_model_is_run_with_the_scales_that_were_loaded(llama: Path) -> None:
    loaded = load_model(llama, "float32", "cpu")
    rows: dict[str, torch.Tensor] = {}
    # With scales so small all keys and values are cut at the largest number, with middling ones none are.
    for about, scales in (("none", {}), ("equal", {1: KvScales(1.0, 1.0)}), ("small", {1: KvScales(1e-4, 1e-4)})):
        driver = EngineDriver(llama, kv_dtype="fp8")
        driver.engine = ModelEngine(
            dataclasses.replace(loaded, kv_scales=scales), driver.pool, EngineLimits(8, 256, 160)
        )
        driver.generate(driver.add(0, prompt(20)), 1)
        rows[about] = driver.logits[0][0]
    assert torch.equal(rows["none"], rows["equal"])
    assert float((rows["small"] - rows["none"]).norm() / rows["none"].norm()) > 0.3


def test_the_engine_model_takes_the_option_and_refuses_other_words() -> None:
    def config(value: str) -> dict[str, Any]:
        keys = {"gpt_model_path": "model", "kv_cache_dtype": value}
        return {"parameters": {key: {"string_value": text} for key, text in keys.items()}}

    for name in ("auto", *KV_FORMATS):
        assert parameters.read_engine(config(name)).llm_arguments["kv_cache_config"].dtype == name
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp4' is not allowed; .*auto, float32, .*, fp8_e5m2, int8"):
        parameters.read_engine(config("fp4"))
    assert KV_DTYPES.keys() == KV_FORMATS.keys()
