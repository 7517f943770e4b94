"""Waiting queues: order, laziness, removal, ageing."""

import itertools
import random
from typing import Any

import pytest

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.request import LlmRequest
from backend_engine.plugins.catalog import WAITING_QUEUES
from backend_engine.scheduler.request_scheduler import RequestScheduler
from backend_engine.scheduler.waiting_queue import FcfsQueue, ShortestFirstQueue, WaitingQueue
from tests.support.scheduling_driver import AmpleKv, make_request


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
    queue = ShortestFirstQueue(ageing_tokens_per_second=0.0)
    for request_id, num_tokens in [(5, 9), (1, 9), (2, 3), (9, 1), (3, 9)]:
        queue.add(make_request(request_id, num_tokens))
    assert _ids(queue) == [9, 2, 1, 3, 5]


def test_ageing_orders_like_the_effective_length_at_any_time() -> None:
    requests = _shuffled(60, 2)
    queue = ShortestFirstQueue(ageing_tokens_per_second=40.0)
    for request in requests:
        queue.add(request)
    for now in (10.0, 500.0):
        effective = sorted(requests, key=lambda r: (r.num_tokens - 40.0 * (now - r.arrival_time), r.request_id))
        assert _ids(queue) == [request.request_id for request in effective]
    assert ShortestFirstQueue()._ageing == 100.0


def test_a_long_request_is_overtaken_for_a_bounded_time_only() -> None:
    queue = ShortestFirstQueue(ageing_tokens_per_second=100.0)
    queue.add(make_request(0, 1000, arrival_time=0.0))
    for i in range(1, 40):
        queue.add(make_request(i, 10, arrival_time=i * 0.5))
    # Those who arrive later than (1000 - 10) / 100 s stand behind it.
    assert _ids(queue).index(0) == sum(i * 0.5 < 9.9 for i in range(1, 40)) == 19


@pytest.mark.parametrize("name", ["fcfs", "shortest_first"])
def test_random_operations_against_a_plain_list(name: str) -> None:
    rng = random.Random(name)
    queue: WaitingQueue = WAITING_QUEUES.get(name)()
    waiting: list[LlmRequest] = []
    paused: list[LlmRequest] = []
    ids = itertools.count()
    for _ in range(1500):
        choice = rng.random()
        if choice < 0.45:
            request = make_request(next(ids), rng.randint(1, 300), arrival_time=rng.uniform(0, 3))
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
            if rng.random() < 0.3:
                waiting.append(request)
                queue.add(request)
        if name == "shortest_first":
            waiting.sort(key=lambda r: (r.num_tokens + 100.0 * r.arrival_time, r.request_id))
        paused.sort(key=lambda r: (r.arrival_time, r.request_id))
        expected = [request.request_id for request in paused + waiting]
        assert len(queue) == len(expected)
        num_seen = rng.choice([0, 1, 3, len(expected)])
        assert [r.request_id for r in itertools.islice(queue, num_seen)] == expected[:num_seen]
    assert _ids(queue) == expected


def test_cancelled_requests_do_not_pile_up_in_the_heap() -> None:
    queue = ShortestFirstQueue()
    for i in range(2000):
        request = make_request(i, 10)
        queue.add(request)
        queue.remove(request)
    assert len(queue) == 0 and len(queue._heap) <= 64 and not queue._next


@pytest.mark.parametrize("queue", [FcfsQueue(), ShortestFirstQueue()])
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


@pytest.mark.parametrize("policy", ["fcfs", "shortest_first"])
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
