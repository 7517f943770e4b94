"""Requests that share a beginning nobody has computed yet: one computes it, the others wait for its blocks.

The order of events and the numbers of tokens, on the host wing alone; nothing here looks at a clock.
"""

import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.scheduling_driver import AmpleKv, Driver, make_request

SIZE = 32
PREFIX = list(range(1000, 1512))
"""16 blocks of 32 tokens."""
WITH_LOGITS = SamplingParams(return_context_logits=True)


def _driver(num_blocks: int = 1000, size: int = SIZE, *, reuse: bool = True, **changes: object) -> Driver:
    config = SchedulerConfig(**{"max_batch_size": 16, "max_num_tokens": 2048, **changes})
    manager = KVCacheManager(num_blocks, size, num_blocks, config.max_batch_size, reuse)
    return Driver(RequestScheduler(config), manager)


def _burst(count: int = 16, num_own: int = 32, num_new: int = 4, first_id: int = 0) -> list[LlmRequest]:
    """Requests of 512 tokens that all have and some of their own each."""
    return [
        make_request(i, [*PREFIX, *(10_000 * (i + 1) + k for k in range(num_own))], num_new)
        for i in range(first_id, first_id + count)
    ]


def _context(output: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(row.request.request_id, row.start, row.num_tokens) for row in output.context]


def _num_reused(driver: Driver) -> int:
    assert driver.manager is not None
    return driver.manager.num_reused_blocks_total


def test_sixteen_requests_at_once_compute_their_prefix_once() -> None:
    driver = _driver()
    burst = _burst()
    driver.add(*burst)
    assert _context(driver.step()) == [(0, 0, 544)]
    second = driver.step()
    assert _context(second) == [(i, 512, 32) for i in range(1, 16)]
    assert [row.request.request_id for row in second.generation] == [0]
    driver.run()
    assert sum(output.num_context_tokens for output in driver.steps) == 512 + 16 * 32
    assert _num_reused(driver) == 15 * 16
    assert [request.num_cached_tokens for request in burst] == [0] + [512] * 15


def test_those_who_come_while_it_is_computed_wait_too_and_everything_else_goes_on() -> None:
    driver = _driver(max_num_tokens=340, chunk_unit_size=64)
    driver.add(*_burst(2))
    assert _context(driver.step()) == [(0, 0, 320)]
    driver.add(*_burst(1, first_id=2), make_request(3, 40, 4))
    assert _context(driver.step()) == [(0, 320, 224), (3, 0, 40)]
    assert _context(driver.step()) == [(1, 512, 32), (2, 512, 32)]
    driver.run()


def test_a_waiting_request_takes_no_token_of_the_step() -> None:
    driver = _driver(max_num_tokens=544 + 100)
    driver.add(*_burst(3), make_request(3, 100, 4))
    assert _context(driver.step()) == [(0, 0, 544), (3, 0, 100)]


def test_a_shared_beginning_is_followed_block_by_block_to_where_texts_part() -> None:
    """Three texts like branches of a tree: who waits goes on as soon as the other is past what they share."""
    driver = _driver(size=4, max_num_tokens=8, chunk_unit_size=4)
    trunk, branch = list(range(8)), list(range(100, 108))
    driver.add(
        make_request(0, [*trunk, *branch, 200], 1),
        make_request(1, [*trunk, *branch, 300], 1),
        make_request(2, [*trunk, 400, 401], 1),
    )
    seen = [_context(driver.step()) for _ in range(4)]
    assert seen[0] == [(0, 0, 8)]
    assert seen[1] == [(0, 8, 8)], "the whole step is the first one's, as ever"
    assert seen[2] == [(0, 16, 1), (1, 16, 1), (2, 8, 2)]
    driver.run()


@pytest.mark.parametrize("num_done", [0, 256])
def test_the_next_in_line_computes_when_the_first_is_cancelled(num_done: int) -> None:
    driver = _driver(max_num_tokens=256)
    burst = _burst(4, num_own=8)
    driver.add(*burst)
    if num_done:
        driver.step()
    driver.cancel(burst[0])
    assert _context(driver.step()) == [(1, num_done, 256)]
    driver.run()
    assert [request.finish_reason for request in burst] == ["cancelled", "length", "length", "length"]
    assert [request.num_cached_tokens for request in burst[1:]] == [num_done, 512, 512]


def test_a_pause_of_the_one_that_computes_leaves_nobody_waiting_for_ever() -> None:
    driver = _driver(num_blocks=9, size=4, max_num_tokens=5, chunk_unit_size=1, capacity_policy="max_utilization")
    shared = list(range(500, 524))
    old = make_request(0, 10, 24, arrival_time=0.0)
    first, waiter = (make_request(i, [*shared, i], 6, arrival_time=float(i)) for i in (1, 2))
    driver.add(old, first, waiter)
    while first not in driver.step().paused:
        assert waiter.num_computed_tokens == 0 and not old.is_finished
    driver.run()
    assert all(len(request.output_token_ids) == request.stop.max_output_tokens for request in (old, first, waiter))
    assert waiter.num_cached_tokens >= 24, "the shared blocks at least, and after a pause of its own, more"


def test_nobody_waits_where_nothing_can_be_reused() -> None:
    driver = _driver(reuse=False)
    driver.add(*_burst(3))
    assert _context(driver.step()) == [(i, 0, 544) for i in range(3)]
    driver = _driver()
    driver.add(*(make_request(i, [*PREFIX, i], 4, params=WITH_LOGITS) for i in range(3)))
    assert _context(driver.step()) == [(i, 0, 513) for i in range(3)]
    driver = _driver()
    driver.add(*(make_request(i, [*PREFIX, i], 4, cache_salt=str(i % 2)) for i in range(4)))
    assert _context(driver.step()) == [(0, 0, 513), (1, 0, 513)]
    assert _context(driver.step()) == [(2, 512, 1), (3, 512, 1)]


def test_nobody_waits_for_a_block_that_it_has_to_compute_itself() -> None:
    """Equal prompts of whole blocks: the last block's last token is wanted by both, so it is no use waiting for it."""
    driver = _driver(size=4)
    driver.add(*(make_request(i, list(range(4)), 3) for i in range(2)))
    assert _context(driver.step()) == [(0, 0, 4), (1, 0, 4)]
    # A longer one can use it, and waits, whoever computes it.
    driver = _driver(size=4)
    driver.add(*(make_request(i, list(range(4)), 3) for i in range(2)), make_request(2, [*range(4), 9], 3))
    assert _context(driver.step()) == [(0, 0, 4), (1, 0, 4)]
    assert _context(driver.step()) == [(2, 4, 1)]


def test_others_wait_for_what_a_request_with_context_logits_computes_behind_a_cached_beginning() -> None:
    driver = _driver()
    driver.add(make_request(0, PREFIX[:65], 1))
    driver.run()
    driver.add(make_request(1, [*PREFIX, 1], 2, params=WITH_LOGITS), make_request(2, [*PREFIX, 2], 2))
    assert _context(driver.step()) == [(1, 0, 513)]
    assert _context(driver.step()) == [(2, 512, 1)]


def test_a_static_batch_begins_together() -> None:
    """Who waited there would wait for the batch's end, not for a block."""
    driver = _driver(capacity_policy="static_batch")
    driver.add(*_burst(3))
    assert _context(driver.step()) == [(i, 0, 544) for i in range(3)]
    driver.run()
    driver.add(*_burst(2, first_id=3))
    assert _context(driver.step()) == [(3, 512, 32), (4, 512, 32)], "what is there is taken"
    driver.run()


@pytest.mark.parametrize("queue", ["fcfs", "priority", "shortest_first"])
def test_the_order_of_service_decides_who_computes(queue: str) -> None:
    driver = _driver(waiting_queue_policy=queue)
    prompts = {0: [*PREFIX, *range(40)], 1: [*PREFIX, *range(50, 60)], 2: [*PREFIX, *range(70, 100)]}
    driver.add(*(make_request(i, p, 2, priority=(50, 60, 1)[i], arrival_time=0.001 * i) for i, p in prompts.items()))
    first = {"fcfs": 0, "priority": 2, "shortest_first": 1}[queue]
    assert [c[0] for c in _context(driver.step())] == [first]


def _num_calls(action: Any) -> int:
    """Python functions that ``action`` enters."""
    count = 0

    def count_calls(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(count_calls)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("is_shared", [False, True])
def test_admitting_a_burst_costs_each_of_its_requests_the_same(is_shared: bool) -> None:
    def calls(count: int) -> int:
        driver = _driver(100_000, max_batch_size=count, max_num_tokens=100 * count)
        driver.add(*(make_request(i, [0 if is_shared else i, *range(1, 60), i], 2) for i in range(count)))
        if is_shared:
            driver.step()
        return _num_calls(lambda: driver.scheduler.schedule(driver.kv))

    assert calls(400) < 2.2 * calls(200)


class _Watch(Driver):
    """Checks after each step that whoever waits for a block waits for one that a running context has yet to compute."""

    def step(self) -> SchedulerOutput:
        output = super().step()
        assert self.manager is not None
        running = self.scheduler.running
        for waiter in self.requests.values():
            match = self.manager.match_prefix(waiter)
            if waiter in running or not match.is_pending:
                continue
            computing = [request for request in running if request.in_context_phase]
            to_come = {
                key.block_hash
                for request in computing
                for key in self.manager._chains[request.request_id].keys[request.num_computed_tokens // 4 :]
            }
            assert match.next_block in to_come, f"{waiter} waits for a block that nobody computes: {computing}"
        return output


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    chunking=st.sampled_from(["first_come_first_served", "equal_progress"]),
    num_tokens=st.integers(8, 40),
    num_blocks=st.sampled_from([12, 40]),
)
def test_random_trees_of_texts_with_cancels(
    seed: int, policy: str, chunking: str, num_tokens: int, num_blocks: int
) -> None:
    """All finish, each with exactly its tokens computed or reused, and the cache's books are right after each step."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        max_batch_size=6, max_num_tokens=num_tokens, capacity_policy=policy, context_chunking_policy=chunking,
        chunk_unit_size=rng.choice([1, 4, 7]), context_cost_tokens=rng.choice([0, 2, 9]),
    )  # fmt: skip
    driver = _Watch(RequestScheduler(config), KVCacheManager(num_blocks, 4, num_blocks, 6))
    everyone: list[LlmRequest] = []
    for i in range(24):
        text = [k % 3 * 10 + rng.choice([0, 0, 0, 1]) * (k > 5) for k in range(rng.randint(1, 28))]
        everyone.append(
            make_request(i, text, rng.randint(1, 8), params=rng.choice([SamplingParams()] * 4 + [WITH_LOGITS]))
        )
        driver.add(everyone[-1])
        for _ in range(rng.randrange(3)):
            driver.step()
        if driver.requests and rng.random() < 0.25:
            driver.cancel(rng.choice(list(driver.requests.values())))
    driver.run(3000)
    computed = Counter[int]()
    for output in driver.steps:
        for request in output.paused:
            computed[request.request_id] = 0
        for row in output.rows:
            computed[row.request.request_id] += row.num_tokens + row.num_reused_tokens
    for request in everyone:
        if request.finish_reason == "length":
            assert len(request.output_token_ids) == request.stop.max_output_tokens
            assert computed[request.request_id] == request.num_tokens - 1, request
    assert driver.manager is not None and driver.manager.num_used_blocks == 0


def test_a_cache_without_reuse_names_no_block() -> None:
    """What other implementations of ``KvCapacity`` may do as well: nothing is claimed, nobody waits."""
    driver = Driver(RequestScheduler(SchedulerConfig(max_batch_size=4, max_num_tokens=64)), AmpleKv())
    driver.add(*(make_request(i, [1] * 16, 1) for i in range(3)))
    assert len(driver.step().context) == 3
