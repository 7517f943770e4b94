"""Context and generation logits from the whole engine, against one forward pass of transformers."""

from pathlib import Path

import numpy as np
import pytest

from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from backend_engine.results import GenerationResult
from tests.support.tiny_llama import build_tiny_llama, reference_logits

PROMPT = [int(i) for i in np.random.default_rng(3).integers(3, 90, 21)]
BOTH = SamplingParams(
    max_tokens=6,
    ignore_eos=True,
    return_context_logits=True,
    return_generation_logits=True,
    temperature=0.8,
    seed=5,
    n=2,
)


def check(result: GenerationResult, model: object) -> None:
    """Every number within 1e-4 of the reference."""
    for output in result.outputs:
        expected = reference_logits(model, PROMPT + output.token_ids).numpy()  # type: ignore[arg-type]
        assert result.context_logits is not None and output.generation_logits is not None
        assert result.context_logits.shape == (21, expected.shape[1]) and output.generation_logits.shape[0] == 6
        np.testing.assert_allclose(result.context_logits, expected[:21], atol=1e-4)
        np.testing.assert_allclose(output.generation_logits, expected[20:26], atol=1e-4)


@pytest.mark.parametrize("max_num_tokens", [8, 64])
def test_logits_are_the_models_own_in_chunks_and_beside_others(tmp_path: Path, max_num_tokens: int) -> None:
    model = build_tiny_llama(tmp_path)
    scheduler = SchedulerConfig(max_batch_size=4, max_num_tokens=max_num_tokens)
    cache = KvCacheConfig(tokens_per_block=4)
    with LLM(str(tmp_path), skip_tokenizer_init=True, scheduler_config=scheduler, kv_cache_config=cache) as llm:
        plain = SamplingParams(max_tokens=8, ignore_eos=True)
        llm.generate(PROMPT, plain)  # its blocks must not stand in for logits
        first, other = llm.generate_async(PROMPT, BOTH), llm.generate_async(PROMPT[:9], plain)
        result, beside = first.result(60), other.result(60)
    assert beside.context_logits is None and beside.outputs[0].generation_logits is None
    assert result.num_cached_tokens == 0 and result.outputs[0].token_ids != result.outputs[1].token_ids
    check(result, model)


def test_a_paused_request_gets_each_of_its_logits_once(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path)
    scheduler = SchedulerConfig(max_batch_size=6, max_num_tokens=16, capacity_policy="max_utilization")
    cache = KvCacheConfig(tokens_per_block=4, max_tokens=48, enable_block_reuse=False)
    with LLM(str(tmp_path), skip_tokenizer_init=True, scheduler_config=scheduler, kv_cache_config=cache) as llm:
        handles = [llm.generate_async(PROMPT, BOTH) for _ in range(3)]
        results = [handle.result(60) for handle in handles]
        assert llm.stats().num_paused_total > 0
    for result in results:
        check(result, model)
