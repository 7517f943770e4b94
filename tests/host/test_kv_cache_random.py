"""Scheduler and cache together under random operations; everything is recomputed and compared after each one.

The driver checks that nothing in planning changes a request, that no row reads a foreign, overwritten or lost token,
that block tables equal the lists, and the integrity of the cache. Here: that all end, with the text they would have
had alone, and that nothing is left behind.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.scheduling_driver import Driver, make_request, next_token

SIZE = 4
POOL = 10
CONTEXT_LOGITS = SamplingParams(return_context_logits=True)


@dataclass(frozen=True)
class Setting:
    policy: str
    queue: str
    chunking: str
    contiguous: bool
    reuse: bool
    chunked: bool
    unit: int
    cost_tokens: int
    num_tokens: int
    batch_size: int
    depth: int


SETTINGS = st.builds(
    Setting,
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "static_batch"]),
    queue=st.sampled_from(["priority", "fcfs", "shortest_first"]),
    chunking=st.sampled_from(["first_come_first_served", "equal_progress"]),
    contiguous=st.booleans(),
    reuse=st.booleans(),
    chunked=st.booleans(),
    unit=st.sampled_from([1, 3, 5]),
    cost_tokens=st.sampled_from([0, 1, 4, 11]),
    num_tokens=st.integers(5, 24),
    batch_size=st.integers(1, 6),
    depth=st.sampled_from([1, 2]),
)


def _num_blocks(setting: Setting) -> int:
    return 2 if setting.contiguous else POOL


def _driver(setting: Setting) -> Driver:
    config = SchedulerConfig(
        max_batch_size=setting.batch_size,
        max_num_tokens=setting.num_tokens,
        capacity_policy=setting.policy,
        waiting_queue_policy=setting.queue,
        enable_chunked_context=setting.chunked,
        chunk_unit_size=setting.unit,
        context_chunking_policy=setting.chunking,
        context_cost_tokens=setting.cost_tokens,
    )
    if setting.contiguous:
        manager = KVCacheManager(_num_blocks(setting), SIZE * POOL, 1, setting.batch_size, enable_block_reuse=False)
    else:
        manager = KVCacheManager(_num_blocks(setting), SIZE, POOL, setting.batch_size, setting.reuse)
    return Driver(RequestScheduler(config), manager, depth=setting.depth)


def _random_request(request_id: int, rng: random.Random) -> LlmRequest:
    """Few different beginnings, so that they meet; never more than the pool can hold."""
    prompt = [rng.randrange(2)] * rng.choice([0, 3, 4, 8, 12]) + [rng.randrange(3) for _ in range(rng.randint(1, 9))]
    max_output = rng.randint(1, min(14, POOL * SIZE + 1 - len(prompt)))
    salt = rng.choice(["", "", "other"])
    return make_request(
        request_id, prompt, max_output, arrival_time=request_id * 0.01, cache_salt=salt,
        priority=rng.choice([1, 50, 50, 100]), params=rng.choice([SamplingParams(), CONTEXT_LOGITS]),
    )  # fmt: skip


def _alone(request: LlmRequest) -> list[int]:
    text = list(request.prompt_token_ids)
    for _ in range(request.stop.max_output_tokens):
        text.append(next_token(text))
    return text[len(request.prompt_token_ids) :]


def _check_step(driver: Driver, setting: Setting) -> None:
    was_running = driver.scheduler.running
    oldest = min(driver.scheduler.running, key=lambda r: (r.arrival_time, r.request_id), default=None)
    output = driver.step()
    assert output.num_tokens <= setting.num_tokens
    assert output.batch_size <= setting.batch_size
    assert driver.scheduler.num_running <= setting.batch_size
    assert oldest not in output.paused
    rows = [row.request.request_id for row in output.rows]
    assert len(set(rows)) == len(rows) and not set(rows) & {request.request_id for request in output.paused}
    for row in output.context:
        end = row.start + row.num_tokens
        assert row.num_tokens % setting.unit == 0 or row.needs_logits, (row, end)
        assert not row.num_reused_tokens or not row.request.sampling_params.return_context_logits
    if setting.policy != "max_utilization":
        assert not output.paused
    if setting.policy == "static_batch" and any(row.start == row.num_reused_tokens for row in output.context):
        assert not was_running, "somebody began beside those who run"


def _finish_all(driver: Driver, setting: Setting, everyone: list[LlmRequest]) -> None:
    driver.run(3000)
    assert isinstance(driver.manager, KVCacheManager)
    assert (driver.scheduler.num_waiting, driver.scheduler.num_running) == (0, 0)
    assert (driver.manager.num_used_blocks, driver.manager.num_free_blocks) == (0, _num_blocks(setting))
    for request in everyone:
        assert request.is_finished
        assert request.output_token_ids == _alone(request)[: len(request.output_token_ids)]
        if request.finish_reason == "length":
            assert len(request.output_token_ids) == request.stop.max_output_tokens


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setting=SETTINGS, seed=st.integers(0, 2**32), weights=st.tuples(*[st.integers(1, 6)] * 3))
def test_random_operations(setting: Setting, seed: int, weights: tuple[int, int, int]) -> None:
    rng = random.Random(seed)
    driver = _driver(setting)
    everyone: list[LlmRequest] = []
    for _ in range(40):
        operation = rng.choices(["add", "step", "cancel"], weights)[0]
        if operation == "add":
            everyone.append(_random_request(len(everyone), rng))
            driver.add(everyone[-1])
        elif operation == "step":
            _check_step(driver, setting)
        elif driver.requests:
            driver.cancel(rng.choice(list(driver.requests.values())))
    _finish_all(driver, setting, everyone)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("chunking", ["first_come_first_served", "equal_progress"])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
@pytest.mark.parametrize("queue", ["priority", "fcfs", "shortest_first"])
@pytest.mark.parametrize("cost_tokens", [0, 3])
def test_every_request_finishes_in_a_tiny_pool(
    policy: str, queue: str, chunking: str, reuse: bool, cost_tokens: int
) -> None:
    setting = Setting(
        policy, queue, chunking, False, reuse,
        chunked=True, unit=1, cost_tokens=cost_tokens, num_tokens=16, batch_size=6, depth=1,
    )  # fmt: skip
    rng = random.Random(5)
    driver = _driver(setting)
    everyone = [_random_request(i, rng) for i in range(40)]
    driver.add(*everyone)
    _finish_all(driver, setting, everyone)
    assert (driver.num_paused > 0) == (policy == "max_utilization")
    assert isinstance(driver.manager, KVCacheManager)
    assert (driver.manager.num_reused_blocks_total > 0) == reuse
    assert all(request.finish_reason == "length" for request in everyone)


def test_waiters_share_what_the_first_computes() -> None:
    """A burst with one long beginning: computed by those of the first step only, read by all others."""
    config = SchedulerConfig(max_batch_size=8, max_num_tokens=16)
    manager = KVCacheManager(64, SIZE, 16, 8)
    driver = Driver(RequestScheduler(config), manager)
    prefix = list(range(500, 524))
    driver.add(*(make_request(i, [*prefix, i], 3) for i in range(8)))
    driver.run()
    assert manager.num_reused_blocks_total == 7 * 6
    assert sum(output.num_context_tokens for output in driver.steps) == 24 + 8
