"""Tokens that cost more the more text comes before them: chunks beside generation rows take about equally long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.batch import ScheduledRequest
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.micro_batch_scheduler import MicroBatch, MicroBatchScheduler
from backend_engine.scheduler.request_scheduler import RequestScheduler
from backend_engine.scheduler.token_cost import EVEN_COST, MAX_TOKEN_WEIGHT, TokenCost
from tests.support.scheduling_driver import Driver, make_request

POLICIES = ["first_come_first_served", "equal_progress"]
BUDGET = 101
Chunks = list[tuple[int, int, int]]


def _config(**changes: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_batch_size": 8, "max_num_tokens": BUDGET, "context_cost_tokens": 400, **changes})


def _driver(*, reuse: bool = False, **changes: object) -> Driver:
    return Driver(RequestScheduler(_config(**changes)), KVCacheManager(4000, 4, 1000, 8, reuse))


def _beside_one_that_generates(driver: Driver) -> Driver:
    driver.add(make_request(99, 1, 300))
    driver.step()
    return driver


def _in_context(request_id: int, start: int, length: int) -> LlmRequest:
    request = make_request(request_id, length, 1)
    if start:
        request.advance(start)
    return request


def _generating(num: int) -> list[LlmRequest]:
    requests = [make_request(90 + i, 1, 300) for i in range(num)]
    for request in requests:
        request.advance(1)
        request.promise()
    return requests


def _chunks(rows: list[ScheduledRequest]) -> Chunks:
    return [(row.request.request_id, row.start, row.num_tokens) for row in rows]


def _plan(*contexts: LlmRequest, num_generating: int = 1, **changes: object) -> Chunks:
    batch = MicroBatchScheduler(_config(**changes)).plan_running([*_generating(num_generating), *contexts])
    assert len(batch.generation) == num_generating
    assert sum(row.num_tokens for row in batch.rows) <= BUDGET
    return _chunks(batch.context)


def _weight(start: int, context_cost_tokens: int = 400) -> float:
    return min(1 + start / context_cost_tokens, MAX_TOKEN_WEIGHT)


def test_costs_are_whole_parts_of_a_token() -> None:
    cost = TokenCost.of(400)
    assert [cost.at(start) / cost.base for start in (0, 100, 400, 1200, 1201, 10**7)] == [1, 1.25, 2, 4, 4, 4]
    assert TokenCost.of(0) == EVEN_COST
    assert [EVEN_COST.at(start) for start in (0, 10**7)] == [1, 1]
    vast = TokenCost.of(10**15)
    assert vast.at(10**7) < 1.01 * vast.base and vast.most <= 2**32, "as if position cost nothing, in 64 bits"


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_shrink_with_their_position_so_that_all_cost_the_same(policy: str) -> None:
    driver = _beside_one_that_generates(_driver(context_chunking_policy=policy))
    driver.add(make_request(1, 2500, 1))
    chunks: list[ScheduledRequest] = []
    while sum(row.num_tokens for row in chunks) < 2500:
        output = driver.step()
        assert output.num_tokens <= BUDGET and len(output.generation) == 1
        chunks += output.context
    sizes = [row.num_tokens for row in chunks]
    assert sizes == sorted(sizes, reverse=True) and (sizes[0], sizes[-2]) == (100, 25)
    for row in chunks[:-1]:
        weight = _weight(row.start)
        assert 100 - weight < row.num_tokens * weight <= 100, row


@pytest.mark.parametrize("policy", POLICIES)
def test_contexts_alone_are_not_made_smaller(policy: str) -> None:
    driver = _driver(context_chunking_policy=policy)
    driver.add(make_request(1, 2500, 1))
    assert {row.num_tokens for _ in range(24) for row in driver.step().context} == {BUDGET}


def test_prompts_that_are_not_split_stay_as_they_are() -> None:
    driver = _beside_one_that_generates(_driver(enable_chunked_context=False, max_num_tokens=2500))
    driver.add(make_request(1, 2499, 1))
    assert _chunks(list(driver.step().context)) == [(1, 0, 2499)]
    assert _plan(_in_context(1, 1300, 1390), enable_chunked_context=False) == [(1, 1300, 90)]


@pytest.mark.parametrize("num_generating", [0, 1, 7])
@pytest.mark.parametrize("policy", POLICIES)
def test_where_position_costs_nothing_chunks_are_the_plain_ones(policy: str, num_generating: int) -> None:
    left = BUDGET - num_generating
    expected = {
        "first_come_first_served": [(1, 2000, 10), (2, 1000, left - 10)],
        "equal_progress": [(1, 2000, 10), (2, 1000, (left - 9) // 2), (3, 0, (left - 10) // 2)],
    }
    for tokens in (None, 0, 10**15):
        contexts = (_in_context(1, 2000, 2010), _in_context(2, 1000, 3000), _in_context(3, 0, 3000))
        found = _plan(
            *contexts, num_generating=num_generating, context_chunking_policy=policy, context_cost_tokens=tokens
        )
        if tokens != 10**15:
            assert found == expected[policy], tokens
        assert [size for *_, size in found] == pytest.approx([size for *_, size in expected[policy]], abs=1)


def test_several_contexts_share_what_their_tokens_cost() -> None:
    """At 400 a token counts for two, at 0 for one; 100 are left beside the one that generates."""
    short, late, early = (1, 400, 405), (2, 400, 1000), (3, 0, 1000)
    for policy, contexts, expected in (
        ("first_come_first_served", (late, early), [(2, 400, 50)]),
        ("first_come_first_served", (early, late), [(3, 0, 100)]),
        ("first_come_first_served", (short, late, early), [(1, 400, 5), (2, 400, 45)]),
        ("equal_progress", (late, early), [(2, 400, 33), (3, 0, 33)]),
        ("equal_progress", (early, late), [(3, 0, 34), (2, 400, 33)]),
        ("equal_progress", (short, late, early), [(1, 400, 5), (2, 400, 30), (3, 0, 30)]),
    ):
        found = _plan(*(_in_context(*context) for context in contexts), context_chunking_policy=policy)
        assert found == expected, (policy, contexts)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_are_whole_units_and_the_first_gets_one_however_late_it_is(policy: str) -> None:
    changes = {"context_chunking_policy": policy}
    late = 100_000
    assert _plan(_in_context(1, late, 2 * late), chunk_unit_size=8, **changes) == [(1, late, 24)]
    # A unit costs more than the budget: the first has it, nobody else has anything.
    others = (_in_context(2, 0, 50), _in_context(3, late, 2 * late))
    assert _plan(_in_context(1, late, 2 * late), *others, chunk_unit_size=60, **changes) == [(1, late, 60)]
    assert _plan(_in_context(1, late, late + 40), *others, chunk_unit_size=60, **changes) == [(1, late, 40)]
    assert _plan(_in_context(1, late, 2 * late), num_generating=100, **changes) == [(1, late, 1)]
    # No more than the plain budget allows.
    assert _plan(_in_context(1, late, 2 * late), num_generating=60, chunk_unit_size=60, **changes) == []
    assert _plan(_in_context(1, late, 2 * late), num_generating=101, **changes) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_whose_beginning_is_reused_begins_at_the_cost_of_its_position(policy: str) -> None:
    driver = _driver(reuse=True, context_chunking_policy=policy)
    prefix = list(range(1200))
    driver.add(make_request(0, [*prefix, 1], 1))
    driver.run()
    _beside_one_that_generates(driver)
    driver.add(make_request(1, [*prefix, *range(5000, 5100)], 1))
    output = driver.step()
    assert _chunks(list(output.context)) == [(1, 1200, 25)]
    assert output.context[0].num_reused_tokens == 1200
    driver.run()


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    tokens=st.integers(1, 3000),
    unit=st.sampled_from([1, 3, 40]),
    num_generating=st.integers(1, BUDGET),
    places=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 200)), max_size=6),
    num_running=st.integers(0, 6),
)
def test_whatever_joins_the_step_stays_within_its_budget_and_nobody_gets_more_than_was_counted_for_it(
    policy: str, tokens: int, unit: int, num_generating: int, places: list[tuple[int, int]], num_running: int
) -> None:
    scheduler = MicroBatchScheduler(
        _config(context_chunking_policy=policy, context_cost_tokens=tokens, chunk_unit_size=unit)
    )
    contexts = [_in_context(i, start, start + num) for i, (start, num) in enumerate(places)]
    running, waiting = contexts[:num_running], contexts[num_running:]
    batch: MicroBatch = scheduler.plan_running([*_generating(num_generating), *running])
    most = {row.request.request_id: row.num_tokens for row in batch.context}
    for request in waiting:
        if batch.is_full or batch.is_blocked:
            break
        most[request.request_id] = scheduler.next_chunk(batch, request, request.num_computed_tokens)
        if not scheduler.add_context(batch, request, request.num_computed_tokens):
            break
    scheduler.share_out(batch)
    rows = batch.context
    assert all(0 < row.num_tokens <= most[row.request.request_id] for row in rows)
    assert all(row.num_tokens % unit == 0 or row.needs_logits for row in rows)
    assert all(row.needs_logits == (row.start + row.num_tokens == row.request.num_tokens) for row in rows)
    left = BUDGET - num_generating
    assert sum(row.num_tokens for row in rows) <= left
    if sum(row.num_tokens * TokenCost.of(tokens).at(row.start) for row in rows) > left * tokens:
        assert len(rows) == 1 and rows[0].num_tokens <= unit, "only the first may cost more, and only one unit"
    if contexts and left >= min(unit, places[0][1]):
        assert rows and rows[0].request is contexts[0]
