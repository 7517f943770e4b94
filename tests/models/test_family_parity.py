"""Every model family against transformers: same logits and same greedy tokens, however the work is cut up."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.engine_driver import EngineDriver
from tests.support.parity import check, prompt
from tests.support.tiny_models import TINY_MODELS, build_tiny_model, reference_logits

NEW_TOKENS = 8


class Built(NamedTuple):
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=TINY_MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("families") / request.param
    return Built(folder, build_tiny_model(request.param, folder))


def test_a_prompt_at_once_in_chunks_and_token_by_token(built: Built) -> None:
    driver = EngineDriver(built.folder)
    for request_id, chunk in enumerate((1000, 7, 1)):
        output = driver.generate(driver.add(request_id, prompt(45)), NEW_TOKENS, chunk)
        check(driver, built.model, request_id, prompt(45), output)


def test_requests_that_share_steps_answer_as_if_alone(built: Built) -> None:
    driver = EngineDriver(built.folder)
    # Another seed has a token whose groups of experts are 6e-8 apart: rounding decides there.
    prompts = [prompt(41, 6), prompt(5, 2), prompt(1, 3), prompt(40, 4)]
    first, second, third, fourth = (driver.add(i, ids) for i, ids in enumerate(prompts))
    driver.step(context=[(second, 5)])
    driver.step(context=[(first, 20), (third, 1)], generation=[second])
    driver.step(context=[(first, 21), (fourth, 17)], generation=[second, third])
    driver.step(context=[(fourth, 1)], generation=[third, first])
    driver.step(context=[(fourth, 22)], generation=[first, second])
    for _ in range(4):
        driver.step(generation=[third, first, fourth, second])
    for request, ids in zip((first, second, third, fourth), prompts, strict=True):
        check(driver, built.model, request.request_id, ids, request.output_token_ids)


def test_a_paused_request_computes_its_whole_text_again(built: Built) -> None:
    driver = EngineDriver(built.folder)
    request = driver.add(0, prompt(20))
    driver.generate(request, 5)
    request.pause()
    driver.generate(request, NEW_TOKENS, chunk=9)
    check(driver, built.model, 0, prompt(20), request.output_token_ids)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_precision_stays_close_to_float32(built: Built, dtype: str, limit: float) -> None:
    driver = EngineDriver(built.folder, dtype)
    driver.generate(driver.add(0, prompt(30)), 1, chunk=11)
    expected = reference_logits(built.model, prompt(30), [0])[-1]
    error = (driver.logits[0][0] - expected).norm() / expected.norm()
    assert error < limit
