"""``StatsRecorder``: what the executor counts; each step's statistics in a ring, and snapshots of it all.

Written by the executor thread; a snapshot may be taken by any thread. The cost of a step does not grow with its
requests but for one list of gaps between tokens. Decides nothing.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.request import FinishReason, LlmRequest
from backend_engine.errors import EngineError
from backend_engine.executor.histogram import Histogram
from backend_engine.executor.iteration_stats import EngineStats, IterationStats, RuntimeMemory

LATENCY_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
LENGTH_BOUNDS = (10, 50, 100, 500, 1000)


class BatchLevels(NamedTuple):
    """The current batch without what has ended, and what it leaves: replaced as one, so that readers see one moment.

    ``num_live``: requests that were admitted and have not ended. ``num_paused``: those of them that were paused and
    have not run since.
    """

    num_live: int = 0
    num_context: int = 0
    num_generation: int = 0
    num_context_tokens: int = 0
    num_paused: int = 0
    kv_free_blocks: int | None = None


class LiveLevels(NamedTuple):
    """What the executor knows better than the recorder at the moment of a snapshot."""

    num_inbox: int
    max_requests: int
    kv_max_blocks: int
    kv_tokens_per_block: int
    kv_reused_blocks: int
    is_healthy: bool
    failure: str


class _Group:
    """The answers to one prompt, whose lengths are told as one."""

    def __init__(self) -> None:
        self.num_left = 0
        self.num_output_tokens = 0
        self.has_failed = False


class StatsRecorder:
    """Totals since start, the current batch's levels, and the last ``capacity`` steps.

    ``is_static_batching`` and ``memory`` are reported as they are. All ``note_*`` are called by the
    executor thread; times are ``time.monotonic`` seconds.
    """

    def __init__(
        self,
        capacity: int = 1000,
        *,
        is_static_batching: bool = False,
        memory: RuntimeMemory = RuntimeMemory(),
    ) -> None:
        self._ring: deque[IterationStats] = deque(maxlen=capacity)
        self._is_static_batching = is_static_batching
        self._memory = memory
        self._lock = threading.Lock()
        self._levels = BatchLevels()
        self._batch: SchedulerOutput | None = None
        self._paused: set[int] = set()
        self._groups: dict[int, _Group] = {}
        self._num_paused = self._num_cached_tokens = self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_kv_transfers = self._kv_transfer_ms = 0
        self._num_finished = dict.fromkeys(FinishReason, 0)
        self._time_to_first_token = Histogram(LATENCY_BOUNDS_S)
        self._inter_token_latency = Histogram(LATENCY_BOUNDS_S)
        self._queue_time = Histogram(LATENCY_BOUNDS_S)
        self._request_latency = Histogram(LATENCY_BOUNDS_S)
        self._prompt_length = Histogram(LENGTH_BOUNDS)
        self._output_length = Histogram(LENGTH_BOUNDS)
        self._iteration = 0

    @contextlib.contextmanager
    def accepting(self, requests: Sequence[LlmRequest]) -> Iterator[None]:
        """Around handing over the sequences of one client request; a refusal (an exception) undoes it. Any thread.

        A new prompt begins at each sequence 0.
        """
        with self._lock:
            group = _Group()
            for request in requests:
                if request.sequence_index == 0:
                    group = _Group()
                group.num_left += 1
                self._groups[request.request_id] = group
        try:
            yield
        except EngineError:
            with self._lock:
                for request in requests:
                    del self._groups[request.request_id]
            raise

    def note_batch(self, output: SchedulerOutput, num_live: int, kv_free_blocks: int) -> None:
        """A step starts, or finds nothing to run: ``output`` is the current batch."""
        self._batch = output if output.batch_size else None
        if self._paused:
            self._paused.difference_update(row.request.request_id for row in output.context)
        if output.paused:
            self._paused.update(request.request_id for request in output.paused)
            with self._lock:
                self._num_paused += len(output.paused)
        self._levels = BatchLevels(
            num_live, len(output.context), len(output.generation), output.num_context_tokens, len(self._paused),
            kv_free_blocks,
        )  # fmt: skip

    def note_left(self, num_live: int, kv_free_blocks: int) -> None:
        """Requests may have ended: what is left of the current batch. Call before their sinks hear of it."""
        if num_live == self._levels.num_live:
            self._levels = self._levels._replace(kv_free_blocks=kv_free_blocks)
            return
        batch = self._batch
        context = [row for row in batch.context if not row.request.is_finished] if batch is not None else []
        generation = [row for row in batch.generation if not row.request.is_finished] if batch is not None else []
        self._levels = BatchLevels(
            num_live, len(context), len(generation), sum(row.num_tokens for row in context), len(self._paused),
            kv_free_blocks,
        )  # fmt: skip

    def note_reuse(self, num_tokens: int) -> None:
        """A request, new or resumed, found its first ``num_tokens`` in the KV cache."""
        with self._lock:
            self._num_cached_tokens += num_tokens

    def note_started(self, request: LlmRequest) -> None:
        """A request is in a batch for the first time."""
        assert request.first_scheduled_time is not None, request
        with self._lock:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._queue_time.add(request.first_scheduled_time - request.arrival_time)

    def note_first_token(self, request: LlmRequest) -> None:
        """A request has its first token."""
        assert request.first_token_time is not None, request
        with self._lock:
            self._time_to_first_token.add(request.first_token_time - request.arrival_time)

    def note_tokens(self, num_tokens: int, gaps: Sequence[float]) -> None:
        """A step gave ``num_tokens`` new tokens; ``gaps``: seconds since the token before, of those that had one."""
        with self._lock:
            self._num_generated_tokens += num_tokens
            if gaps:
                self._inter_token_latency.add_all(gaps)

    def note_end(self, request: LlmRequest) -> None:
        """A request has ended, whatever for."""
        now = time.monotonic()
        reason = request.finish_reason
        assert reason is not None, request
        self._paused.discard(request.request_id)
        with self._lock:
            self._num_finished[reason] += 1
            group = self._groups.pop(request.request_id)
            group.num_left -= 1
            group.num_output_tokens += len(request.output_token_ids)
            if reason is FinishReason.ERROR:
                group.has_failed = True
            else:
                self._request_latency.add(now - request.arrival_time)
            if not group.num_left and not group.has_failed:
                self._prompt_length.add(len(request.prompt_token_ids))
                self._output_length.add(group.num_output_tokens)

    def record(self, stats: IterationStats) -> None:
        """Add one step."""
        self._ring.append(stats)
        self._iteration = stats.step

    def recent(self) -> list[IterationStats]:
        """The retained steps, oldest first."""
        return list(self._ring)

    def snapshot(self, live: LiveLevels) -> EngineStats:
        """Everything now. Requests that nobody has admitted yet (``num_inbox``) are active and wait. A dead engine has
        answered all it had with an error, whatever its thread still believes.
        """
        levels = BatchLevels(kv_free_blocks=self._levels.kv_free_blocks) if live.failure else self._levels
        num_scheduled = levels.num_context + levels.num_generation
        num_active = levels.num_live + live.num_inbox
        kv_free_blocks = live.kv_max_blocks if levels.kv_free_blocks is None else levels.kv_free_blocks
        with self._lock:
            return EngineStats(
                num_waiting=num_active - num_scheduled,
                num_context=levels.num_context,
                num_generation=levels.num_generation,
                num_scheduled=num_scheduled,
                num_active=num_active,
                num_paused=levels.num_paused,
                num_context_tokens=levels.num_context_tokens,
                max_requests=live.max_requests,
                is_static_batching=self._is_static_batching,
                memory=self._memory,
                kv_used_blocks=live.kv_max_blocks - kv_free_blocks,
                kv_free_blocks=kv_free_blocks,
                kv_max_blocks=live.kv_max_blocks,
                kv_tokens_per_block=live.kv_tokens_per_block,
                kv_reused_blocks=live.kv_reused_blocks,
                num_paused_total=self._num_paused,
                num_cached_tokens_total=self._num_cached_tokens,
                num_prompt_tokens_total=self._num_prompt_tokens,
                num_generated_tokens_total=self._num_generated_tokens,
                num_finished_total=self._finished(bool(live.failure)),
                num_kv_transfers_total=self._num_kv_transfers,
                kv_transfer_ms_total=self._kv_transfer_ms,
                time_to_first_token=self._time_to_first_token.totals(),
                inter_token_latency=self._inter_token_latency.totals(),
                queue_time=self._queue_time.totals(),
                request_latency=self._request_latency.totals(),
                prompt_length=self._prompt_length.totals(),
                output_length=self._output_length.totals(),
                iteration=self._iteration,
                is_healthy=live.is_healthy,
                failure=live.failure,
                timestamp_us=time.time_ns() // 1000,
            )

    def _finished(self, is_dead: bool) -> dict[FinishReason, int]:
        finished = dict(self._num_finished)
        if is_dead:
            finished[FinishReason.ERROR] += len(self._groups)
        return finished
