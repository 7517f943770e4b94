"""What the executor counts: one ``IterationStats`` a step in a ring, and ``EngineStats`` as a snapshot.

Written by the executor thread; a snapshot may be taken by any thread. Keeps no request.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


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


@dataclass(frozen=True)
class EngineStats:
    """The engine at a moment. ``*_total`` only ever grow; the rest are levels."""

    num_waiting: int
    num_context: int
    num_scheduled: int
    num_active: int
    max_requests: int
    kv_used_blocks: int
    kv_free_blocks: int
    kv_max_blocks: int
    kv_tokens_per_block: int
    kv_reused_blocks: int
    num_paused_total: int
    num_cached_tokens_total: int
    num_generated_tokens_total: int
    iteration: int
    is_healthy: bool


class StatsRecorder:
    """Totals since start and the last ``capacity`` steps."""

    def __init__(self, capacity: int = 1000) -> None:
        self._ring: deque[IterationStats] = deque(maxlen=capacity)
        self.num_paused = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_context = 0
        self.num_scheduled = 0
        self.iteration = 0

    def record(self, stats: IterationStats) -> None:
        """Add one step."""
        self._ring.append(stats)
        self.iteration = stats.step
        self.num_paused += stats.num_paused
        self.num_context = stats.num_context
        self.num_scheduled = stats.num_context + stats.num_generation

    def note_idle(self) -> None:
        """Nothing is scheduled now."""
        self.num_context = self.num_scheduled = 0

    def recent(self) -> list[IterationStats]:
        """The retained steps, oldest first."""
        return list(self._ring)
