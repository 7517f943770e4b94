"""Metrics: the names and labels that others scrape, set only when they change, and the log line that tells the same."""

import dataclasses
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backend_engine.core.request import FinishReason
from backend_engine.executor.histogram import Histogram
from backend_engine.executor.iteration_stats import EngineStats, RuntimeMemory
from backend_engine.executor.stats_recorder import LATENCY_BOUNDS_S, LENGTH_BOUNDS
from backend_engine.triton_io import metric_table
from backend_engine.triton_io.metrics import EngineMetrics
from backend_engine.triton_io.stats_log import TIMESTAMP_FORMAT
from tests.adapters import fake_pb_utils as pb_utils

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
NO_LATENCY, NO_LENGTH = Histogram(LATENCY_BOUNDS_S).totals(), Histogram(LENGTH_BOUNDS).totals()
NOON_US = 1_700_000_000_000_123
IDLE = EngineStats(
    num_waiting=0, num_context=0, num_generation=0, num_scheduled=0, num_active=0, num_paused=0, num_context_tokens=0,
    max_requests=32, is_static_batching=False, memory=RuntimeMemory(cpu=5000), kv_used_blocks=0, kv_free_blocks=40,
    kv_max_blocks=40, kv_tokens_per_block=16, kv_reused_blocks=0, num_paused_total=0, num_cached_tokens_total=0,
    num_prompt_tokens_total=0, num_generated_tokens_total=0, num_finished_total=dict.fromkeys(FinishReason, 0),
    num_kv_transfers_total=0, kv_transfer_ms_total=0, time_to_first_token=NO_LATENCY, inter_token_latency=NO_LATENCY,
    queue_time=NO_LATENCY, request_latency=NO_LATENCY, prompt_length=NO_LENGTH, output_length=NO_LENGTH, iteration=0,
    is_healthy=True, failure="", timestamp_us=NOON_US,
)  # fmt: skip
BUSY = dataclasses.replace(
    IDLE, num_waiting=3, num_context=1, num_generation=1, num_scheduled=2, num_active=5, num_paused=1,
    num_context_tokens=70, kv_used_blocks=10, kv_free_blocks=30, kv_reused_blocks=4, num_paused_total=6,
    num_cached_tokens_total=7, num_prompt_tokens_total=9, num_generated_tokens_total=8, iteration=11,
    num_finished_total=dict.fromkeys(FinishReason, 0) | {FinishReason.STOP: 2},
)  # fmt: skip
DONE = dataclasses.replace(
    BUSY, num_waiting=0, num_context=0, num_generation=0, num_scheduled=0, num_active=0, num_paused=0,
    num_context_tokens=0, kv_used_blocks=0, kv_free_blocks=40, num_generated_tokens_total=11,
)  # fmt: skip


class Page:
    """Metrics over statistics that the test sets."""

    def __init__(self, stats: EngineStats) -> None:
        self.families: list[pb_utils.MetricFamily] = []
        self.stats = stats
        original = pb_utils.MetricFamily.__init__

        def remember(family: pb_utils.MetricFamily, **kwargs: str) -> None:
            original(family, **kwargs)
            self.families.append(family)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pb_utils.MetricFamily, "__init__", remember)
            self.metrics = EngineMetrics(pb_utils, "tensorrt_llm", "1", lambda: self.stats)

    def show(self, stats: EngineStats) -> dict[str, dict[str, float]]:
        """Refresh with ``stats``; the samples by family and category."""
        self.stats = stats
        self.metrics.refresh()
        return self.samples()

    def samples(self) -> dict[str, dict[str, float]]:
        return {
            family.name: {
                next((v for k, v in m.labels.items() if k not in ("model", "version")), ""): m.num
                for m in family.metrics
            }
            for family in self.families
        }

    def metric(self, name: str) -> pb_utils.Metric:
        (family,) = [family for family in self.families if family.name == name]
        (metric,) = family.metrics
        return metric

    @property
    def num_calls(self) -> int:
        return sum(metric.num_calls for family in self.families for metric in family.metrics)


def logged() -> dict[str, float | str]:
    line = json.loads(pb_utils.Logger.lines[-1])
    assert isinstance(line, dict)
    return line


def test_samples_have_the_names_that_dashboards_read() -> None:
    page = Page(IDLE)
    found = page.show(BUSY)
    assert found["nv_trt_llm_request_metrics"] == {"waiting": 3, "context": 1, "scheduled": 2, "max": 32, "active": 5}
    assert found["nv_trt_llm_runtime_memory_metrics"] == {"pinned": 0, "gpu": 0, "cpu": 5000}
    assert found["nv_trt_llm_kv_cache_block_metrics"] == {
        "fraction": 0.25, "tokens_per": 16, "used": 10, "free": 30, "max": 40, "reused": 4,
    }  # fmt: skip
    assert found["nv_trt_llm_inflight_batcher_metrics"] == {
        "micro_batch_id": 0, "generation_requests": 1, "total_context_tokens": 70, "paused_requests": 1,
    }  # fmt: skip
    assert found["nv_trt_llm_general_metrics"] == {"iteration_counter": 11, "timestamp": NOON_US}
    assert found["nv_trt_llm_disaggregated_serving_metrics"] == {"kv_cache_transfer_ms": 0, "request_count": 0}
    assert found["inflight_preempted_requests_total"] == {"": 6}
    assert found["inflight_cached_tokens_total"] == {"": 7}
    assert found["inflight_reused_blocks_total"] == {"": 4}
    assert found["inflight_generated_tokens_total"] == {"": 8}
    assert found["inflight_prompt_tokens_total"] == {"": 9}
    assert found["inflight_finished_requests_total"] == dict.fromkeys(FinishReason, 0) | {"stop": 2}
    assert found["inflight_engine_healthy"] == {"": 1}
    assert "nv_trt_llm_v1_metrics" not in found
    labels = [metric.labels for family in page.families for metric in family.metrics]
    assert all(label["model"] == "tensorrt_llm" and label["version"] == "1" for label in labels)


def test_kinds_and_help_texts() -> None:
    page = Page(IDLE)
    kinds = {family.name: family.kind for family in page.families}
    for name, kind in kinds.items():
        counts = name.endswith(("_total", "_bucket", "_sum", "_count")) or "disaggregated" in name
        measures = name.endswith(("_len", "_seconds"))
        assert kind == ("counter" if counts else "histogram" if measures else "gauge"), name
    helps = {family.name: family.description for family in page.families}
    assert helps["nv_trt_llm_request_metrics"] == "TRT LLM request metrics"
    assert helps["nv_trt_llm_runtime_memory_metrics"] == "TRT LLM runtime memory metrics"
    assert helps["nv_trt_llm_kv_cache_block_metrics"] == "TRT LLM KV cache block metrics"
    assert helps["nv_trt_llm_inflight_batcher_metrics"] == "TRT LLM inflight_batcher-specific metrics"
    assert helps["nv_trt_llm_general_metrics"] == "General TRT LLM metrics"
    assert helps["nv_trt_llm_disaggregated_serving_metrics"] == "TRT LLM disaggregated serving metrics"
    assert all(helps.values())


def test_static_batching_has_its_own_family_in_place_of_the_in_flight_one() -> None:
    static = dataclasses.replace(BUSY, is_static_batching=True)
    found = Page(static).show(static)
    assert found["nv_trt_llm_v1_metrics"] == {
        "total_generation_tokens": 1, "empty_generation_slots": 30, "total_context_tokens": 70,
    }  # fmt: skip
    assert "nv_trt_llm_inflight_batcher_metrics" not in found
    line = logged()
    assert (line["Total Generation Tokens"], line["Empty Generation Slots"]) == (1, 30)
    assert "MicroBatch ID" not in line and len(line) == 5 + 3 + 6 + 3 + 2 + 2


def test_levels_fall_back_and_totals_only_grow_and_nothing_happens_when_idle() -> None:
    page = Page(IDLE)
    page.show(BUSY)
    found = page.show(DONE)
    assert found["nv_trt_llm_request_metrics"] == {"waiting": 0, "context": 0, "scheduled": 0, "max": 32, "active": 0}
    assert found["nv_trt_llm_kv_cache_block_metrics"]["fraction"] == 0
    assert found["inflight_generated_tokens_total"] == {"": 11}
    calls, lines = page.num_calls, len(pb_utils.Logger.lines)
    later = dataclasses.replace(DONE, timestamp_us=NOON_US + 100_000)
    assert page.show(later)["nv_trt_llm_general_metrics"]["timestamp"] == NOON_US, "the refresh before was the last"
    assert (page.num_calls, len(pb_utils.Logger.lines)) == (calls, lines)


def test_a_refresh_while_requests_run_moves_the_time_and_is_logged_though_nothing_else_changed() -> None:
    page = Page(IDLE)
    page.show(BUSY)
    lines = len(pb_utils.Logger.lines)
    found = page.show(dataclasses.replace(BUSY, timestamp_us=NOON_US + 100_000))
    assert found["nv_trt_llm_general_metrics"]["timestamp"] == NOON_US + 100_000
    assert len(pb_utils.Logger.lines) == lines + 1


def test_a_failed_engine_is_seen() -> None:
    page = Page(IDLE)
    assert page.show(IDLE)["inflight_engine_healthy"] == {"": 1}
    assert page.show(dataclasses.replace(IDLE, is_healthy=False))["inflight_engine_healthy"] == {"": 0}


@pytest.mark.parametrize("stats", [BUSY, DONE], ids=["busy", "idle"])
def test_the_log_line_has_each_sample_under_its_key(stats: EngineStats) -> None:
    found = Page(IDLE).show(stats)
    line = logged()
    num_samples = sum(len(samples) for name, samples in found.items() if name.startswith("nv_trt_llm"))
    assert len(line) == num_samples == 5 + 3 + 6 + 4 + 2 + 2
    for family in metric_table.logged_families(False):
        for sample in family.samples:
            shown, told = found[family.name][sample.category], line[sample.log_key]
            if sample.category == "timestamp":
                assert isinstance(told, str)
                at = datetime.strptime(told, TIMESTAMP_FORMAT).replace(tzinfo=UTC)
                assert round(at.timestamp() * 1e6) == shown == NOON_US
            else:
                assert told == shown, sample.log_key
                assert isinstance(told, int) or told != int(told), "a whole number has no decimal point"
    assert line["Active Request Count"] == stats.num_active


def test_log_keys_are_those_that_tools_read() -> None:
    Page(IDLE).show(BUSY)
    assert set(logged()) == {
        "Context Requests", "Scheduled Requests", "Max Request Count", "Active Request Count", "Waiting Requests",
        "Runtime Pinned Memory Usage", "Runtime GPU Memory Usage", "Runtime CPU Memory Usage",
        "Tokens per KV cache block", "Used KV cache blocks", "Free KV cache blocks", "Max KV cache blocks",
        "Reused KV cache blocks", "Fraction used KV cache blocks", "Total Context Tokens", "MicroBatch ID",
        "Generation Requests", "Paused Requests", "Iteration Counter", "Timestamp", "KV cache transfer time",
        "Request count",
    }  # fmt: skip


def test_length_histograms_keep_every_bucket_and_the_sum() -> None:
    rng = random.Random(5)
    lengths = [rng.choice((1, 9, 10, 11, 49, 50, 51, 100, 101, 777, 1000, 1001, 4000)) for _ in range(200)]
    histogram, page = Histogram(LENGTH_BOUNDS), Page(IDLE)
    metric = page.metric("nv_llm_input_token_len")
    assert metric.labels == {"model": "tensorrt_llm", "version": "1", "response_metric_type": "total_input_tokens"}
    assert metric.buckets == [10.0, 50.0, 100.0, 500.0, 1000.0]
    for start in range(0, 200, 23):
        for length in lengths[start : start + 23]:
            histogram.add(length)
        page.show(dataclasses.replace(IDLE, prompt_length=histogram.totals()))
    assert sum(metric.observed) == sum(lengths) and len(metric.observed) == len(lengths)
    assert all(number == int(number) for number in metric.observed)
    for bound in LENGTH_BOUNDS:
        assert sum(o <= bound for o in metric.observed) == sum(length <= bound for length in lengths)
    assert page.metric("nv_llm_output_token_len").observed == []


@pytest.mark.parametrize("value", [0.001, 0.1, 0.3, 60.0, 301.0])
def test_latency_histograms_keep_values_on_a_bound_in_their_bucket(value: float) -> None:
    histogram, page = Histogram(LATENCY_BOUNDS_S), Page(IDLE)
    for _ in range(3):  # 0.1 + 0.1 + 0.1 is over 3 * 0.1
        histogram.add(value)
    page.show(dataclasses.replace(IDLE, time_to_first_token=histogram.totals()))
    observed = page.metric("inflight_time_to_first_token_seconds").observed
    assert len(observed) == 3 and sum(observed) == pytest.approx(3 * value)
    for bound in LATENCY_BOUNDS_S:
        assert sum(o <= bound for o in observed) == (3 if value <= bound else 0)


def test_the_counted_histogram_is_cumulative() -> None:
    histogram, page = Histogram(LATENCY_BOUNDS_S), Page(IDLE)
    for step in ([0.001, 0.002, 0.002], [], [0.3, 1000.0]):
        if step:
            histogram.add_all(step)
        found = page.show(dataclasses.replace(IDLE, inter_token_latency=histogram.totals()))
    buckets = found["inflight_inter_token_latency_seconds_bucket"]
    assert list(buckets) == [*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf"]
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (1, 3, 3, 4, 5)
    assert list(buckets.values()) == sorted(buckets.values())
    assert found["inflight_inter_token_latency_seconds_count"] == {"": 5}
    assert found["inflight_inter_token_latency_seconds_sum"][""] == pytest.approx(1000.305)


def test_a_sample_that_is_refused_does_not_stop_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(IDLE)

    def refuse(self: pb_utils.Metric, number: float) -> None:
        raise pb_utils.TritonModelException("no metrics")

    monkeypatch.setattr(pb_utils.Metric, "set", refuse)
    page.show(BUSY)
    monkeypatch.undo()
    assert page.show(DONE)["nv_trt_llm_request_metrics"]["max"] == 0, "given up for good, and said once"


def documented() -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in DOC.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip("` ") for cell in row] for row in rows]


def test_the_document_lists_every_metric() -> None:
    expected: list[list[str]] = []
    static_too = (*metric_table.families(False), metric_table.STATIC_BATCHER)
    for family in static_too:
        expected += [
            [family.name, family.kind, f'{family.label}="{s.category}"' if family.label else "", s.meaning]
            for s in family.samples
        ]
    for histogram in metric_table.HISTOGRAMS:
        label = f'{histogram.label}="{histogram.category}"' if histogram.label else ""
        kind = "histogram" if histogram.is_native else "histogram (counters)"
        expected.append([histogram.name, kind, label, histogram.meaning])
    assert sorted(documented()) == sorted(expected)


def test_each_log_key_and_sample_is_there_once() -> None:
    read: Callable[[bool], list[str]] = lambda static: [  # noqa: E731
        sample.log_key for family in metric_table.logged_families(static) for sample in family.samples
    ]
    for static in (False, True):
        assert len(set(read(static))) == len(read(static)) and all(read(static))
    names = [family.name for family in (*metric_table.families(False), *metric_table.HISTOGRAMS)]
    assert len(set(names)) == len(names)
    assert all(name.startswith("inflight_") for name in (f.name for f in metric_table.OURS))
