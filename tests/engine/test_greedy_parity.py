"""The strongest test: greedy tokens are transformers', however a request is run.

Alone, in a batch, in chunks, paused and resumed, with cached blocks, streamed or not; random tiny Llama, float32.
"""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig

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
