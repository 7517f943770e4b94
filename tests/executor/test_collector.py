"""``spare_the_steps``: Python's collector leaves steps alone, whatever waits, and garbage is still found."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import LlmRequest, StopConditions
from backend_engine.executor.collector import LEAST_OBJECTS, OBJECTS_A_REQUEST, spare_the_steps
from backend_engine.executor.py_executor import PyExecutor
from backend_engine.executor.rooms import Rooms
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.fake_rooms import FakeDecoder, FakeModelEngine


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.parametrize(
    ("before", "batch_size", "after"),
    [
        ((700, 10, 10), 8, (LEAST_OBJECTS, 2, 2)),
        ((700, 10, 10), 4096, (4096 * OBJECTS_A_REQUEST, 2, 2)),
        ((50_000, 5, 100), 8, (50_000, 5, 100)),
        ((0, 10, 10), 8, (0, 10, 10)),
    ],
)
def test_it_only_makes_the_collector_look_less_often(
    before: tuple[int, int, int], batch_size: int, after: tuple[int, int, int]
) -> None:
    gc.set_threshold(*before)
    spare_the_steps(batch_size)
    assert gc.get_threshold() == after


def _num_collections_in_steps(num_running: int, num_waiting: int) -> int:
    config = SchedulerConfig(max_batch_size=num_running, max_num_tokens=16 * num_running)
    kv_cache = KVCacheManager(num_running, 64, 1, num_running, True)
    rooms = Rooms(RequestScheduler(config), kv_cache, FakeModelEngine(num_running, 64), FakeDecoder())
    executor = PyExecutor(rooms, max_batch_size=num_running)
    for i in range(num_running + num_waiting):
        request = LlmRequest(i, [i % 900, i // 900 + 1], SamplingParams(), StopConditions(60), lambda output: None)
        executor.enqueue([request])
    executor.step()
    assert executor.stats().num_waiting == num_waiting
    gc.collect()
    before = sum(generation["collections"] for generation in gc.get_stats())
    for _ in range(20):
        executor.step()
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_no_step_of_a_large_batch_is_interrupted_whatever_waits() -> None:
    assert _num_collections_in_steps(400, 0) > 10, "what the collector does of itself"
    spare_the_steps(400)
    assert _num_collections_in_steps(400, 3000) == 0


def test_garbage_in_circles_is_found_as_before() -> None:
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    spare_the_steps(8)
    gone = weakref.ref(Circle())
    kept = [[] for _ in range(2 * LEAST_OBJECTS)]
    assert gone() is None and len(kept) == 2 * LEAST_OBJECTS
