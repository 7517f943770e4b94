"""Statistics tell the truth: levels are those of the current batch at any time, totals add up to what was sent."""

import random
import time

import pytest

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.outputs import RequestOutput
from backend_engine.core.request import FinishReason, LlmRequest, StopConditions
from backend_engine.errors import OutOfCapacityError, StepFailedError
from backend_engine.executor.histogram import Histogram, HistogramTotals
from backend_engine.executor.iteration_stats import EngineStats, IterationStats, RuntimeMemory
from backend_engine.executor.stats_recorder import LiveLevels, StatsRecorder
from tests.executor.test_py_executor import Collector, Harness


def check_levels(stats: EngineStats) -> None:
    assert stats.num_waiting + stats.num_scheduled == stats.num_active
    assert stats.num_context + stats.num_generation == stats.num_scheduled <= stats.max_requests
    assert stats.kv_used_blocks + stats.kv_free_blocks == stats.kv_max_blocks
    assert 0 <= stats.num_paused <= stats.num_waiting
    assert min(stats.num_context, stats.num_generation, stats.kv_used_blocks, stats.kv_free_blocks) >= 0
    assert (stats.num_context_tokens > 0) == (stats.num_context > 0)


def values_of(totals: HistogramTotals) -> tuple[int, float]:
    return totals.count, totals.sum


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("seed", range(3))
def test_levels_and_totals_of_a_random_crowd(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(num_blocks=24, max_batch_size=5, max_num_tokens=16, capacity_policy=policy)
    executor = harness.executor
    sinks: dict[int, Collector] = {}
    prompts: dict[int, int] = {}
    during: list[EngineStats] = []

    def look(output: SchedulerOutput) -> None:
        stats = executor.stats()
        during.append(stats)
        check_levels(stats)
        assert (stats.num_context, stats.num_generation) == (len(output.context), len(output.generation))
        assert stats.num_context_tokens == output.num_context_tokens
        assert stats.kv_used_blocks == harness.kv_cache.num_used_blocks > 0
        assert stats.num_active == sum(not sink.done.is_set() for sink in sinks.values())

    harness.model.before_forward = look
    for _ in range(25):
        prompt = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 30))]
        request, sinks[len(sinks)] = harness.submit(prompt, max_tokens=rng.randrange(1, 25))
        prompts[request.request_id] = len(prompt)
        stats = executor.stats()
        check_levels(stats)
        assert stats.num_active == sum(not sink.done.is_set() for sink in sinks.values())
        for _ in range(rng.randrange(3)):
            executor.step()
            check_levels(executor.stats())
        if rng.random() < 0.1:
            executor.cancel(rng.randrange(1, harness.next_id))
    harness.run()
    stats = executor.stats()
    check_levels(stats)
    assert (stats.num_active, stats.num_paused, stats.kv_used_blocks) == (0, 0, 0)
    num_tokens = sum(len(sink.token_ids) for sink in sinks.values())
    num_started = sum(bool(sink.token_ids) for sink in sinks.values())
    assert stats.num_generated_tokens_total == num_tokens
    assert stats.inter_token_latency.count == num_tokens - num_started
    assert stats.time_to_first_token.count == num_started
    assert values_of(stats.prompt_length) == (25, sum(prompts.values()))
    assert values_of(stats.output_length) == (25, num_tokens)
    assert stats.request_latency.count == sum(stats.num_finished_total.values()) == 25
    reasons = [sink.final.finish_reason for sink in sinks.values()]
    assert stats.num_finished_total == {reason: reasons.count(reason) for reason in FinishReason}
    if policy == "max_utilization":
        assert stats.num_paused_total > 0 and any(one.num_paused for one in during)


def test_whoever_hears_of_an_end_finds_it_in_the_statistics() -> None:
    harness = Harness()
    found: list[EngineStats] = []

    def sink(output: RequestOutput) -> None:
        if output.finished:
            found.append(harness.executor.stats())

    harness.executor.enqueue([LlmRequest(1, [5, 6], SamplingParams(max_tokens=3), StopConditions(3), sink)])
    harness.run()
    (stats,) = found
    assert (stats.num_active, stats.num_scheduled, stats.kv_used_blocks) == (0, 0, 0)
    assert stats.num_finished_total[FinishReason.LENGTH] == 1 and stats.num_generated_tokens_total == 3


def test_times_count_from_the_arrival() -> None:
    """A request that arrived 100 s ago has waited, and taken, that long."""
    harness = Harness()
    harness.submit([5, 6, 7], max_tokens=4, arrival_time=time.monotonic() - 100.0)
    harness.run()
    stats = harness.executor.stats()
    for totals in (stats.queue_time, stats.time_to_first_token, stats.request_latency):
        assert totals.count == 1 and 100.0 <= totals.sum < 200.0
    assert stats.queue_time.sum <= stats.time_to_first_token.sum <= stats.request_latency.sum
    whole = stats.request_latency.sum - stats.time_to_first_token.sum
    assert stats.inter_token_latency.count == 3 and 0 <= stats.inter_token_latency.sum <= whole


def test_reused_blocks_and_cached_tokens_are_counted() -> None:
    harness = Harness(tokens_per_block=4)
    for _ in range(2):
        harness.submit(list(range(1, 14)), max_tokens=2)
        harness.run()
    stats = harness.executor.stats()
    assert (stats.num_cached_tokens_total, stats.kv_reused_blocks, stats.num_prompt_tokens_total) == (12, 3, 26)


def test_a_failed_request_counts_as_one_and_has_no_latency_and_no_length() -> None:
    harness = Harness()

    def fail(output: SchedulerOutput) -> None:
        raise StepFailedError("the device is lost")

    harness.model.before_forward = fail
    harness.submit([5, 6, 7])
    harness.run()
    stats = harness.executor.stats()
    check_levels(stats)
    assert stats.num_finished_total == dict.fromkeys(FinishReason, 0) | {FinishReason.ERROR: 1}
    assert stats.request_latency.count == stats.prompt_length.count == stats.output_length.count == 0
    assert stats.queue_time.count == 1


def sequences(first_id: int, lengths: list[int]) -> list[LlmRequest]:
    return [
        LlmRequest(
            first_id + i, [7, 8, 9], SamplingParams(max_tokens=n), StopConditions(n), Collector(), sequence_index=i
        )
        for i, n in enumerate(lengths)
    ]


def test_the_sequences_of_a_request_are_one_prompt_and_one_sum() -> None:
    harness = Harness()
    harness.executor.enqueue(sequences(1, [2, 5, 9]))
    harness.executor.enqueue(sequences(4, [4]))
    harness.run()
    stats = harness.executor.stats()
    assert values_of(stats.prompt_length) == (2, 6)
    assert stats.output_length.counts[:2] == (1, 1), "16 tokens and 4"
    assert values_of(stats.output_length) == (2, 20)
    assert stats.num_finished_total[FinishReason.LENGTH] == 4


def test_each_row_of_a_request_is_a_prompt_of_its_own() -> None:
    harness = Harness()
    harness.executor.enqueue(sequences(1, [2, 5]) + sequences(3, [4]) + sequences(4, [1, 1, 1]))
    harness.run()
    stats = harness.executor.stats()
    assert values_of(stats.prompt_length) == (3, 9) and values_of(stats.output_length) == (3, 14)


def test_a_paused_request_that_is_cancelled_is_not_paused_any_more() -> None:
    harness = Harness(num_blocks=6, capacity_policy="max_utilization")
    requests = [harness.submit([i, i + 1, i + 2], max_tokens=18)[0] for i in (1, 10)]
    while not harness.executor.stats().num_paused:
        assert harness.executor.step(), "both ended without a pause"
    for request in requests:
        harness.executor.cancel(request.request_id)
    harness.executor.step()
    stats = harness.executor.stats()
    assert (stats.num_active, stats.num_paused, stats.num_paused_total) == (0, 0, 1)


def test_refused_requests_leave_no_trace() -> None:
    harness = Harness(max_queue_size=2)
    before = harness.executor.stats()
    refused = sequences(1, [2, 2, 2])
    with pytest.raises(OutOfCapacityError):
        harness.executor.enqueue(refused)
    assert harness.executor.stats() == before
    harness.executor.enqueue(refused[:2])
    harness.run()
    assert values_of(harness.executor.stats().output_length) == (1, 4)


def test_a_dead_engine_has_no_requests_left() -> None:
    recorder = StatsRecorder(memory=RuntimeMemory(gpu=7), is_static_batching=True)
    harness = Harness()
    harness.submit([5, 6, 7])
    seen: list[SchedulerOutput] = []
    harness.model.before_forward = seen.append
    harness.executor.step()
    recorder.note_batch(seen[0], num_live=1, kv_free_blocks=60)
    live = LiveLevels(0, 8, 64, 4, 0, True, "")
    stats = recorder.snapshot(live)
    assert (stats.num_active, stats.num_context, stats.kv_used_blocks) == (1, 1, 4)
    assert stats.is_static_batching and stats.memory == RuntimeMemory(gpu=7)
    dead = recorder.snapshot(live._replace(is_healthy=False, failure="a step has hung"))
    assert (dead.num_active, dead.num_scheduled, dead.failure) == (0, 0, "a step has hung")


def test_requests_that_a_dying_engine_still_has_count_as_errors() -> None:
    """One request a step, and every step fails: the third is the end, also of the two that have not run."""
    harness = Harness(max_batch_size=1)

    def fail(output: SchedulerOutput) -> None:
        raise StepFailedError("the device is lost")

    harness.model.before_forward = fail
    sinks = [harness.submit([5, 6, 7])[1] for _ in range(5)]
    harness.executor.start()
    for sink in sinks:
        assert sink.done.wait(30) and sink.final.finish_reason is FinishReason.ERROR
    dead = dict.fromkeys(FinishReason, 0) | {FinishReason.ERROR: 5}
    assert harness.executor.stats().num_finished_total == dead
    harness.executor.shutdown()
    stats = harness.executor.stats()
    check_levels(stats)
    assert stats.num_finished_total == dead and stats.failure and not stats.is_healthy


def test_the_ring_keeps_the_last_steps() -> None:
    recorder = StatsRecorder(capacity=3)
    for step in range(5):
        recorder.record(IterationStats(step, 0, 1, 1, 0, 0, 0, 0.0, 0.0, 0.0, 0.0))
    assert [stats.step for stats in recorder.recent()] == [2, 3, 4]
    assert recorder.snapshot(LiveLevels(0, 8, 64, 4, 0, True, "")).iteration == 4


def test_a_histogram_counts_many_values_like_one_by_one() -> None:
    rng = random.Random(3)
    bounds = (0.001, 0.01, 0.1, 1.0)
    numbers = [rng.choice((*bounds, rng.random(), rng.random() / 100, 5.0)) for _ in range(300)]
    singly, together = Histogram(bounds), Histogram(bounds)
    for number in numbers:
        singly.add(number)
    for start in range(0, 300, 50):
        together.add_all(numbers[start : start + 50])
    assert singly.totals().counts == together.totals().counts
    assert singly.totals().sums == pytest.approx(together.totals().sums)
    for index, bound in enumerate(bounds):
        assert sum(singly.totals().counts[: index + 1]) == sum(number <= bound for number in numbers)
    assert values_of(singly.totals()) == (300, pytest.approx(sum(numbers)))
