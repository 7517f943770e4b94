"""Every model family through the whole engine: requests that are chunked, paused, cancelled and share their beginnings
in a cache that is too small for all of them answer as transformers does, and the cache's books hold after each step.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.results import GenerationHandle
from tests.support.tiny_models import TINY_MODELS, build_tiny_model, reference_logits

NUM_REQUESTS = 24
NEW_TOKENS = 20
# Greedy choices may differ where two tokens are this close.
TIE = 1e-3


def prompts(rng: random.Random) -> list[list[int]]:
    """Texts of all lengths, many of which begin like another one."""
    stems = [[rng.randrange(3, 96) for _ in range(length)] for length in (48, 20)]
    result = []
    for _ in range(NUM_REQUESTS):
        stem = rng.choice([*stems, []])
        shared = stem[: rng.choice([len(stem), len(stem) // 2])]
        result.append(shared + [rng.randrange(3, 96) for _ in range(rng.choice([1, 2, 9, 17]))])
    return result


def check(model: Any, ids: list[int], output: list[int]) -> None:
    """Every token is the most likely one, or as good as that."""
    logits = reference_logits(model, ids, output)
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert (logits.amax(1) - chosen).max() < TIE, (ids, output, logits.argmax(1).tolist())


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_random_mix_answers_as_transformers_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(name, tmp_path)
    monkeypatch.setenv("ENGINE_CHECK_INVARIANTS", "1")
    rng = random.Random(name)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    scheduler = SchedulerConfig(max_batch_size=6, max_num_tokens=24, capacity_policy="max_utilization")
    cache = KvCacheConfig(tokens_per_block=8, max_tokens=8 * 13)
    texts = prompts(rng)
    # max_seq_len: the pool holds two of the longest, so that those who run have to make room for each other.
    with LLM(
        str(tmp_path), scheduler_config=scheduler, kv_cache_config=cache, skip_tokenizer_init=True, max_seq_len=88,
        num_threads=1,
    ) as llm:  # fmt: skip
        handles: list[GenerationHandle] = []
        cancelled = set(rng.sample(range(NUM_REQUESTS), 5))
        for i, ids in enumerate(texts):
            handles.append(llm.generate_async(ids, params))
            if i in cancelled:
                next(iter(handles[i]))
                handles[i].abort()
        answers = [handle.result().outputs[0] for handle in handles]
        stats = llm.stats()
    assert all(answer.finish_reason in ("length", "cancelled") for answer in answers)
    for i, (ids, answer) in enumerate(zip(texts, answers, strict=True)):
        if i not in cancelled:
            assert len(answer.token_ids) == NEW_TOKENS, (i, answer)
        check(model, ids, answer.token_ids)
    assert stats.num_paused_total > 0, "the pool is too large for this test"
    assert stats.num_cached_tokens_total > 0, "no beginning was reused"
    assert stats.kv_used_blocks == 0
