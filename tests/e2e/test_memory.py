"""A KV cache that is too small, and reused blocks, through a real server with a model whose context matters."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import ProductServer, serving
from tests.support import waiting
from tests.support.client import at_once, grpc_all

pytestmark = pytest.mark.triton
eventually = functools.partial(waiting.eventually, seconds=20.0, pause_s=0.05)


@pytest.fixture(scope="module")
def small_server(random_model_dir: Path) -> Iterator[ProductServer]:
    """24 blocks of 16 tokens, under max_utilization."""
    settings = {
        "tokens_per_block": 16, "max_tokens_in_paged_kv_cache": 24 * 16, "batch_scheduler_policy": "max_utilization",
    }  # fmt: skip
    with serving(random_model_dir, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def tiny_server(random_model_dir: Path) -> Iterator[ProductServer]:
    """8 blocks of 16 tokens."""
    with serving(random_model_dir, tokens_per_block=16, max_tokens_in_paged_kv_cache=128) as server:
        yield server


def answer(server: ProductServer, ids: list[int], num_tokens: int, stream: bool = False) -> list[int]:
    """Token ids of an answer; with ``stream`` its pieces joined."""
    responses = grpc_all(
        server.grpc, "tensorrt_llm", input_ids=np.array([ids], np.int32), input_lengths=len(ids),
        request_output_len=num_tokens, streaming=stream, exclude_input_in_output=True,
    )  # fmt: skip
    assert not [r.error for r in responses if r.error], responses
    return [int(i) for r in responses if r.outputs for i in r.outputs["output_ids"].reshape(-1)]


def test_a_prompt_that_can_never_fit_is_refused_at_once(tiny_server: ProductServer) -> None:
    ids = np.full((1, 150), 7, np.int32)
    error = grpc_all(tiny_server.grpc, "tensorrt_llm", input_ids=ids, input_lengths=150, request_output_len=5)[0].error
    assert error is not None and "10 " in error and "8 blocks" in error and "128 tokens" in error
    assert len(answer(tiny_server, [7] * 100, 100)) == 29, "it ends by itself where the cache ends"
    assert eventually(lambda: tiny_server.gauge("nv_trt_llm_kv_cache_block_metrics", "used") == 0)


def test_paused_requests_come_back_without_a_gap_or_a_repeat(small_server: ProductServer) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(16)] for _ in range(8)]
    solo = [answer(small_server, prompt, 96) for prompt in prompts]
    for stream in (False, True):
        together = at_once([lambda p=prompt, s=stream: answer(small_server, p, 96, s) for prompt in prompts])
        assert together == solo
    assert small_server.gauge("inflight_preempted_requests_total") > 0
    assert eventually(lambda: small_server.gauge("nv_trt_llm_kv_cache_block_metrics", "used") == 0)


def test_reused_blocks_change_no_answer(small_server: ProductServer) -> None:
    rng = random.Random(6)
    shared = [rng.randrange(256) for _ in range(48)]
    prompts = []
    for i in range(20):
        prompt = [*shared, *[rng.randrange(256) for _ in range(8)]]
        prompt[(0, 24, 55)[i % 3]] = i
        prompts.append(prompt)
    first = [answer(small_server, prompt, 16) for prompt in prompts]
    order = [i for i in range(20) for _ in range(2)]
    rng.shuffle(order)
    for group in range(0, len(order), 4):
        wanted = order[group : group + 4]
        assert at_once([lambda i=i: answer(small_server, prompts[i], 16) for i in wanted]) == [first[i] for i in wanted]
    assert eventually(lambda: small_server.gauge("inflight_cached_tokens_total") > 0)
