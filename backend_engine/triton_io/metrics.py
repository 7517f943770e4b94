"""The engine's Prometheus metrics, in Triton Server's own metrics page.

``EngineMetrics.update`` is called by the sender thread with ``LLM.stats()``; each sample is set only when it has
changed, for setting one is a call into Triton Server. Names and labels are those that dashboards and routers scrape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from backend_engine.executor.iteration_stats import EngineStats
from backend_engine.logger import get_logger

_log = get_logger(__name__)


class Gauge(NamedTuple):
    """One sample: family, category label and its value, and how to read it."""

    family: str
    label: str
    category: str
    read: Callable[[EngineStats], float]


_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
GAUGES = (
    Gauge(_REQUESTS, "request_type", "waiting", lambda s: s.num_waiting),
    Gauge(_REQUESTS, "request_type", "context", lambda s: s.num_context),
    Gauge(_REQUESTS, "request_type", "scheduled", lambda s: s.num_scheduled),
    Gauge(_REQUESTS, "request_type", "max", lambda s: s.max_requests),
    Gauge(_REQUESTS, "request_type", "active", lambda s: s.num_active),
    Gauge(_BLOCKS, "kv_cache_block_type", "fraction", lambda s: s.kv_used_blocks / max(1, s.kv_max_blocks)),
    Gauge(_BLOCKS, "kv_cache_block_type", "tokens_per", lambda s: s.kv_tokens_per_block),
    Gauge(_BLOCKS, "kv_cache_block_type", "used", lambda s: s.kv_used_blocks),
    Gauge(_BLOCKS, "kv_cache_block_type", "free", lambda s: s.kv_free_blocks),
    Gauge(_BLOCKS, "kv_cache_block_type", "max", lambda s: s.kv_max_blocks),
    Gauge(_BLOCKS, "kv_cache_block_type", "reused", lambda s: s.kv_reused_blocks),
)
DESCRIPTIONS = {
    _REQUESTS: "TRT LLM request metrics",
    _BLOCKS: "TRT LLM KV cache block metrics",
    "inflight_preempted_requests_total": "Requests that were paused to be computed again later",
    "inflight_cached_tokens_total": "Prompt tokens that were found in the KV cache",
    "inflight_generated_tokens_total": "Tokens that were generated",
}
COUNTERS: tuple[tuple[str, Callable[[EngineStats], int]], ...] = (
    ("inflight_preempted_requests_total", lambda s: s.num_paused_total),
    ("inflight_cached_tokens_total", lambda s: s.num_cached_tokens_total),
    ("inflight_generated_tokens_total", lambda s: s.num_generated_tokens_total),
)


class EngineMetrics:
    """The engine model's metric families and their samples, labelled ``model`` and ``version``."""

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self._pb_utils = pb_utils
        self._is_broken = False
        labels = {"model": model, "version": version}
        kinds = pb_utils.MetricFamily
        # Triton Server drops a family that nobody holds.
        self._families = {
            name: pb_utils.MetricFamily(
                name=name,
                description=description,
                kind=kinds.GAUGE if name in (_REQUESTS, _BLOCKS) else kinds.COUNTER,
            )
            for name, description in DESCRIPTIONS.items()
        }
        self._gauges = [
            (gauge.read, self._families[gauge.family].Metric(labels=labels | {gauge.label: gauge.category}))
            for gauge in GAUGES
        ]
        self._counters = [(read, self._families[name].Metric(labels=labels)) for name, read in COUNTERS]
        self._levels: list[float | None] = [None] * len(self._gauges)
        self._totals = [0] * len(self._counters)

    def update(self, stats: EngineStats) -> None:
        """Set what has changed. When Triton Server refuses a sample, say so once and give the metrics up."""
        if self._is_broken:
            return
        try:
            self._set_gauges(stats)
            self._add_to_counters(stats)
        except self._pb_utils.TritonModelException as error:
            self._is_broken = True
            _log.error("the metrics cannot be updated and stay as they are: %s", error)

    def _set_gauges(self, stats: EngineStats) -> None:
        for index, (read, metric) in enumerate(self._gauges):
            level = float(read(stats))
            if level != self._levels[index]:
                metric.set(level)
                self._levels[index] = level

    def _add_to_counters(self, stats: EngineStats) -> None:
        for index, (count, counter) in enumerate(self._counters):
            total = count(stats)
            if total > self._totals[index]:
                counter.increment(total - self._totals[index])
                self._totals[index] = total
