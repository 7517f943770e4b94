"""How contexts share a step's tokens: equal shares against a plain loop, and ``equal_progress`` in the scheduler."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.batch import SchedulerOutput
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.context_chunking import equal_shares
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.scheduling_driver import Driver, make_request


def _driver(num_blocks: int = 100, *, reuse: bool = False, **changes: object) -> Driver:
    """Four tokens a block."""
    config = SchedulerConfig(
        **{"max_batch_size": 8, "max_num_tokens": 12, "context_chunking_policy": "equal_progress", **changes}
    )
    return Driver(RequestScheduler(config), KVCacheManager(num_blocks, 4, 64, 8, reuse))


def _context(output: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(row.request.request_id, row.start, row.num_tokens) for row in output.context]


def _dealt_one_by_one(num_pending: list[int], costs: list[int], budget: int, unit: int) -> list[int]:
    sizes = [0] * len(num_pending)
    left = budget
    while sizes != num_pending:
        for i, num in enumerate(num_pending):
            increment = min(unit, num - sizes[i])
            if increment * costs[i] > left:
                return sizes
            sizes[i] += increment
            left -= increment * costs[i]
    return sizes


# Of each: tokens to compute, and what one of them costs.
WANTED = st.tuples(st.integers(1, 40), st.integers(1, 12))
EVEN = WANTED.map(lambda wanted: (wanted[0], 1))
ALL_WANTED = st.lists(WANTED, min_size=1, max_size=6) | st.lists(EVEN, min_size=1, max_size=6)
Wanted = list[tuple[int, int]]


def _shares(wanted: Wanted, budget: int, unit: int) -> list[int]:
    return equal_shares([num for num, _ in wanted], [cost for _, cost in wanted], budget, unit)


@settings(max_examples=300, deadline=None)
@given(wanted=ALL_WANTED, budget=st.integers(0, 90) | st.integers(0, 900), unit=st.integers(1, 9))
def test_equal_shares_are_what_dealing_one_unit_after_another_gives(wanted: Wanted, budget: int, unit: int) -> None:
    num_pending, costs = ([pair[i] for pair in wanted] for i in range(2))
    assert _shares(wanted, budget, unit) == _dealt_one_by_one(num_pending, costs, budget, unit)


@settings(max_examples=300, deadline=None)
@given(
    wanted=ALL_WANTED,
    newcomer=WANTED,
    budget=st.integers(0, 90) | st.integers(0, 900),
    unit=st.integers(1, 9),
)
def test_a_newcomer_makes_no_share_larger(wanted: Wanted, newcomer: tuple[int, int], budget: int, unit: int) -> None:
    """Or a row could need more blocks than were counted for it before the newcomer joined."""
    before = _shares(wanted, budget, unit)
    after = _shares([*wanted, newcomer], budget, unit)
    assert all(new <= old for new, old in zip(after, before, strict=False))


def test_contexts_progress_equally_and_the_short_one_leaves_its_share_to_the_others() -> None:
    driver = _driver()
    driver.add(make_request(0, 20, 1), make_request(1, 2, 1), make_request(2, 20, 1))
    assert _context(driver.step()) == [(0, 0, 5), (1, 0, 2), (2, 0, 5)]
    assert _context(driver.step()) == [(0, 5, 6), (2, 5, 6)]
    driver.run()


def test_a_newcomer_takes_from_the_shares_of_running_contexts() -> None:
    driver = _driver()
    driver.add(make_request(0, 30, 1))
    assert _context(driver.step()) == [(0, 0, 12)]
    driver.add(make_request(1, 30, 1))
    assert _context(driver.step()) == [(0, 12, 6), (1, 0, 6)]
    driver.run()


def test_first_come_first_served_gives_the_first_all_it_can_use() -> None:
    driver = _driver(context_chunking_policy="first_come_first_served")
    driver.add(make_request(0, 20, 1), make_request(1, 20, 1))
    assert [_context(driver.step()) for _ in range(3)] == [[(0, 0, 12)], [(0, 12, 8), (1, 0, 4)], [(1, 4, 12)]]
    driver.run()


def test_shares_are_multiples_of_the_unit_but_for_the_last_and_rows_are_never_empty() -> None:
    driver = _driver(max_num_tokens=20, chunk_unit_size=8)
    driver.add(make_request(0, 30, 1), make_request(1, 21, 1), make_request(2, 30, 1))
    assert _context(driver.step()) == [(0, 0, 8), (1, 0, 8)], "no unit left for the third, which is not admitted"
    assert driver.scheduler.num_running == 2
    assert _context(driver.step()) == [(0, 8, 8), (1, 8, 8)]
    assert _context(driver.step()) == [(0, 16, 14), (1, 16, 5)], "the rest of the first is less than another unit"
    assert _context(driver.step()) == [(2, 0, 16)]
    driver.run()


def test_generation_rows_come_first_and_a_running_context_without_a_share_is_not_overtaken() -> None:
    driver = _driver(max_num_tokens=10, chunk_unit_size=5)
    driver.add(make_request(0, 1, 4), make_request(1, 30, 1))
    assert _context(driver.step()) == [(0, 0, 1), (1, 0, 5)]
    driver.add(make_request(2, 1, 3))
    output = driver.step()
    assert (_context(output), len(output.generation)) == ([(1, 5, 5), (2, 0, 1)], 1)
    driver.add(make_request(3, 30, 1), make_request(4, 1, 1))
    output = driver.step()
    # Two generate, 8 tokens are left: a unit for the running context, and none for the next, whom nobody overtakes.
    assert (_context(output), len(output.generation)) == ([(1, 10, 5)], 2)
    driver.run()


def test_without_chunking_contexts_run_whole_as_ever() -> None:
    driver = _driver(enable_chunked_context=False)
    driver.add(make_request(0, 8, 1), make_request(1, 8, 1), make_request(2, 4, 1))
    assert [_context(driver.step()) for _ in range(2)] == [[(0, 0, 8)], [(1, 0, 8), (2, 0, 4)]]


def test_reused_tokens_are_no_part_of_a_share() -> None:
    driver = _driver(reuse=True)
    prefix = list(range(8))
    driver.add(make_request(0, [*prefix, 1], 1))
    driver.run()
    driver.add(make_request(1, [*prefix, *range(100, 120)], 1), make_request(2, 20, 1))
    output = driver.step()
    assert _context(output) == [(1, 8, 6), (2, 0, 6)]
    assert [row.num_reused_tokens for row in output.context] == [8, 0]
    driver.run()


@pytest.mark.parametrize("unit", [1, 3])
def test_max_utilization_finds_its_blocks_whatever_the_shares_become(unit: int) -> None:
    driver = _driver(9, capacity_policy="max_utilization", chunk_unit_size=unit)
    driver.add(*(make_request(i, 10 + i, 8, arrival_time=float(i)) for i in range(12)))
    driver.run()
    assert driver.num_paused > 0
