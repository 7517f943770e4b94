"""Capacity policies and micro batches: who is admitted, who pauses, who gets how many tokens."""

from collections.abc import Set

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.protocols import PrefixMatch
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.scheduling_driver import AmpleKv, Driver, make_request


def _config(**changes: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_batch_size": 8, "max_num_tokens": 64, **changes})


def _driver(num_blocks: int, *, reuse: bool = False, depth: int = 1, **changes: object) -> Driver:
    """Four tokens a block."""
    return Driver(RequestScheduler(_config(**changes)), KVCacheManager(num_blocks, 4, 64, 8, reuse), depth=depth)


def _context(output: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(row.request.request_id, row.start, row.num_tokens) for row in output.context]


def _ids(requests: tuple[LlmRequest, ...]) -> list[int]:
    return [request.request_id for request in requests]


# Micro batches.


def test_chunks_are_multiples_of_the_unit_but_for_the_last() -> None:
    driver = _driver(100, max_num_tokens=50, chunk_unit_size=16)
    driver.add(make_request(0, 8, 9), make_request(1, 100, 2))
    chunks = [chunk for _ in range(6) for chunk in _context(driver.step())]
    assert chunks == [(0, 0, 8), (1, 0, 32), (1, 32, 48), (1, 80, 20)]


def test_a_context_that_finds_no_room_for_a_chunk_is_not_overtaken() -> None:
    driver = _driver(100, max_num_tokens=20, chunk_unit_size=16)
    driver.add(*(make_request(i, 1, 6) for i in range(5)))
    driver.step()
    driver.add(make_request(5, 40, 2), make_request(6, 3, 2))
    outputs = [driver.step() for _ in range(6)]
    # 15 tokens are left while the five generate: no chunk of 16, and so nothing for the short one behind it.
    assert [_context(output) for output in outputs] == [[]] * 5 + [[(5, 0, 16), (6, 0, 3)]]
    driver.run()


def test_without_chunking_a_context_runs_whole_or_not_at_all() -> None:
    driver = _driver(100, max_num_tokens=20, enable_chunked_context=False)
    driver.add(make_request(0, 12, 2), make_request(1, 12, 2), make_request(2, 2, 2))
    assert _context(driver.step()) == [(0, 0, 12)]
    assert _context(driver.step()) == [(1, 0, 12), (2, 0, 2)]


def test_without_chunking_a_context_longer_than_any_step_is_split_all_the_same() -> None:
    driver = _driver(100, max_num_tokens=20, enable_chunked_context=False)
    driver.add(make_request(0, 30, 2))
    assert [_context(driver.step()) for _ in range(2)] == [[(0, 0, 20)], [(0, 20, 10)]]
    driver.run()


def test_without_chunking_nobody_overtakes_a_split_context_that_waits_for_room() -> None:
    driver = _driver(100, max_num_tokens=20, enable_chunked_context=False)
    driver.add(make_request(0, 1, 8))
    driver.step()
    driver.add(make_request(1, 39, 2), make_request(2, 2, 1))
    # After its first chunk the rest would fit a step, but not beside the generation row.
    assert [_context(driver.step()) for _ in range(9)] == [[(1, 0, 19)]] + [[]] * 6 + [[(1, 19, 20)], [(2, 0, 2)]]
    driver.run()


def test_no_more_requests_run_than_a_step_has_tokens() -> None:
    driver = _driver(100, max_num_tokens=3)
    driver.add(*(make_request(i, 2, 5) for i in range(6)))
    largest = 0
    while driver.requests:
        output = driver.step()
        assert output.num_tokens <= 3
        largest = max(largest, driver.scheduler.num_running)
    assert largest == 3


def test_generation_rows_take_one_token_and_nothing_without_pending_tokens() -> None:
    scheduler, kv = RequestScheduler(_config()), AmpleKv()
    request = make_request(0, 4, 4)
    scheduler.add(request)
    scheduler.schedule(kv)
    request.advance(4)
    assert scheduler.schedule(kv).batch_size == 0, "its token is neither known nor promised"
    request.promise()
    (row,) = scheduler.schedule(kv).generation
    assert row == (request, 4, 1, True, 0)


def test_an_empty_scheduler_plans_empty_steps() -> None:
    scheduler = RequestScheduler(_config())
    outputs = [scheduler.schedule(AmpleKv()) for _ in range(2)]
    assert [(output.step, output.batch_size, output.num_tokens, output.paused) for output in outputs] == [
        (0, 0, 0, ()),
        (1, 0, 0, ()),
    ]


def test_removal_wherever_a_request_is() -> None:
    scheduler, kv = RequestScheduler(_config(max_batch_size=1)), AmpleKv()
    first, second, stranger = (make_request(i, 4) for i in range(3))
    scheduler.add(first)
    scheduler.add(second)
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 0)
    scheduler.schedule(kv)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.running) == (1, 1, (first,))
    for request in (second, second, stranger, first):
        scheduler.remove(request)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


# GuaranteedNoEvict.


def test_guaranteed_no_evict_admits_only_what_can_run_to_its_end() -> None:
    driver = _driver(10)
    # To completion: 16 + 9 - 1 = 24 tokens, 6 blocks; 4 blocks; 1 block.
    driver.add(make_request(0, 16, 9), make_request(1, 8, 9), make_request(2, 1, 1))
    assert _context(driver.step()) == [(0, 0, 16), (1, 0, 8)]
    assert driver.kv.num_free_blocks == 4, "room enough for the third, but it is promised"
    while 2 in driver.requests:
        assert driver.step().paused == ()
    assert [s.step for s in driver.steps if any(c[0] == 2 for c in _context(s))] == [9]


def test_guaranteed_no_evict_does_not_let_others_overtake() -> None:
    driver = _driver(10)
    driver.add(make_request(0, 16, 9), make_request(1, 30, 2), make_request(2, 4, 1))
    assert _context(driver.step()) == [(0, 0, 16)]
    driver.run()
    assert [c[0] for s in driver.steps for c in _context(s)] == [0, 1, 2]


def test_guaranteed_no_evict_counts_shared_blocks_once() -> None:
    driver = _driver(10, reuse=True)
    prefix = list(range(16))
    driver.add(make_request(0, [*prefix, 90], 8))  # 6 blocks to its end
    driver.step()
    driver.add(make_request(1, [*prefix, 91], 16))  # 8 blocks to its end, 4 of them shared
    assert _context(driver.step()) == [(1, 16, 1)]
    driver.run()


def test_guaranteed_no_evict_counts_matched_free_blocks_as_taken() -> None:
    driver = _driver(10, reuse=True)
    prefix = list(range(16))
    driver.add(make_request(0, [*prefix, 90], 1))
    driver.run()
    driver.add(make_request(1, 20, 5), make_request(2, [*prefix, 91], 5))  # 6 blocks and 6, of 10
    output = driver.step()
    assert _context(output) == [(1, 0, 20)]
    driver.run()


# StaticBatch.


def test_static_batch_admits_nobody_while_anything_runs() -> None:
    driver = _driver(100, capacity_policy="static_batch")
    driver.add(make_request(0, 8, 2), make_request(1, 8, 5))
    assert _context(driver.step()) == [(0, 0, 8), (1, 0, 8)]
    driver.add(make_request(2, 8, 2), make_request(3, 8, 2))
    # Request 0 is done after the second step; the others wait for request 1 all the same.
    assert [_context(driver.step()) for _ in range(4)] == [[]] * 4
    assert _context(driver.step()) == [(2, 0, 8), (3, 0, 8)]
    driver.run()


def test_static_batch_admits_only_what_can_run_to_its_end() -> None:
    driver = _driver(10, capacity_policy="static_batch")
    driver.add(make_request(0, 16, 9), make_request(1, 8, 9), make_request(2, 1, 1))  # 6, 4 and 1 blocks
    assert _context(driver.step()) == [(0, 0, 16), (1, 0, 8)]
    driver.run()
    assert driver.num_paused == 0
    assert [output.step for output in driver.steps if any(c[0] == 2 for c in _context(output))] == [9]


def test_static_batch_goes_on_when_a_batch_is_cancelled() -> None:
    driver = _driver(10, capacity_policy="static_batch")
    first, second = make_request(0, 8, 9), make_request(1, 8, 2)
    driver.add(first)
    driver.step()
    driver.add(second)
    assert _context(driver.step()) == []
    driver.cancel(first)
    assert _context(driver.step()) == [(1, 0, 8)]
    driver.run()


# MaxUtilization.


def test_max_utilization_pauses_the_latest_and_takes_it_back_first() -> None:
    driver = _driver(6, capacity_policy="max_utilization")
    driver.add(make_request(0, 8, 12, arrival_time=0.0), make_request(1, 8, 9, arrival_time=1.0))
    driver.step()
    driver.add(make_request(2, 4, 1, arrival_time=2.0))
    steps = [driver.step() for _ in range(16)]
    pauses = [(output.step, _ids(output.paused)) for output in steps if output.paused]
    # Blocks run out when both need their fourth: 12 tokens are full after the context and 4 generation rows.
    assert pauses == [(5, [1])]
    paused_step = driver.steps[5]
    assert [row.request.request_id for row in paused_step.rows] == [0]
    assert all(row.request.request_id != 1 for row in paused_step.rows), "not readmitted in the same step"
    first_rows = [c[0] for output in driver.steps[6:] for c in _context(output)]
    assert first_rows[0] == 1, "the paused request comes before the one that waited"
    driver.run()


def test_max_utilization_never_pauses_the_oldest_even_if_it_ran_last() -> None:
    driver = _driver(6, capacity_policy="max_utilization", waiting_queue_policy="shortest_first")
    oldest = make_request(7, 11, 12, arrival_time=0.0)
    driver.add(make_request(8, 8, 12, arrival_time=0.001), oldest)
    output = driver.step()
    assert [c[0] for c in _context(output)] == [8, 7]
    driver.run()
    assert driver.num_paused and all(oldest not in output.paused for output in driver.steps)


def test_max_utilization_step_that_pauses_admits_nobody() -> None:
    driver = _driver(6, capacity_policy="max_utilization")
    driver.add(*(make_request(i, 8, 12, arrival_time=float(i)) for i in range(4)))
    while driver.requests:
        running = set(_ids(driver.scheduler.running))
        output = driver.step()
        if output.paused:
            assert {row.request.request_id for row in output.rows} <= running - set(_ids(output.paused))
    assert driver.num_paused > 0


class _ScriptedKv(AmpleKv):
    """One free block, and the paused request waits for a block, so that only a newcomer could use it."""

    tokens_per_block = 4
    num_free_blocks = 1

    def __init__(self, held: dict[int, int]) -> None:
        super().__init__()
        self.held = held

    def num_blocks_of(self, request_id: int) -> int:
        return self.held.get(request_id, 0)

    def match_prefix(self, request: LlmRequest, claimed: Set[bytes] = frozenset()) -> PrefixMatch:
        return PrefixMatch(0, 0, request.request_id in self.held)


def test_max_utilization_leaves_free_blocks_alone_in_a_step_that_pauses() -> None:
    scheduler = RequestScheduler(_config(max_num_tokens=9, capacity_policy="max_utilization"))
    ample = AmpleKv()
    old, young = make_request(0, 1, 9, arrival_time=0.0), make_request(1, 20, 9, arrival_time=1.0)
    scheduler.add(old)
    scheduler.add(young)
    for row in scheduler.schedule(ample).rows:
        row.request.advance(row.num_tokens)
    old.promise()
    scheduler.add(make_request(2, 4, 1, arrival_time=2.0))
    output = scheduler.schedule(_ScriptedKv({0: 1, 1: 2}))
    assert (_ids(output.paused), _context(output), len(output.generation)) == ([1], [], 1)
    assert [c[0] for c in _context(scheduler.schedule(_ScriptedKv({0: 1, 1: 0})))] == [2]


def test_max_utilization_gives_the_tokens_of_the_paused_to_the_others() -> None:
    driver = _driver(4, capacity_policy="max_utilization", max_num_tokens=8)
    driver.add(make_request(1, 4, 5, arrival_time=1.0))
    driver.step()
    driver.add(make_request(0, 15, 2, arrival_time=0.0))
    assert _context(driver.step()) == [(0, 0, 7)]
    output = driver.step()
    assert (_ids(output.paused), _context(output), output.generation) == ([1], [(0, 7, 8)], ())
    driver.run()


def test_max_utilization_pauses_no_more_than_it_must() -> None:
    driver = _driver(9, capacity_policy="max_utilization")
    driver.add(*(make_request(i, 11, 6, arrival_time=float(i)) for i in range(3)))
    assert [_ids(driver.step().paused) for _ in range(3)] == [[], [], [2]]
    driver.run()


def test_victims_that_share_blocks_with_each_other_only_still_make_room() -> None:
    driver = _driver(11, reuse=True, capacity_policy="max_utilization", max_num_tokens=20)
    shared = list(range(500, 516))
    driver.add(make_request(1, [*shared, 1], 6, arrival_time=1.0))
    driver.step()
    driver.add(make_request(2, [*shared, 2], 6, arrival_time=2.0))
    driver.step()
    driver.add(make_request(0, 36, 1, arrival_time=0.0))
    assert _context(driver.step()) == [(0, 0, 18)]
    assert driver.kv.num_free_blocks == 0
    # It needs 4 blocks. The others alone hold one each, and four that they share.
    output = driver.step()
    assert (_ids(output.paused), _context(output)) == ([2, 1], [(0, 18, 18)])
    driver.run()


def test_depth_two_stands_still_rather_than_pause_all_for_a_request_that_is_about_to_end() -> None:
    driver = _driver(3, depth=2, capacity_policy="max_utilization")
    driver.add(make_request(0, 7, 2, arrival_time=0.0), make_request(1, 3, 6, arrival_time=1.0))
    driver.run()
    assert any(output.batch_size == 0 for output in driver.steps)
    assert driver.num_paused == 0


# Pending prefixes.


class _PendingKv(AmpleKv):
    """Says that the given requests wait for a block that another is computing."""

    def __init__(self, pending: set[int]) -> None:
        super().__init__()
        self.pending = pending

    def match_prefix(self, request: LlmRequest, claimed: Set[bytes] = frozenset()) -> PrefixMatch:
        super().match_prefix(request)
        return PrefixMatch(0, 0, request.request_id in self.pending)


def test_a_request_that_waits_for_a_block_is_passed_over() -> None:
    kv = _PendingKv({0, 2})
    scheduler = RequestScheduler(_config())
    for i in range(4):
        scheduler.add(make_request(i, 4))
    assert [c[0] for c in _context(scheduler.schedule(kv))] == [1, 3]
    assert [request.request_id for request in scheduler.running] == [1, 3]
    kv.pending.clear()
    assert [c[0] for c in _context(scheduler.schedule(kv))] == [1, 3, 0, 2]


def test_at_most_max_batch_size_requests_are_passed_over() -> None:
    kv = _PendingKv(set(range(100)))
    scheduler = RequestScheduler(_config())
    for i in range(101):
        scheduler.add(make_request(i, 4))
    assert scheduler.schedule(kv).batch_size == 0
    assert kv.num_matches == 8
