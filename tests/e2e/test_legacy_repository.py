"""Repositories that were filled for the earlier generation: they load, and their clients find what they knew."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import ProductServer, serving_repository
from tests.support.client import grpc_all, grpc_text
from tests.support.legacy_repository import OURS, build_legacy_repository

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def legacy_server(table_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProductServer]:
    """The table model in an old repository."""
    repository = build_legacy_repository(tmp_path_factory.mktemp("legacy") / "repository", table_model_dir)
    texts = [path.read_text() for path in repository.glob("*/config.pbtxt")]
    assert len(texts) == 5 and not any(f'"{name}"' in text for text in texts for name in OURS - {"text_output"})
    with serving_repository(repository) as server:
        yield server


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize(("word", "text"), [("Count", " 1 2 3 4 5 end"), ("Text", " gamma delta"), ("User", "")])
def test_texts_are_what_they_were(legacy_server: ProductServer, model: str, word: str, text: str) -> None:
    assert legacy_server.text(model, text_input=word, max_tokens=16, bad_words="", stop_words="") == text
    assert legacy_server.joined(model, text_input=word, max_tokens=16) == text
    assert grpc_text(legacy_server.grpc, model, text_input=word, max_tokens=16) == text


def test_stop_words_and_old_spellings_count(legacy_server: ProductServer) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        asked = {"text_input": "Lines", "max_tokens": 16, "random_seed": 3, "min_length": 1, "beam_width": 1}
        assert legacy_server.text(model, stop_words=["\n"], **asked) == " row\n"
        assert legacy_server.generate(model, text_input="Count", max_tokens=0)[0] == 400


def test_the_engine_takes_both_generations_of_token_requests(
    legacy_server: ProductServer, table_ids: dict[str, int]
) -> None:
    given = {"input_ids": table_ids["Count"], "input_lengths": 1, "request_output_len": 3}
    for more in ({}, {"min_length": 1}, {"min_tokens": 1}, {"return_perf_metrics": True}):
        (response,) = grpc_all(legacy_server.grpc, "tensorrt_llm", **given, **more)
        assert response.error is None and response.outputs["output_ids"].shape == (1, 1, 3)
        assert response.outputs["output_ids"].dtype == np.int32


def test_what_has_no_effect_is_told_once(legacy_server: ProductServer) -> None:
    lines = [line for line in legacy_server.log().splitlines() if "parameters without effect" in line]
    engine = [line for line in lines if "tensorrt_llm: " in line]
    assert len(engine) == 1 and all(
        name in engine[0] for name in ("executor_worker_path", "kv_cache_host_memory_bytes", "normalize_log_probs")
    )
