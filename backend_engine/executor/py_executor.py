"""``PyExecutor``: the loop that turns requests into tokens, and the only place that knows both wings.

One thread calls ``step`` again and again; each step calls every room once, in one order. Other threads only
``enqueue``, ``cancel``, read ``stats`` and ``shutdown``. Cancellation enters at admit, failure leaves at emit.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.outputs import DecoderOutput, RequestOutput
from backend_engine.core.request import FinishReason, LlmRequest
from backend_engine.errors import DeadlineExceededError, EngineError, OutOfCapacityError, StepFailedError
from backend_engine.executor.deadlines import Deadlines
from backend_engine.executor.final_output import final_output, with_extras
from backend_engine.executor.iteration_stats import EngineStats, IterationStats
from backend_engine.executor.outbox import Outbox
from backend_engine.executor.request_queue import RequestQueue
from backend_engine.executor.rooms import DecodeHandleRoom, Rooms
from backend_engine.executor.stats_recorder import LiveLevels, StatsRecorder
from backend_engine.executor.stop_criteria import Finish, finish_reason
from backend_engine.executor.watchdog import Watchdog
from backend_engine.logger import get_logger

_logger = get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 3
STUCK_POLL_S = 0.01
DEFAULT_STEP_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 30.0


class _Launched(NamedTuple):
    """A step whose tokens are on their way, and when its stages began (``perf_counter`` seconds)."""

    output: SchedulerOutput
    handle: DecodeHandleRoom
    marks: tuple[float, float, float]


class PyExecutor:
    """Runs requests to their end. ``max_batch_size`` is reported in the statistics only.

    A step that runs for ``step_timeout_s`` counts as stuck, and the engine as dead (``declare_dead``).

    ``depth`` is how many steps may be on their way: 1 waits for each step's tokens before the next is planned;
    2 would plan step N+1 while the device computes step N (``promise`` and ``advance`` are kept for that).
    """

    def __init__(
        self,
        rooms: Rooms,
        *,
        max_batch_size: int,
        max_queue_size: int = 0,
        check_invariants: bool = False,
        depth: int = 1,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        recorder: StatsRecorder | None = None,
    ) -> None:
        self._scheduler = rooms.scheduler
        self._kv_cache = rooms.kv_cache
        self._model_engine = rooms.model_engine
        self._decoder = rooms.decoder
        self._faults = rooms.faults
        self._dump = rooms.dump
        self._max_batch_size = max_batch_size
        self._check_invariants = check_invariants
        self._depth = depth
        self._queue = RequestQueue(max_queue_size)
        self._deadlines = Deadlines()
        self._requests: dict[int, LlmRequest] = {}
        self._launched: deque[_Launched] = deque()
        self._outgoing: list[tuple[LlmRequest, RequestOutput]] = []
        self._recorder = recorder or StatsRecorder()
        self._failures_in_a_row = 0
        self._stopping = threading.Event()
        self._outbox = Outbox()
        self.step_began: float | None = None
        self.thread = threading.Thread(target=self._run, name="py-executor", daemon=True)
        self._watchdog = Watchdog(self, step_timeout_s)

    # What other threads may call.

    def start(self) -> None:
        """Start the executor thread, and the watchdog that looks at it."""
        self.thread.start()
        self._watchdog.start()

    def enqueue(self, requests: Sequence[LlmRequest]) -> None:
        """Hand over all requests or none. ``OutOfCapacityError``: the queue is full, ``ShutdownError``: closed."""
        with self._recorder.accepting(requests):
            self._queue.put(requests)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step; its sink gets a final output. Unknown ids are harmless."""
        self._queue.cancel(request_id)

    def shutdown(self) -> None:
        """End all requests (their sinks get a final output), stop the thread and wait for it, unless it is stuck."""
        self._queue.close("the engine is shutting down")
        self._stopping.set()
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        if threading.current_thread() is self.thread:
            return
        while self.thread.is_alive() and not self._outbox.closed_because and time.monotonic() < deadline:
            self.thread.join(0.1)
        self._watchdog.stop()
        if self.thread.is_alive():
            self.declare_dead(f"the engine did not stop within {JOIN_TIMEOUT_S:g} s")
            _logger.error("the executor thread is stuck and is left behind")

    def declare_dead(self, reason: str) -> None:
        """The engine is over: refuse new requests and end all living ones with an error, both saying why.

        Called by the watchdog while the executor thread hangs, or by that thread at its end. From here on nothing that
        the executor thread does leaves the engine; should its step come back, it ends. It alone still touches requests,
        scheduler, KV cache, decoder and device.
        """
        if self._outbox.closed_because:
            return
        _logger.error("the engine is dead: %s", reason)
        self._stopping.set()
        self._queue.close(reason)
        self._outbox.close_with(reason)
        self._outbox.admit(self._queue.take(0).requests)

    @property
    def is_healthy(self) -> bool:
        """False once the engine is dead or several steps in a row have failed; it then refuses requests."""
        return self._failures_in_a_row < MAX_FAILURES_IN_A_ROW and not self._outbox.closed_because

    @property
    def is_stopping(self) -> bool:
        """True once the executor thread is meant to end."""
        return self._stopping.is_set()

    def stats(self) -> EngineStats:
        """Snapshot for metrics."""
        kv = self._kv_cache
        live = LiveLevels(
            num_inbox=len(self._queue), max_requests=self._max_batch_size, kv_max_blocks=kv.num_total_blocks,
            kv_tokens_per_block=kv.tokens_per_block, kv_reused_blocks=kv.num_reused_blocks_total,
            is_healthy=self.is_healthy, failure=self._outbox.closed_because,
        )  # fmt: skip
        return self._recorder.snapshot(live)

    def recent_iterations(self) -> list[IterationStats]:
        """Statistics of the last steps, oldest first."""
        return self._recorder.recent()

    # The executor thread.

    def step(self) -> bool:
        """One iteration. Returns False when there was nothing to run."""
        self._admit()
        started = time.perf_counter()
        output = self._scheduler.schedule(self._kv_cache)
        if output.batch_size:
            try:
                self._prepare(output)
                forward_at = time.perf_counter()
                logits = self._model_engine.forward(output, self._kv_cache.block_tables(output))
                self._advance(output)
                decode_at = time.perf_counter()
                handle = self._decoder.decode_async(logits, output)
                self._launched.append(_Launched(output, handle, (started, forward_at, decode_at)))
            except Exception as error:
                self._fail(output, error)
        else:
            self._recorder.note_batch(output, len(self._requests), self._kv_cache.num_free_blocks)
        if self._launched and (len(self._launched) >= self._depth or not output.batch_size):
            oldest = self._launched.popleft()
            try:
                decoded = oldest.handle.wait()
                finished = self._apply(oldest.output, decoded)
                self._settle(oldest.output, finished)
                self._failures_in_a_row = 0
            except Exception as error:
                self._fail(oldest.output, error)
            self._emit(oldest)
        elif self._outgoing:
            self._emit(None)
        return bool(output.batch_size)

    def _run(self) -> None:
        """Body of the executor thread: step while there is work, sleep while there is none."""
        try:
            while not self._stopping.is_set() and self.is_healthy:
                self.step_began = time.monotonic()
                has_run = self.step()
                self.step_began = None
                if not has_run:
                    self._queue.wait(self._idle_timeout())
        finally:
            if not self._stopping.is_set():
                self.declare_dead(_why_stopped(self._failures_in_a_row))
            self._end_everything()

    def _idle_timeout(self) -> float | None:
        if self._launched or self._scheduler.num_waiting or self._scheduler.num_running:
            return STUCK_POLL_S
        pause = self._deadlines.next_time() - time.monotonic()
        return None if math.isinf(pause) else max(pause, 0.0)

    def _admit(self) -> None:
        """Take what arrived: new requests, cancellations, and requests whose time is up."""
        inbox = self._queue.take(self._scheduler.num_waiting)
        self._outbox.admit(inbox.requests)
        for request in inbox.requests:
            self._requests[request.request_id] = request
            self._scheduler.add(request)
            self._deadlines.add(request)
        for request_id in inbox.cancelled:
            live = self._requests.get(request_id)
            if live is not None:
                self._end(live, FinishReason.CANCELLED)
        now = time.monotonic()
        if self._deadlines.next_time() <= now:
            for request in self._deadlines.due(now, self._requests):
                self._end_late(request, now)
        if self._outgoing:
            self._emit(None)

    def _prepare(self, output: SchedulerOutput) -> None:
        """Apply what the plan decided about requests, and give every row its blocks."""
        self._dump.write(output)
        for request in output.paused:
            request.pause()
        self._kv_cache.prepare_resources(output)
        self._recorder.note_batch(output, len(self._requests), self._kv_cache.num_free_blocks)
        for row in output.context:
            request = row.request
            if row.num_reused_tokens:
                request.reuse(row.num_reused_tokens)
                self._recorder.note_reuse(row.num_reused_tokens)
            if request.first_scheduled_time is None:
                request.first_scheduled_time = time.monotonic()
                self._recorder.note_started(request)
        self._faults.before_forward(output)

    def _advance(self, output: SchedulerOutput) -> None:
        """The step is launched: its tokens count as computed, and its new ones as promised."""
        for request, start, num_tokens, needs_logits, _ in output.rows:
            assert start == request.num_computed_tokens, (start, request)
            request.advance(num_tokens)
            if needs_logits:
                request.promise()
        for row in output.context:
            row.request.count_context_logits()

    def _apply(self, output: SchedulerOutput, decoded: DecoderOutput) -> list[LlmRequest]:
        """Give each request its token; return those that end with it."""
        finished: list[LlmRequest] = []
        outgoing, failures = self._outgoing, decoded.failures
        is_plain = decoded.logprobs is None and not decoded.generation_logits
        num_generated, now = 0, time.monotonic()
        gaps: list[float] = []
        for request_id, values in decoded.context_logits.items():
            asking = self._requests.get(request_id)
            if asking is not None:
                outgoing.append((asking, RequestOutput(request_id, [], context_logits=values)))
        for index, (row, token_id) in enumerate(zip(output.logits_rows, decoded.token_ids, strict=True)):
            request = row.request
            if request.finish_reason is not None:
                continue
            failure = failures.get(request.request_id) if failures else None
            if failure is not None:
                request.finish(FinishReason.ERROR, error=failure)
                finished.append(request)
                outgoing.append((request, final_output(request, [], self._kv_cache.usage(request.request_id))))
                continue
            finish = finish_reason(request, token_id)
            token_ids = [token_id] if finish is None or finish.keep_token else []
            if token_ids:
                request.append_token(token_id)
                num_generated += 1
                last = request.last_token_time
                if last is None:
                    request.first_token_time = now
                    self._recorder.note_first_token(request)
                else:
                    gaps.append(now - last)
                request.last_token_time = now
                if request.stop_matcher is not None:
                    word = request.stop_matcher.append(token_id)
                    if word is not None:
                        finish = Finish(FinishReason.STOP, word, True)
            if finish is None:
                new = RequestOutput(request.request_id, token_ids)
            else:
                request.finish(finish.reason, stop_reason=finish.stop_reason)
                finished.append(request)
                new = final_output(request, token_ids, self._kv_cache.usage(request.request_id))
            outgoing.append((request, new if is_plain else with_extras(new, decoded, index)))
        self._recorder.note_tokens(num_generated, gaps)
        return finished

    def _settle(self, output: SchedulerOutput, finished: Iterable[LlmRequest]) -> None:
        """Index the blocks that filled up; give back everything of those that ended."""
        self._kv_cache.update_resources(output)
        for request in finished:
            self._forget(request)
        if self._check_invariants:
            self._kv_cache.check_integrity(self._requests.values())

    def _emit(self, launched: _Launched | None) -> None:
        """Hand the outputs to their sinks. A sink that raises ends its request."""
        emit_at = time.perf_counter()
        self._recorder.note_left(len(self._requests), self._kv_cache.num_free_blocks)
        outgoing, self._outgoing = self._outgoing, []
        for request_id in self._outbox.send(outgoing):
            self._queue.cancel(request_id)
        self._queue.note_waiting(self._scheduler.num_waiting)
        if launched is not None:
            self._record(launched, emit_at)

    def _record(self, launched: _Launched, emit_at: float) -> None:
        output, (schedule_at, forward_at, decode_at) = launched.output, launched.marks
        now = time.perf_counter()
        self._recorder.record(
            IterationStats(
                step=output.step,
                num_context=len(output.context),
                num_generation=len(output.generation),
                num_tokens=output.num_tokens,
                num_paused=len(output.paused),
                kv_used_blocks=self._kv_cache.num_used_blocks,
                num_waiting=self._scheduler.num_waiting,
                schedule_ms=(forward_at - schedule_at) * 1e3,
                forward_ms=(decode_at - forward_at) * 1e3,
                decode_ms=(emit_at - decode_at) * 1e3,
                emit_ms=(now - emit_at) * 1e3,
            )
        )

    # Ends other than a last token.

    def _end(self, request: LlmRequest, reason: FinishReason, error: EngineError | None = None) -> None:
        """End a living request now, whatever it is doing."""
        request.finish(reason, error=error)
        kv_usage = self._kv_cache.usage(request.request_id)
        self._forget(request)
        self._outgoing.append((request, final_output(request, [], kv_usage)))

    def _end_late(self, request: LlmRequest, now: float) -> None:
        if request.limits.deadline is not None and request.limits.deadline <= now:
            nothing_yet = not request.output_token_ids
            error = (
                DeadlineExceededError("the request's deadline passed before its first token") if nothing_yet else None
            )
            self._end(request, FinishReason.ERROR if nothing_yet else FinishReason.TIMEOUT, error)
        else:
            waited = now - request.arrival_time
            self._end(request, FinishReason.ERROR, OutOfCapacityError(f"timed out after {waited:.1f} s in the queue"))

    def _forget(self, request: LlmRequest) -> None:
        self._recorder.note_end(request)
        self._scheduler.remove(request)
        self._kv_cache.free_resources(request)
        self._decoder.remove(request.request_id)
        del self._requests[request.request_id]

    def _fail(self, output: SchedulerOutput, error: Exception) -> None:
        """A step failed: its requests end with an error, all others go on."""
        self._failures_in_a_row += 1
        _logger.error(
            "step %d with %d requests failed: %s", output.step, output.batch_size, error,
            exc_info=None if isinstance(error, EngineError) else error,
        )  # fmt: skip
        for row in output.rows:
            request = row.request
            if not request.is_finished:
                self._end(request, FinishReason.ERROR, StepFailedError(f"the step of this request failed: {error}"))
            elif request.request_id in self._requests:
                self._forget(request)

    def _end_everything(self) -> None:
        """The thread's last act: nothing is left without a final output."""
        late = self._queue.take(self._scheduler.num_waiting).requests
        self._outbox.admit(late)
        for request in late:
            self._requests[request.request_id] = request
            self._scheduler.add(request)
        self._launched.clear()
        for request in list(self._requests.values()):  # the outbox of a dead engine has answered them with an error
            self._end(request, FinishReason.ERROR if self._outbox.closed_because else FinishReason.CANCELLED)
        self._emit(None)


def _why_stopped(failures_in_a_row: int) -> str:
    if failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
        return f"the engine has stopped after {failures_in_a_row} failed steps in a row; see the log"
    return "the engine has stopped after an internal failure; see the log"
