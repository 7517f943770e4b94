"""Waiting queues: order, laziness, removal, ageing."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.request import LlmRequest
from backend_engine.plugins.catalog import WAITING_QUEUES
from backend_engine.scheduler.keyed_queue import (
    SECONDS_PER_PRIORITY_LEVEL,
    KeyedQueue,
    priority_queue,
    shortest_first_queue,
)
from backend_engine.scheduler.request_scheduler import RequestScheduler
from backend_engine.scheduler.waiting_queue import FcfsQueue, WaitingQueue
from tests.support.scheduling_driver import AmpleKv, Driver, make_request


def _ids(queue: WaitingQueue) -> list[int]:
    return [request.request_id for request in queue]


def _shuffled(num: int, seed: int) -> list[LlmRequest]:
    requests = [make_request(i, 1 + (i * 37) % 50, arrival_time=i * 0.1) for i in range(num)]
    random.Random(seed).shuffle(requests)
    return requests


def test_fcfs_keeps_the_order_of_arrival() -> None:
    queue = FcfsQueue()
    requests = _shuffled(20, 1)
    for request in requests:
        queue.add(request)
    assert _ids(queue) == [request.request_id for request in requests]


def test_shortest_first_orders_by_tokens_then_id() -> None:
    queue = shortest_first_queue(ageing_tokens_per_second=0.0)
    for request_id, num_tokens in [(5, 9), (1, 9), (2, 3), (9, 1), (3, 9)]:
        queue.add(make_request(request_id, num_tokens))
    assert _ids(queue) == [9, 2, 1, 3, 5]


def test_ageing_orders_like_the_effective_length_at_any_time() -> None:
    requests = _shuffled(60, 2)
    queue = shortest_first_queue(ageing_tokens_per_second=40.0)
    for request in requests:
        queue.add(request)
    for now in (10.0, 500.0):
        effective = sorted(requests, key=lambda r: (r.num_tokens - 40.0 * (now - r.arrival_time), r.request_id))
        assert _ids(queue) == [request.request_id for request in effective]


def test_a_long_request_is_overtaken_for_a_bounded_time_only() -> None:
    queue = shortest_first_queue(ageing_tokens_per_second=100.0)
    queue.add(make_request(0, 1000, arrival_time=0.0))
    for i in range(1, 40):
        queue.add(make_request(i, 10, arrival_time=i * 0.5))
    # Those who arrive later than (1000 - 10) / 100 s stand behind it.
    assert _ids(queue).index(0) == sum(i * 0.5 < 9.9 for i in range(1, 40)) == 19


def test_priority_orders_by_level_and_by_the_order_of_adding_within_one() -> None:
    queue = priority_queue()
    for request_id, priority in [(9, 50), (4, 50), (7, 1), (2, 100), (3, 1), (1, 50)]:
        queue.add(make_request(request_id, 3, priority=priority))
    assert _ids(queue) == [7, 3, 9, 4, 1, 2]


def test_equal_priorities_are_exactly_first_come_first_served() -> None:
    """Whatever the arrival times say: two threads may hand their requests over a moment out of order."""
    rng = random.Random(11)
    fcfs, queue = FcfsQueue(), priority_queue()
    for request in _shuffled(200, 4):
        fcfs.add(request)
        queue.add(request)
        if rng.random() < 0.3:
            victim = rng.choice(list(fcfs))
            assert fcfs.remove(victim) and queue.remove(victim)
            if rng.random() < 0.5:
                fcfs.add_front(victim)
                queue.add_front(victim)
        assert _ids(queue) == _ids(fcfs)


def test_each_level_of_priority_is_worth_some_seconds_of_waiting() -> None:
    queue = priority_queue()
    queue.add(make_request(0, 3, arrival_time=0.0, priority=54))
    for i in range(1, 60):
        queue.add(make_request(i, 3, arrival_time=i * 0.5, priority=50))
    # Four levels more urgent: overtaken by those who arrive within 4 x 5 s, and by nobody later.
    assert SECONDS_PER_PRIORITY_LEVEL == 5.0
    assert _ids(queue).index(0) == sum(i * 0.5 < 20.0 for i in range(1, 60)) == 39


def test_a_request_of_the_lowest_priority_runs_under_a_stream_of_urgent_ones() -> None:
    config = SchedulerConfig(max_batch_size=1, max_num_tokens=8)
    assert config.waiting_queue_policy == "priority"
    driver = Driver(RequestScheduler(config), AmpleKv())
    last = make_request(0, 2, 1, arrival_time=0.0, priority=100)
    driver.add(last)
    for i in range(1, 1000):
        driver.add(make_request(i, 2, 1, arrival_time=float(i), priority=1))
        driver.step()
        if last.is_finished:
            break
    assert i == 99 * 5, "99 levels of 5 s, one urgent request a second"


@pytest.mark.parametrize("name", ["fcfs", "priority", "shortest_first"])
def test_random_operations_against_a_plain_list(name: str) -> None:
    rng = random.Random(name)
    queue: WaitingQueue = WAITING_QUEUES.get(name)()
    waiting: list[LlmRequest] = []
    paused: list[LlmRequest] = []
    ids = itertools.count()
    now = 0.0
    for _ in range(1500):
        choice = rng.random()
        if choice < 0.45:
            now += rng.choice([0.0, 0.1, 3.0])
            arrival = now if name == "priority" else rng.uniform(0, 3)
            request = make_request(
                next(ids), rng.randint(1, 300), arrival_time=arrival, priority=rng.choice([1, 2, 50, 51, 100])
            )
            waiting.append(request)
            queue.add(request)
        elif choice < 0.8 and waiting:
            request = rng.choice(waiting[:4] if rng.random() < 0.5 else waiting)
            waiting.remove(request)
            assert queue.remove(request)
            assert not queue.remove(request)
            if rng.random() < 0.3:
                paused.append(request)
                queue.add_front(request)
        elif choice < 0.9 and paused:
            request = paused.pop(rng.randrange(len(paused)))
            assert queue.remove(request)
            if rng.random() < 0.3 and name != "priority":  # which gives a new arrival its place in time
                waiting.append(request)
                queue.add(request)
        if name == "shortest_first":
            waiting.sort(key=lambda r: (r.num_tokens + 100.0 * r.arrival_time, r.request_id))
        elif name == "priority":
            waiting.sort(key=lambda r: 5.0 * r.priority + r.arrival_time)
        paused.sort(key=lambda r: (r.arrival_time, r.request_id))
        expected = [request.request_id for request in paused + waiting]
        assert len(queue) == len(expected)
        num_seen = rng.choice([0, 1, 3, len(expected)])
        assert [r.request_id for r in itertools.islice(queue, num_seen)] == expected[:num_seen]
    assert _ids(queue) == expected


@pytest.mark.parametrize("create", [priority_queue, shortest_first_queue])
def test_cancelled_requests_do_not_pile_up_in_the_heap(create: Callable[[], KeyedQueue]) -> None:
    queue = create()
    for i in range(2000):
        request = make_request(i, 10)
        queue.add(request)
        queue.remove(request)
    assert len(queue) == 0 and len(queue._heap) <= 64 and not queue._next


@pytest.mark.parametrize("queue", [FcfsQueue(), priority_queue(), shortest_first_queue()])
def test_a_request_waits_once(queue: WaitingQueue) -> None:
    request = make_request(1, 5)
    queue.add(request)
    with pytest.raises(AssertionError, match="request 1 waits twice"):
        queue.add(request)


class _CountingRequest(LlmRequest):
    """Counts every look at any of its fields."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        _CountingRequest.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_first"])
def test_ten_thousand_waiting_requests_add_nothing_to_a_step(policy: str) -> None:
    def looks_per_step(num_waiting: int) -> tuple[int, int]:
        config = SchedulerConfig(max_batch_size=8, max_num_tokens=64, waiting_queue_policy=policy)
        scheduler, kv = RequestScheduler(config), AmpleKv()
        for i in range(num_waiting):
            request = make_request(i, 200)
            scheduler.add(
                _CountingRequest(i, request.prompt_token_ids, request.sampling_params, request.stop, request.sink)
            )
        looks, matches = [], []
        for _ in range(30):
            _CountingRequest.looks, kv.num_matches = 0, 0
            output = scheduler.schedule(kv)
            looks.append(_CountingRequest.looks)
            matches.append(kv.num_matches)
            for row in output.rows:
                row.request.advance(row.num_tokens)
                if row.needs_logits:
                    scheduler.remove(row.request)
        return max(looks), max(matches)

    few, many = looks_per_step(40), looks_per_step(10_000)
    assert many == few
    assert many[0] < 200 and many[1] <= 8
