"""``PyExecutor`` with the real scheduler and KV cache, and a model that notices any wrong block."""

import random
import threading
import time

import pytest

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.outputs import RequestOutput
from backend_engine.core.request import FinishReason, LlmRequest, RequestLimits, StopConditions
from backend_engine.errors import DeadlineExceededError, OutOfCapacityError, ShutdownError, StepFailedError
from backend_engine.executor.fault_injection import InjectedFaults
from backend_engine.executor.py_executor import PyExecutor
from backend_engine.executor.rooms import Rooms
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.fake_rooms import FakeDecoder, FakeModelEngine, continuation


class Collector:
    """A sink that remembers; exactly one final output is allowed."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.done = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        assert not self.done.is_set(), "an output after the final one"
        self.outputs.append(output)
        if output.finished:
            self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [t for output in self.outputs for t in output.token_ids]

    @property
    def final(self) -> RequestOutput:
        assert self.outputs and self.outputs[-1].finished
        return self.outputs[-1]


class Harness:
    def __init__(self, num_blocks: int = 64, tokens_per_block: int = 4, max_blocks: int = 64, **config: object) -> None:
        self.config = SchedulerConfig(**{"max_batch_size": 8, "max_num_tokens": 32, **config})
        self.model = FakeModelEngine(num_blocks, tokens_per_block)
        self.decoder = FakeDecoder()
        self.kv_cache = KVCacheManager(num_blocks, tokens_per_block, max_blocks, self.config.max_batch_size, True)
        self.scheduler = RequestScheduler(self.config)
        self.executor = self.build()
        self.next_id = 1

    def build(self, **rooms: object) -> PyExecutor:
        return PyExecutor(
            Rooms(self.scheduler, self.kv_cache, self.model, self.decoder, **rooms),
            max_batch_size=self.config.max_batch_size,
            max_queue_size=self.config.max_queue_size,
            check_invariants=True,
        )

    def submit(self, prompt: list[int], max_tokens: int = 8, **kwargs: object) -> tuple[LlmRequest, Collector]:
        sink = Collector()
        stop = kwargs.pop("stop", None) or StopConditions(max_tokens)
        request = LlmRequest(self.next_id, prompt, SamplingParams(max_tokens=max_tokens), stop, sink, **kwargs)
        self.next_id += 1
        self.executor.enqueue([request])
        return request, sink

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.executor.step() and self.executor.stats().num_active == 0:
                return
        raise AssertionError(f"not done after {max_steps} steps")


def test_a_request_runs_to_its_length() -> None:
    harness = Harness()
    request, sink = harness.submit([5, 6, 7], max_tokens=6)
    harness.run()
    assert sink.token_ids == continuation([5, 6, 7], 6)
    assert sink.final.finish_reason is FinishReason.LENGTH
    assert sink.final.usage == (3, 0, 6)
    assert harness.kv_cache.num_used_blocks == 0
    assert harness.decoder.removed == [request.request_id]


def test_an_end_id_ends_it_and_is_not_part_of_the_output() -> None:
    harness = Harness()
    expected = continuation([5, 6, 7], 5)
    _, sink = harness.submit([5, 6, 7], stop=StopConditions(20, end_ids=frozenset(expected[4:])))
    harness.run()
    assert sink.token_ids == expected[:4]
    assert sink.final.finish_reason is FinishReason.STOP and sink.final.stop_reason is None


class WordAfter:
    """A stop matcher that finds its word at the n-th token."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def append(self, token_id: int) -> str | None:
        self.left -= 1
        return "word" if self.left == 0 else None


def test_a_stop_word_ends_it_and_its_token_stays() -> None:
    harness = Harness()
    _, sink = harness.submit([5, 6, 7], max_tokens=20, stop_matcher=WordAfter(3))
    harness.run()
    assert sink.token_ids == continuation([5, 6, 7], 3)
    assert (sink.final.finish_reason, sink.final.stop_reason) == (FinishReason.STOP, "word")


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("queue", ["fcfs", "shortest_first"])
@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_cancels_and_pauses_change_no_answer(policy: str, queue: str, seed: int) -> None:
    """Hundreds of requests in a small pool; those not cancelled say what they say alone."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=rng.choice([20, 40]), max_blocks=20, capacity_policy=policy, waiting_queue_policy=queue,
        chunk_unit_size=rng.choice([1, 4]), max_num_tokens=rng.choice([8, 24]),
        context_cost_tokens=rng.choice([0, 5]),
    )  # fmt: skip
    shared = [rng.randrange(1, 900) for _ in range(16)]
    live: list[tuple[LlmRequest, Collector, list[int], int, bool]] = []
    for _ in range(150):
        prompt = shared[: rng.choice([0, 8, 16])] + [rng.randrange(1, 900) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, 24)
        request, sink = harness.submit(prompt, max_tokens=max_tokens, arrival_time=float(harness.next_id))
        cancelled = rng.random() < 0.3
        live.append((request, sink, prompt, max_tokens, cancelled))
        for _ in range(rng.randrange(0, 5)):
            harness.executor.step()
        for request, sink, _, _, doomed in live[-12:]:
            if doomed and rng.random() < 0.3 and not sink.done.is_set():
                harness.executor.cancel(request.request_id)
    for request, _, _, _, doomed in live:
        if doomed:
            harness.executor.cancel(request.request_id)
    harness.run()
    for _, sink, prompt, max_tokens, doomed in live:
        expected = continuation(prompt, max_tokens)
        assert sink.token_ids == expected[: len(sink.token_ids)]
        if not doomed:
            assert sink.token_ids == expected and sink.final.finish_reason is FinishReason.LENGTH
    assert harness.kv_cache.num_used_blocks == 0
    assert harness.executor.stats().num_cached_tokens_total > 0
    assert sorted(harness.decoder.removed) == sorted(set(harness.decoder.removed)) == list(range(1, harness.next_id))


def test_a_tiny_pool_pauses_and_resumes_without_a_gap_or_a_repeat() -> None:
    harness = Harness(num_blocks=12, max_blocks=12, capacity_policy="max_utilization")
    sinks = [harness.submit([i, i + 1, i + 2], max_tokens=30, arrival_time=float(i))[1] for i in range(1, 6)]
    harness.run()
    for i, sink in enumerate(sinks, 1):
        assert sink.token_ids == continuation([i, i + 1, i + 2], 30)
    assert harness.executor.stats().num_paused_total > 0


def test_a_failed_step_fails_its_own_requests_alone() -> None:
    harness = Harness()
    fail_on = (9, 9, *continuation([9, 9], 2))
    harness.executor = harness.build(faults=InjectedFaults(0, (fail_on,)))
    _, failing = harness.submit([9, 9])
    for _ in range(3):
        harness.executor.step()
    _, later = harness.submit([4, 5])
    harness.run()
    assert failing.token_ids == continuation([9, 9], 2)
    assert failing.final.finish_reason is FinishReason.ERROR and isinstance(failing.final.error, StepFailedError)
    assert later.token_ids == continuation([4, 5], 8)
    assert harness.kv_cache.num_used_blocks == 0 and harness.executor.is_healthy


@pytest.mark.parametrize("num_cached", [0, 16])
def test_when_the_step_of_a_shared_prefix_fails_the_next_request_computes_it(num_cached: int) -> None:
    harness = Harness(max_num_tokens=16)
    prefix = list(range(1, 33))
    failing, *sinks = [harness.submit([*prefix, 100 + i], 4)[1] for i in range(4)]
    if num_cached:
        harness.executor.step()

    def fail_once(output: SchedulerOutput) -> None:
        harness.model.before_forward = lambda output: None
        raise StepFailedError("only now")

    harness.model.before_forward = fail_once
    harness.run()
    assert failing.final.finish_reason is FinishReason.ERROR
    for i, sink in enumerate(sinks, 1):
        assert sink.token_ids == continuation([*prefix, 100 + i], 4)
        assert sink.final.usage is not None
        assert sink.final.usage.num_cached_tokens == (num_cached if i == 1 else len(prefix))


def test_three_failures_in_a_row_stop_the_engine_and_say_so() -> None:
    harness = Harness()

    def fail(output: SchedulerOutput) -> None:
        raise StepFailedError("the device is lost")

    harness.model.before_forward = fail
    sinks = []
    harness.executor.start()
    for _ in range(3):
        sinks.append(harness.submit([1, 2])[1])
        assert sinks[-1].done.wait(10)
    deadline = time.monotonic() + 10
    with pytest.raises(ShutdownError, match="stopped after 3 failed steps in a row"):
        while time.monotonic() < deadline:
            harness.submit([1, 2])
            time.sleep(0.01)
    assert not harness.executor.stats().is_healthy


def test_a_failing_sink_harms_nobody_else() -> None:
    harness = Harness()

    def broken(output: RequestOutput) -> None:
        raise RuntimeError("the client's code")

    request, _ = harness.submit([7, 7])
    request.sink = broken
    _, other = harness.submit([8, 8])
    harness.run()
    assert other.token_ids == continuation([8, 8], 8)
    assert request.finish_reason is FinishReason.CANCELLED and harness.kv_cache.num_used_blocks == 0


def test_deadlines_end_running_waiting_and_silent_requests() -> None:
    harness = Harness(max_batch_size=1)
    now = time.monotonic()
    _, running = harness.submit([1, 2], max_tokens=200, limits=RequestLimits(deadline=now + 0.2))
    _, queued = harness.submit([3, 4], limits=RequestLimits(queue_deadline=now + 0.05))
    _, hopeless = harness.submit([5, 6], limits=RequestLimits(deadline=now - 1))
    harness.model.before_forward = lambda output: time.sleep(0.02)
    harness.run()
    assert running.final.finish_reason is FinishReason.TIMEOUT and running.token_ids
    assert isinstance(queued.final.error, OutOfCapacityError) and "queue" in str(queued.final.error)
    assert isinstance(hopeless.final.error, DeadlineExceededError)


def test_a_full_queue_refuses_and_room_comes_back() -> None:
    harness = Harness(max_queue_size=3)
    for _ in range(3):
        harness.submit([1, 2])
    with pytest.raises(OutOfCapacityError, match="Maximum queue size of 3"):
        harness.submit([1, 2])
    harness.run()
    _, sink = harness.submit([1, 2])
    harness.run()
    assert sink.token_ids == continuation([1, 2], 8)


def test_shutdown_gives_everybody_a_final_output() -> None:
    harness = Harness(max_batch_size=2)
    harness.model.before_forward = lambda output: time.sleep(0.005)
    sinks = [harness.submit([i, i], max_tokens=100)[1] for i in range(1, 6)]
    harness.executor.start()
    while not sinks[0].outputs:
        time.sleep(0.005)
    harness.executor.shutdown()
    assert all(sink.final.finish_reason is FinishReason.CANCELLED for sink in sinks)
    assert harness.kv_cache.num_used_blocks == 0
    with pytest.raises(ShutdownError, match="shutting down"):
        harness.submit([1])


def test_cancelling_wakes_an_idle_executor_and_unknown_ids_are_harmless() -> None:
    harness = Harness()
    harness.executor.start()
    harness.executor.cancel(12345)
    _, sink = harness.submit([1, 2])
    assert sink.done.wait(10)
    harness.executor.shutdown()
    assert sink.token_ids == continuation([1, 2], 8)


def test_the_final_output_tells_what_a_request_took_and_when() -> None:
    harness = Harness()
    before = time.monotonic()
    _, first = harness.submit([5, 6, 7, 8, 9], max_tokens=8, arrival_time=before)  # stores 12 tokens: 3 blocks
    harness.run()
    _, second = harness.submit([5, 6, 7, 8, 9], max_tokens=8, arrival_time=before)
    harness.run()
    assert first.final.kv_usage == (3, 0) and second.final.kv_usage == (2, 1)
    for output in first.outputs[:-1]:
        assert output.kv_usage is None and output.times is None
    times = first.final.times
    assert times is not None and times.first_scheduled is not None
    assert times.first_token is not None and times.last_token is not None
    assert before == times.arrival <= times.first_scheduled <= times.first_token < times.last_token < time.monotonic()


def test_a_request_that_never_ran_took_nothing() -> None:
    harness = Harness(max_batch_size=1)
    harness.submit([5, 6, 7])
    waiting, sink = harness.submit([8, 9], arrival_time=3.0)
    harness.executor.step()
    harness.executor.cancel(waiting.request_id)
    harness.run()
    assert (sink.final.kv_usage, sink.final.times) == ((0, 0), (3.0, None, None, None))


def test_a_cancelled_request_tells_what_it_took() -> None:
    harness = Harness()
    request, sink = harness.submit([5, 6, 7, 8, 9], max_tokens=50)
    for _ in range(5):
        harness.executor.step()
    harness.executor.cancel(request.request_id)
    harness.run()
    assert sink.final.kv_usage == (3, 0), "9 tokens are stored"


def test_usage_counts_what_was_taken_again_after_a_pause() -> None:
    harness = Harness(num_blocks=6, capacity_policy="max_utilization")
    sinks = [harness.submit([i] * 8, max_tokens=9, arrival_time=float(i))[1] for i in range(1, 3)]
    harness.run()
    assert harness.executor.stats().num_paused_total > 0
    assert sinks[0].final.kv_usage == (4, 0)
    usage = sinks[1].final.kv_usage
    assert usage is not None and usage.num_allocated_blocks + usage.num_reused_blocks > 4
