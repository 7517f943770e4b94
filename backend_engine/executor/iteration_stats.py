"""Statistics as data: ``IterationStats`` of one step, and ``EngineStats``, a snapshot of the engine.

Made by ``StatsRecorder``, handed out by ``LLM``, turned into metrics by ``triton_io``, which alone names these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from backend_engine.core.request import FinishReason
from backend_engine.executor.histogram import HistogramTotals


class IterationStats(NamedTuple):
    """One step: how much was in it and where its time went (milliseconds)."""

    step: int
    num_context: int
    num_generation: int
    num_tokens: int
    num_paused: int
    kv_used_blocks: int
    num_waiting: int
    schedule_ms: float
    forward_ms: float
    decode_ms: float
    emit_ms: float


class RuntimeMemory(NamedTuple):
    """Bytes that the weights and the KV pool take, by where they are; ``pinned``: kept page-locked host buffers."""

    pinned: int = 0
    gpu: int = 0
    cpu: int = 0


@dataclass(frozen=True)
class EngineStats:
    """The engine at a moment. ``*_total`` and histograms only ever grow; the rest are levels.

    ``num_active`` requests were accepted and have not ended: ``num_scheduled`` in the current batch (``num_context``
    of them in the context phase, the others generate), the others wait. Histograms in seconds and in tokens; those of
    requests have one value a sequence: the queue time of those that ran, the time to first token of those that had
    one, the latency of those that ended without an error. The lengths have one value a client request, the output of
    all its sequences added up, unless one failed. ``failure``: why the engine is dead, empty while it
    lives. ``timestamp_us``: wall clock of the snapshot.
    """

    num_waiting: int
    num_context: int
    num_generation: int
    num_scheduled: int
    num_active: int
    num_paused: int
    num_context_tokens: int
    max_requests: int
    is_static_batching: bool
    memory: RuntimeMemory
    kv_used_blocks: int
    kv_free_blocks: int
    kv_max_blocks: int
    kv_tokens_per_block: int
    kv_reused_blocks: int
    num_paused_total: int
    num_cached_tokens_total: int
    num_prompt_tokens_total: int
    num_generated_tokens_total: int
    num_finished_total: Mapping[FinishReason, int]
    num_kv_transfers_total: int
    kv_transfer_ms_total: int
    time_to_first_token: HistogramTotals
    inter_token_latency: HistogramTotals
    queue_time: HistogramTotals
    request_latency: HistogramTotals
    prompt_length: HistogramTotals
    output_length: HistogramTotals
    iteration: int
    is_healthy: bool
    failure: str
    timestamp_us: int = field(compare=False)

    @property
    def kv_used_fraction(self) -> float:
        """Share of the KV cache's blocks in use."""
        return self.kv_used_blocks / max(1, self.kv_max_blocks)
