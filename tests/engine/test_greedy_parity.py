"""The strongest test: greedy tokens are transformers', however a request is run.

Alone, in a batch, in chunks, paused and resumed, with cached blocks, streamed or not, under every policy and layout;
random tiny Llama, float32.
"""

import random
import threading
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.admission import Submission
from backend_engine.core.outputs import RequestOutput
from backend_engine.errors import InvalidRequestError
from tests.support.tiny_llama import limit_windows

NUM_OUTPUT = 24


def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """The reference, one token at a time, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(0, 256) for _ in range(rng.choice([1, 2, 7, 16, 33, 60]))] for _ in range(12)]


@pytest.fixture(scope="module")
def expected(random_model_dir: str, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(random_model_dir, dtype=torch.float32).eval()
    return [greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]


def params() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)


def engine(model_dir: str, max_batch_size: int = 16, max_num_tokens: int = 512, **kv: object) -> LLM:
    policy = kv.pop("policy", "guaranteed_no_evict")
    scheduler = SchedulerConfig(max_batch_size, max_num_tokens, capacity_policy=str(policy))
    return LLM(model_dir, scheduler_config=scheduler, kv_cache_config=KvCacheConfig(**{"tokens_per_block": 16, **kv}))


POLICIES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "static_batch": ({"capacity_policy": "static_batch", "max_num_tokens": 64}, {}),
    "equal_progress": ({"context_chunking_policy": "equal_progress", "max_num_tokens": 24}, {}),
    "chunks_that_shrink": ({"context_cost_tokens": 10, "max_num_tokens": 24}, {}),
    "equal_progress_in_units_and_pauses": (
        {
            "context_chunking_policy": "equal_progress",
            "capacity_policy": "max_utilization",
            "max_num_tokens": 24,
            "chunk_unit_size": 8,
            "context_cost_tokens": 16,
        },
        {"max_tokens": 16 * 9},
    ),
    "first_come_first_served": ({"waiting_queue_policy": "fcfs"}, {}),
    "shortest_first": ({"waiting_queue_policy": "shortest_first", "max_batch_size": 2}, {}),
    "contiguous": ({}, {"layout": "contiguous"}),
    "contiguous_in_chunks_and_few_runs": ({"max_num_tokens": 16}, {"layout": "contiguous", "max_tokens": 3 * 256}),
    "contiguous_static_batch_of_equal_progress": (
        {"capacity_policy": "static_batch", "context_chunking_policy": "equal_progress", "max_num_tokens": 24},
        {"layout": "contiguous"},
    ),
    "windows_that_hold_every_text": ({}, {"max_attention_window": (256, 100)}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_with_every_policy(
    random_model_dir: str, prompts: list[list[int]], expected: list[list[int]], name: str
) -> None:
    scheduler, kv_cache = POLICIES[name]
    config = SchedulerConfig(**{"max_batch_size": 8, **scheduler})
    kv_config = KvCacheConfig(**{"tokens_per_block": 16, **kv_cache})
    with LLM(random_model_dir, scheduler_config=config, kv_cache_config=kv_config) as llm:
        assert ids_of(llm.generate(prompts, params())) == expected
        stats = llm.stats()
        assert stats.kv_used_blocks == 0
        assert (stats.num_paused_total > 0) == (config.capacity_policy == "max_utilization")
        if kv_config.layout == "contiguous":
            num_runs = 3 if kv_config.max_tokens else config.max_batch_size
            assert (stats.kv_max_blocks, stats.kv_tokens_per_block) == (num_runs, 256)


def test_a_contiguous_cache_of_one_run_holds_the_longest_request_and_refuses_in_words_of_max_seq_len(
    random_model_dir: str,
) -> None:
    kv_cache = KvCacheConfig(layout="contiguous", max_tokens=100)
    with LLM(random_model_dir, max_seq_len=100, kv_cache_config=kv_cache) as llm:
        (output,) = llm.generate([7] * 90, SamplingParams(max_tokens=50, ignore_eos=True)).outputs
        assert (len(output.token_ids), llm.stats().kv_max_blocks) == (10, 1)
        with pytest.raises(InvalidRequestError, match=r"^Prompt length \(100\) exceeds maximum input length \(99\)"):
            llm.generate([7] * 100, params())


def test_with_priorities(random_model_dir: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """The most urgent one ends first, and everybody's tokens are the same."""
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    order: list[int] = []
    done = threading.Event()

    def sink_of(i: int) -> Callable[[RequestOutput], None]:
        def sink(output: RequestOutput) -> None:
            found[i] += output.token_ids
            if output.finished:
                order.append(i)
                if len(order) == len(prompts):
                    done.set()

        return sink

    with engine(random_model_dir, max_batch_size=1) as llm:
        llm.submit_all([Submission(prompt, params(), sink_of(i), priority=100 - i) for i, prompt in enumerate(prompts)])
        assert done.wait(60)
    assert list(found.values()) == expected
    assert order == sorted(order, reverse=True)


def test_windows_reach_every_layer(random_model_dir: str, prompts: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model_dir, dtype=torch.float32).eval()
    limit_windows(model, (5, 300))
    with LLM(random_model_dir, kv_cache_config=KvCacheConfig(max_attention_window=(5, 300))) as llm:
        assert ids_of(llm.generate(prompts, params())) == [greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]


def ids_of(results: list) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_alone(random_model_dir: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with engine(random_model_dir) as llm:
        assert [llm.generate(prompt, params()).outputs[0].token_ids for prompt in prompts] == expected


@pytest.mark.parametrize("tokens_per_block", [1, 5, 32])
def test_in_a_batch(
    random_model_dir: str, prompts: list[list[int]], expected: list[list[int]], tokens_per_block: int
) -> None:
    with engine(random_model_dir, tokens_per_block=tokens_per_block) as llm:
        assert ids_of(llm.generate(prompts, params())) == expected


@pytest.mark.parametrize("max_num_tokens", [4, 7, 16])
def test_in_chunks(
    random_model_dir: str, prompts: list[list[int]], expected: list[list[int]], max_num_tokens: int
) -> None:
    with engine(random_model_dir, max_batch_size=4, max_num_tokens=max_num_tokens) as llm:
        assert ids_of(llm.generate(prompts, params())) == expected


def test_paused_and_resumed(random_model_dir: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with engine(random_model_dir, policy="max_utilization", max_tokens=16 * 9, enable_block_reuse=False) as llm:
        assert ids_of(llm.generate(prompts, params())) == expected
        assert llm.stats().num_paused_total > 0 and llm.stats().kv_used_blocks == 0


def test_streamed(random_model_dir: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with engine(random_model_dir) as llm:
        handles = [llm.generate_async(prompt, params()) for prompt in prompts]
        texts = []
        for handle, ids in zip(handles, expected, strict=True):
            steps = list(handle)
            assert steps[-1].outputs[0].token_ids == ids
            assert "".join(step.outputs[0].text_diff for step in steps) == steps[-1].outputs[0].text
            texts.append(steps[-1].outputs[0].text)
        assert [result.outputs[0].text for result in llm.generate(prompts, params())] == texts


def test_with_a_shared_prefix_in_the_cache(random_model_dir: str) -> None:
    """20 prompts that share 48 tokens and differ at the first, a middle or the last token, each three times."""
    rng = random.Random(7)
    shared = [rng.randrange(0, 256) for _ in range(48)]
    prompts = []
    for i in range(20):
        prompt = [*shared, *[rng.randrange(0, 256) for _ in range(8)]]
        prompt[(0, 24, 55)[i % 3]] = i
        prompts.append(prompt)
    with engine(random_model_dir, enable_block_reuse=False) as llm:
        alone = ids_of([llm.generate(prompt, params()) for prompt in prompts])
        assert llm.stats().num_cached_tokens_total == 0
    order = [i for i in range(20) for _ in range(3)]
    rng.shuffle(order)
    with engine(random_model_dir, max_batch_size=4) as llm:
        results = ids_of(llm.generate([prompts[i] for i in order], params()))
        assert results == [alone[i] for i in order]
        assert llm.stats().num_cached_tokens_total > 0


def test_requests_that_share_a_prefix_in_flight_compute_it_once(random_model_dir: str) -> None:
    rng = random.Random(8)
    shared = [rng.randrange(0, 256) for _ in range(64)]
    prompts = [[*shared, i, i + 1] for i in range(8)]
    with engine(random_model_dir, enable_block_reuse=False) as llm:
        alone = ids_of([llm.generate(prompt, params()) for prompt in prompts])
    with engine(random_model_dir) as llm:
        assert ids_of(llm.generate(prompts, params())) == alone
        assert llm.stats().num_cached_tokens_total == 7 * 64
