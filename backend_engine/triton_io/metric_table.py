"""Every metric of the engine model as data: name, type, labels, key in the log, meaning, and where its number is read.

``metrics.py`` registers and sets them, ``stats_log.py`` writes those with a log key, and ``docs/metrics.md`` is checked
against this table. The ``nv_`` names, labels and log keys are public: dashboards and routers read them.
"""

from collections.abc import Callable
from typing import NamedTuple

from backend_engine.core.request import FinishReason
from backend_engine.executor.histogram import HistogramTotals
from backend_engine.executor.iteration_stats import EngineStats

TIMESTAMP = "timestamp"


class Sample(NamedTuple):
    """One line of the page within a family, by the value of the family's label; ``log_key`` empty = not logged."""

    category: str
    log_key: str
    meaning: str
    read: Callable[[EngineStats], float]


class Family(NamedTuple):
    """Gauges or counters. ``label`` is empty when the one sample has no label of its own."""

    name: str
    kind: str
    help: str
    label: str
    samples: tuple[Sample, ...]


class HistogramFamily(NamedTuple):
    """A histogram with one series. ``is_native`` = one of Triton Server's, else counters of the same names.

    Triton Server takes a histogram's values one by one, at 25 to 45 us each. That is cheap for what happens once a
    request and too dear for every token; ``is_native`` is false where values are that many. Prometheus computes
    quantiles from counters named ``_bucket`` (label ``le``, cumulative), ``_sum`` and ``_count`` all the same.
    """

    name: str
    help: str
    label: str
    category: str
    meaning: str
    read: Callable[[EngineStats], HistogramTotals]
    is_native: bool = True


GAUGE, COUNTER = "gauge", "counter"

REQUESTS = Family(
    "nv_trt_llm_request_metrics", GAUGE, "TRT LLM request metrics", "request_type",
    (
        Sample("waiting", "Waiting Requests", "active requests that are not in the current batch",
               lambda s: s.num_waiting),
        Sample("context", "Context Requests", "requests of the current batch in the context phase",
               lambda s: s.num_context),
        Sample("scheduled", "Scheduled Requests", "requests in the current batch", lambda s: s.num_scheduled),
        Sample("max", "Max Request Count", "most requests in a batch", lambda s: s.max_requests),
        Sample("active", "Active Request Count", "requests that were accepted and have not ended",
               lambda s: s.num_active),
    ),
)  # fmt: skip
MEMORY = Family(
    "nv_trt_llm_runtime_memory_metrics", GAUGE, "TRT LLM runtime memory metrics", "memory_type",
    (
        Sample("pinned", "Runtime Pinned Memory Usage", "bytes of page-locked host buffers that are kept",
               lambda s: s.memory.pinned),
        Sample("gpu", "Runtime GPU Memory Usage", "bytes of weights and KV cache on the GPU",
               lambda s: s.memory.gpu),
        Sample("cpu", "Runtime CPU Memory Usage", "bytes of weights and KV cache in host memory",
               lambda s: s.memory.cpu),
    ),
)  # fmt: skip
BLOCKS = Family(
    "nv_trt_llm_kv_cache_block_metrics", GAUGE, "TRT LLM KV cache block metrics", "kv_cache_block_type",
    (
        Sample("fraction", "Fraction used KV cache blocks", "used / max", lambda s: s.kv_used_fraction),
        Sample("tokens_per", "Tokens per KV cache block", "tokens that a block holds",
               lambda s: s.kv_tokens_per_block),
        Sample("used", "Used KV cache blocks", "blocks that requests hold; a shared one counts once",
               lambda s: s.kv_used_blocks),
        Sample("free", "Free KV cache blocks", "max - used; blocks kept for reuse are free",
               lambda s: s.kv_free_blocks),
        Sample("max", "Max KV cache blocks", "blocks in the pool", lambda s: s.kv_max_blocks),
        Sample("reused", "Reused KV cache blocks", "blocks that requests found in the cache since the start",
               lambda s: s.kv_reused_blocks),
    ),
)  # fmt: skip
INFLIGHT_BATCHER = Family(
    "nv_trt_llm_inflight_batcher_metrics", GAUGE, "TRT LLM inflight_batcher-specific metrics",
    "inflight_batcher_specific_metric",
    (
        Sample("micro_batch_id", "MicroBatch ID", "the micro batch that ran last; there is one", lambda s: 0),
        Sample("generation_requests", "Generation Requests", "requests of the current batch that generate",
               lambda s: s.num_generation),
        Sample("total_context_tokens", "Total Context Tokens", "prompt tokens in the current batch",
               lambda s: s.num_context_tokens),
        Sample("paused_requests", "Paused Requests", "requests that were paused and have not run since",
               lambda s: s.num_paused),
    ),
)  # fmt: skip
STATIC_BATCHER = Family(
    "nv_trt_llm_v1_metrics", GAUGE, "TRT LLM v1-specific metrics", "v1_specific_metric",
    (
        Sample("total_generation_tokens", "Total Generation Tokens", "tokens that the current batch generates",
               lambda s: s.num_generation),
        Sample("empty_generation_slots", "Empty Generation Slots", "places of the current batch that nobody has",
               lambda s: s.max_requests - s.num_scheduled),
        Sample("total_context_tokens", "Total Context Tokens", "prompt tokens in the current batch",
               lambda s: s.num_context_tokens),
    ),
)  # fmt: skip
GENERAL = Family(
    "nv_trt_llm_general_metrics", GAUGE, "General TRT LLM metrics", "general_type",
    (
        Sample("iteration_counter", "Iteration Counter", "number of the step that ended last",
               lambda s: s.iteration),
        Sample(TIMESTAMP, "Timestamp", "when the samples were refreshed, microseconds since the epoch",
               lambda s: s.timestamp_us),
    ),
)  # fmt: skip
DISAGGREGATED = Family(
    "nv_trt_llm_disaggregated_serving_metrics", COUNTER, "TRT LLM disaggregated serving metrics",
    "disaggregated_serving_type",
    (
        Sample("kv_cache_transfer_ms", "KV cache transfer time", "time spent on moving KV cache between engines, ms",
               lambda s: s.kv_transfer_ms_total),
        Sample("request_count", "Request count", "requests whose KV cache was moved",
               lambda s: s.num_kv_transfers_total),
    ),
)  # fmt: skip


def _finished(reason: FinishReason, meaning: str) -> Sample:
    return Sample(reason.value, "", meaning, lambda s: s.num_finished_total[reason])


def _single(name: str, kind: str, help_text: str, read: Callable[[EngineStats], float]) -> Family:
    return Family(name, kind, help_text, "", (Sample("", "", help_text, read),))


OURS = (
    _single("inflight_prompt_tokens_total", COUNTER, "Prompt tokens of the requests that were started",
            lambda s: s.num_prompt_tokens_total),
    _single("inflight_generated_tokens_total", COUNTER, "Tokens that were generated",
            lambda s: s.num_generated_tokens_total),
    _single("inflight_cached_tokens_total", COUNTER, "Prompt tokens that were found in the KV cache",
            lambda s: s.num_cached_tokens_total),
    _single("inflight_reused_blocks_total", COUNTER, "KV cache blocks that requests found in the cache",
            lambda s: s.kv_reused_blocks),
    _single("inflight_preempted_requests_total", COUNTER, "Requests that were paused to be computed again later",
            lambda s: s.num_paused_total),
    Family(
        "inflight_finished_requests_total", COUNTER, "Requests that ended, by reason", "finish_reason",
        (
            _finished(FinishReason.STOP, "an end id or a stop word came"),
            _finished(FinishReason.LENGTH, "the most tokens were generated"),
            _finished(FinishReason.CANCELLED, "the client left or sent a stop request"),
            _finished(FinishReason.TIMEOUT, "the deadline passed after the first token"),
            _finished(FinishReason.ERROR, "the request failed, or timed out before its first token"),
        ),
    ),
    _single("inflight_engine_healthy", GAUGE, "1 while the engine takes requests, 0 once it has failed",
            lambda s: s.is_healthy),
)  # fmt: skip

HISTOGRAMS = (
    HistogramFamily(
        "nv_llm_input_token_len", "TRT LLM response metrics", "response_metric_type", "total_input_tokens",
        "prompt tokens of a request", lambda s: s.prompt_length,
    ),
    HistogramFamily(
        "nv_llm_output_token_len", "TRT LLM response metrics", "response_metric_type", "total_output_tokens",
        "generated tokens of a request", lambda s: s.output_length,
    ),
    HistogramFamily(
        "inflight_time_to_first_token_seconds", "Seconds from a request's arrival to its first token", "", "",
        "arrival to first token", lambda s: s.time_to_first_token,
    ),
    HistogramFamily(
        "inflight_request_queue_time_seconds", "Seconds from a request's arrival to its first batch", "", "",
        "arrival to first batch", lambda s: s.queue_time,
    ),
    HistogramFamily(
        "inflight_request_latency_seconds", "Seconds from a request's arrival to its end", "", "",
        "arrival to end", lambda s: s.request_latency,
    ),
    HistogramFamily(
        "inflight_inter_token_latency_seconds", "Seconds between two tokens of a request", "", "",
        "token to token", lambda s: s.inter_token_latency, is_native=False,
    ),
)  # fmt: skip


def logged_families(is_static_batching: bool) -> tuple[Family, ...]:
    """The families of the statistics log line, which are all that begin with ``nv_trt_llm``."""
    batcher = STATIC_BATCHER if is_static_batching else INFLIGHT_BATCHER
    return (REQUESTS, MEMORY, BLOCKS, batcher, GENERAL, DISAGGREGATED)


def families(is_static_batching: bool) -> tuple[Family, ...]:
    """All gauges and counters."""
    return logged_families(is_static_batching) + OURS
