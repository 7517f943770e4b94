"""Metrics: the names and labels that others scrape, set only when they change."""

import dataclasses

import pytest

from backend_engine.executor.iteration_stats import EngineStats
from backend_engine.triton_io.metrics import EngineMetrics
from tests.adapters import fake_pb_utils as pb_utils

IDLE = EngineStats(
    num_waiting=0, num_context=0, num_scheduled=0, num_active=0, max_requests=32, kv_used_blocks=0, kv_free_blocks=40,
    kv_max_blocks=40, kv_tokens_per_block=16, kv_reused_blocks=0, num_paused_total=0, num_cached_tokens_total=0,
    num_generated_tokens_total=0, iteration=0, is_healthy=True,
)  # fmt: skip
BUSY = dataclasses.replace(
    IDLE, num_waiting=3, num_context=1, num_scheduled=2, num_active=5, kv_used_blocks=10, kv_free_blocks=30,
    kv_reused_blocks=4, num_paused_total=6, num_cached_tokens_total=7, num_generated_tokens_total=8,
)  # fmt: skip


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[pb_utils.MetricFamily]:
    """Every family that is made."""
    made: list[pb_utils.MetricFamily] = []
    original = pb_utils.MetricFamily.__init__

    def remember(self: pb_utils.MetricFamily, **kwargs: str) -> None:
        original(self, **kwargs)
        made.append(self)

    monkeypatch.setattr(pb_utils.MetricFamily, "__init__", remember)
    return made


def values(families: list[pb_utils.MetricFamily]) -> dict[str, dict[str, float]]:
    return {
        family.name: {
            next((v for k, v in m.labels.items() if k not in ("model", "version")), ""): m.num for m in family.metrics
        }
        for family in families
    }


def test_samples_have_the_names_that_dashboards_read(families: list[pb_utils.MetricFamily]) -> None:
    EngineMetrics(pb_utils, "tensorrt_llm", "1").update(BUSY)
    found = values(families)
    assert found["nv_trt_llm_request_metrics"] == {"waiting": 3, "context": 1, "scheduled": 2, "max": 32, "active": 5}
    assert found["nv_trt_llm_kv_cache_block_metrics"] == {
        "fraction": 0.25, "tokens_per": 16, "used": 10, "free": 30, "max": 40, "reused": 4,
    }  # fmt: skip
    assert found["inflight_preempted_requests_total"] == {"": 6}
    assert found["inflight_cached_tokens_total"] == {"": 7}
    assert found["inflight_generated_tokens_total"] == {"": 8}
    labels = [metric.labels for family in families for metric in family.metrics]
    assert all(label["model"] == "tensorrt_llm" and label["version"] == "1" for label in labels)
    kinds = {family.name: family.kind for family in families}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        n for n in kinds if n.startswith("inflight_")
    }


def test_levels_fall_back_and_totals_only_grow(families: list[pb_utils.MetricFamily]) -> None:
    metrics = EngineMetrics(pb_utils, "tensorrt_llm", "1")
    metrics.update(BUSY)
    metrics.update(
        dataclasses.replace(IDLE, num_paused_total=6, num_cached_tokens_total=7, num_generated_tokens_total=11)
    )
    found = values(families)
    assert found["nv_trt_llm_request_metrics"] == {"waiting": 0, "context": 0, "scheduled": 0, "max": 32, "active": 0}
    assert found["nv_trt_llm_kv_cache_block_metrics"]["fraction"] == 0
    assert found["inflight_generated_tokens_total"] == {"": 11}
    calls = sum(metric.num_calls for family in families for metric in family.metrics)
    metrics.update(
        dataclasses.replace(IDLE, num_paused_total=6, num_cached_tokens_total=7, num_generated_tokens_total=11)
    )
    assert calls == sum(metric.num_calls for family in families for metric in family.metrics), "nothing had changed"


def test_a_sample_that_is_refused_does_not_stop_the_answers(
    families: list[pb_utils.MetricFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = EngineMetrics(pb_utils, "tensorrt_llm", "1")

    def refuse(self: pb_utils.Metric, number: float) -> None:
        raise pb_utils.TritonModelException("no metrics")

    monkeypatch.setattr(pb_utils.Metric, "set", refuse)
    metrics.update(BUSY)
    monkeypatch.undo()
    metrics.update(IDLE)
    assert values(families)["nv_trt_llm_request_metrics"]["max"] == 0, "given up for good, and said once"
