"""Three requests, worked out by hand: A 1024 tokens in / 64 out, B 8 / 32, C 256 / 128; 512 tokens a step."""

import pytest

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.protocols import KvCapacity
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.scheduling_driver import AmpleKv, Driver, make_request

A, B, C, D = 1, 2, 3, 4

Rows = list[tuple[int, int, int]]


def _kv(kind: str) -> KvCapacity:
    return AmpleKv() if kind == "ample" else KVCacheManager(500, 16, 128, 8)


def _driver(kind: str, policy: str = "fcfs", max_batch_size: int = 8) -> Driver:
    config = SchedulerConfig(max_batch_size=max_batch_size, max_num_tokens=512, waiting_queue_policy=policy)
    driver = Driver(RequestScheduler(config), _kv(kind))
    driver.add(make_request(A, 1024, 64), make_request(B, 8, 32), make_request(C, 256, 128))
    return driver


def _rows(output: SchedulerOutput) -> tuple[Rows, Rows]:
    """(request, start, tokens) of context and generation rows."""
    context = [(row.request.request_id, row.start, row.num_tokens) for row in output.context]
    return context, [(row.request.request_id, row.start, row.num_tokens) for row in output.generation]


def _generation(step: int, first_step: dict[int, int], lengths: dict[int, tuple[int, int]]) -> Rows:
    """The generation rows of a step: whoever had its first token in an earlier step and has tokens left to make."""
    rows = []
    for request_id, first in first_step.items():
        num_in, num_out = lengths[request_id]
        if first < step < first + num_out:
            rows.append((request_id, num_in + step - first - 1, 1))
    return rows


LENGTHS = {A: (1024, 64), B: (8, 32), C: (256, 128)}


@pytest.mark.parametrize("kind", ["ample", "manager"])
def test_first_come_first_served(kind: str) -> None:
    driver = _driver(kind)
    driver.run()
    contexts: dict[int, Rows] = {0: [(A, 0, 512)], 1: [(A, 512, 512)], 2: [(B, 0, 8), (C, 0, 256)]}
    first_step = {A: 1, B: 2, C: 2}
    assert len(driver.steps) == 2 + 128
    for step, output in enumerate(driver.steps):
        assert output.step == step
        assert _rows(output) == (contexts.get(step, []), _generation(step, first_step, LENGTHS)), step
        assert [row.request.request_id for row in output.context if row.needs_logits] == [
            request_id for request_id, first in first_step.items() if first == step
        ]
        assert all(row.needs_logits for row in output.generation)
    assert _rows(driver.steps[2]) == ([(B, 0, 8), (C, 0, 256)], [(A, 1024, 1)])
    assert driver.steps[0].num_tokens == driver.steps[1].num_tokens == 512


@pytest.mark.parametrize("kind", ["ample", "manager"])
def test_shortest_first(kind: str) -> None:
    driver = _driver(kind, "shortest_first")
    driver.run()
    contexts: dict[int, Rows] = {
        0: [(B, 0, 8), (C, 0, 256), (A, 0, 248)],
        1: [(A, 248, 510)],
        2: [(A, 758, 266)],
    }
    first_step = {B: 0, C: 0, A: 2}
    assert len(driver.steps) == 128
    for step, output in enumerate(driver.steps):
        assert _rows(output) == (contexts.get(step, []), _generation(step, first_step, LENGTHS)), step
    assert [output.num_tokens for output in driver.steps[:4]] == [512, 512, 268, 3]
    assert [row.needs_logits for row in driver.steps[0].context] == [True, True, False]


@pytest.mark.parametrize("kind", ["ample", "manager"])
@pytest.mark.parametrize("policy", ["fcfs", "shortest_first"])
def test_generation_is_never_delayed_and_the_budget_is_filled(kind: str, policy: str) -> None:
    driver = _driver(kind, policy)
    generating: set[int] = set()
    while driver.requests:
        waiting = sum(max(0, r.num_context_tokens - r.num_computed_tokens) for r in driver.requests.values())
        alive = generating & driver.requests.keys()
        output = driver.step()
        assert {row.request.request_id for row in output.generation} == alive
        assert output.num_tokens == min(512, waiting + len(alive))
        generating |= {row.request.request_id for row in output.logits_rows}


@pytest.mark.parametrize("kind", ["ample", "manager"])
def test_a_waiting_request_enters_in_the_step_after_a_place_is_free(kind: str) -> None:
    driver = _driver(kind, max_batch_size=3)
    driver.add(make_request(D, 40, 2))
    entered = {}
    ended = {}
    for step in range(200):
        if not driver.requests:
            break
        before = set(driver.requests)
        output = driver.step()
        for row in output.context:
            entered.setdefault(row.request.request_id, step)
        ended.update(dict.fromkeys(before - set(driver.requests), step))
        assert len({row.request.request_id for row in output.rows}) <= 3
    assert entered == {A: 0, B: 2, C: 2, D: 34}
    assert ended == {B: 33, D: 35, A: 64, C: 129}
