"""``ResponseSenderThread``: the one thread of the engine model that talks back to Triton Server.

It sends what the streams have, and on a timer looks for clients that left, for the drain file, and updates the
metrics. It starts and ends with the adapter. It never touches a request but by ``LLM.cancel``.
"""

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from backend_engine.admission import Submission
from backend_engine.errors import EngineError, InvalidRequestError, ShutdownError
from backend_engine.logger import get_logger
from backend_engine.triton_io.engine_request import EngineRequest, EngineRow, NextPieceRequest, StopRequest
from backend_engine.triton_io.error_codes import UNAVAILABLE
from backend_engine.triton_io.piece_group import PieceGroup
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.response_builder import Place, ResponseBuilder, TextSource
from backend_engine.triton_io.response_stream import ResponseStream

_log = get_logger(__name__)

SHUTTING_DOWN = "the engine is shutting down; no new requests are taken"


class Engine(Protocol):
    """What the sender needs of ``LLM``."""

    def submit_all(self, submissions: Sequence[Submission]) -> list[int]: ...

    def cancel(self, request_id: int) -> None: ...

    def detokenizer(self, prompt_token_ids: Any, params: Any, echo: bool = False) -> Any: ...


class SenderSettings(NamedTuple):
    """Periods in milliseconds. ``max_polls``: clients asked per tick, each a call into Triton Server (0.2 ms)."""

    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 100
    drain_file: str = ""
    max_polls: int = 64


class ResponseSenderThread:
    """Opens streams, sends their responses, polls for cancellation.

    ``submit`` and ``stop`` are called by Triton Server's thread, everything else happens on this thread.
    ``update_metrics`` is called every ``stats_check_period_ms``.
    """

    JOIN_TIMEOUT_S = 10.0
    ABANDONED_AFTER_S = 60.0

    def __init__(self, llm: Engine, settings: SenderSettings, update_metrics: Callable[[], None]) -> None:
        self._llm = llm
        self._settings = settings
        self._update_metrics = update_metrics
        self._ready: queue.SimpleQueue[ResponseStream | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live: dict[int, ResponseStream] = {}
        self._piecewise: dict[str, ResponseStream] = {}
        self._groups: dict[str, PieceGroup] = {}
        self._poll_order: deque[ResponseStream] = deque()
        self._is_draining = False
        self._has_reported_drain = False
        self._next_poll = self._next_stats = 0.0
        self._thread = threading.Thread(target=self._run, name="response-sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: EngineRequest, reply: Reply) -> None:
        """Hand ``request`` to the engine and answer it through ``reply``; a refusal is answered too."""
        refusal: EngineError | None = None
        try:
            builders = self._builders(request)
        except EngineError as error:
            builders, refusal = [ResponseBuilder(request.rows[0], None)], error
        stream = ResponseStream(reply, builders, self._ready.put, self._join_group(request.options.piece_group))
        with self._lock:
            if self._is_draining:
                refusal = ShutdownError(SHUTTING_DOWN)
            self._live[id(stream)] = stream
            if stream.options.piecewise:
                self._piecewise[stream.options.client_id] = stream
        self._poll_order.append(stream)
        if refusal is None:
            try:
                stream.request_ids = tuple(self._llm.submit_all(_submissions(request, stream)))
            except EngineError as error:
                refusal = error
        if refusal is not None:
            stream.fail(refusal)

    def _join_group(self, group_id: str) -> PieceGroup | None:
        if not group_id:
            return None
        with self._lock:
            group = self._groups.setdefault(group_id, PieceGroup())
            group.num_members += 1
        return group

    def _builders(self, request: EngineRequest) -> list[ResponseBuilder]:
        """One a sequence, rows in order and each row's sequences in order."""
        return [
            ResponseBuilder(row, self._text_source(row), Place(index, len(request.rows), sequence, num_sequences))
            for index, row in enumerate(request.rows)
            for num_sequences in (row.sampling_params.n,)
            for sequence in range(num_sequences)
        ]

    def _text_source(self, row: EngineRow) -> TextSource | None:
        options = row.options
        if not options.detokenize:
            return None
        echo = not options.streaming and not options.exclude_input
        source: TextSource = self._llm.detokenizer(row.prompt_token_ids, row.sampling_params, echo=echo)
        return source

    def stop(self, request: StopRequest) -> int:
        """End the running requests of a client id, and return how many there were."""
        with self._lock:
            found = [stream for stream in self._live.values() if stream.options.client_id == request.client_id]
        for stream in found:
            self._cancel(stream)
        if not found:
            _log.warning("a stop request names %r, which is not running", request.client_id[:64])
        return len(found)

    def next_piece(self, request: NextPieceRequest, reply: Reply) -> None:
        """Answer ``reply`` with what a piecewise request or a group has to say next, once there is something."""
        with self._lock:
            waited_for = self._groups.get(request.client_id) or self._piecewise.get(request.client_id)
        if waited_for is None:
            raise InvalidRequestError("there is no piecewise request with this id")
        waited_for.resume(reply)

    def close(self) -> None:
        """Send what is left, end what is unfinished, and stop the thread. Call after ``LLM.shutdown``."""
        self._ready.put(None)
        self._thread.join(self.JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("the response sender did not end within %g s", self.JOIN_TIMEOUT_S)
        self._poll_order.clear()
        self._update_metrics = _no_metrics

    def _cancel(self, stream: ResponseStream) -> None:
        for request_id in stream.request_ids:
            self._llm.cancel(request_id)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            with self._lock:
                left = list(self._live.values())
            for stream in left:
                stream.flush()
                stream.close(UNAVAILABLE, SHUTTING_DOWN)
            self._send_groups(left)
            for stream in left:
                self._forget(stream)

    def _serve(self) -> bool:
        """Send for the streams that have something, or let the timer run; False when asked to stop.

        What a step has given to many streams is taken together, so that a group's pieces leave in one response.
        """
        wait = max(0.0, min(self._next_poll, self._next_stats) - time.monotonic())
        try:
            taken = [self._ready.get(timeout=wait)]
        except queue.Empty:
            self._tick()
            return True
        taken += [self._ready.get_nowait() for _ in range(self._ready.qsize())]
        streams = [stream for stream in taken if stream is not None]
        for stream in streams:
            if stream.flush():
                self._cancel(stream)
        self._send_groups(streams)
        for stream in streams:
            if stream.is_closed:
                self._forget(stream)
        if wait == 0:
            self._tick()
        return None not in taken

    def _send_groups(self, streams: Sequence[ResponseStream]) -> None:
        for group in {id(stream.group): stream.group for stream in streams if stream.group is not None}.values():
            group.send()

    def _forget(self, stream: ResponseStream) -> None:
        """Let go of a stream that has ended; the last one of a group takes the group along."""
        group_id, left = stream.options.piece_group, None
        with self._lock:
            is_known = self._live.pop(id(stream), None) is not None
            if self._piecewise.get(stream.options.client_id) is stream:
                del self._piecewise[stream.options.client_id]
            if is_known and stream.group is not None:
                stream.group.forget(stream)
                stream.group.num_members -= 1
                if stream.group.num_members == 0:
                    left = self._groups.pop(group_id)
        if left is not None:
            left.close(UNAVAILABLE, "the requests of this group have ended")

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + self._settings.cancellation_check_period_ms / 1000
            self._poll()
            self._drain()
        if now >= self._next_stats:
            self._next_stats = now + self._settings.stats_check_period_ms / 1000
            self._refresh_metrics()

    def _refresh_metrics(self) -> None:
        try:
            self._update_metrics()
        except ShutdownError:
            self._update_metrics = _no_metrics

    def _poll(self) -> None:
        """Ask for some live streams, in turn, whether their client is gone."""
        num_polls = 0
        for _ in range(len(self._poll_order)):
            stream = self._poll_order.popleft()
            if stream.is_closed:
                continue
            self._poll_order.append(stream)
            if stream.poll_cancelled():
                self._cancel(stream)
            if stream.is_abandoned(self.ABANDONED_AFTER_S):
                self._cancel(stream)
                stream.close(UNAVAILABLE, SHUTTING_DOWN)
                self._forget(stream)
            num_polls += 1
            if num_polls >= self._settings.max_polls:
                return

    def _drain(self) -> None:
        """When the drain file appears: refuse new requests, end the live ones, then say so beside it."""
        if not self._settings.drain_file or self._has_reported_drain:
            return
        if not self._is_draining:
            if not Path(self._settings.drain_file).exists():
                return
            _log.info("the drain file is there: running requests end, new ones are refused")
        with self._lock:
            self._is_draining = True
            live = list(self._live.values())
        for stream in live:
            self._cancel(stream)
        if not live:
            Path(self._settings.drain_file + ".done").touch()
            self._has_reported_drain = True


def _submissions(request: EngineRequest, stream: ResponseStream) -> list[Submission]:
    """The sequences of ``request`` in the order of its stream's parts. Those of a row share a fresh seed."""
    submissions: list[Submission] = []
    for row in request.rows:
        options, params = row.options, row.sampling_params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        submissions += [
            Submission(
                row.prompt_token_ids,
                params,
                stream.sink(len(submissions) + sequence),
                client_id=options.client_id,
                cache_salt=options.cache_salt,
                priority=options.priority,
                deadline_s=options.deadline_s,
                queue_timeout_s=options.queue_timeout_s,
                seed=seed,
                sequence_index=sequence,
            )
            for sequence in range(params.n)
        ]
    return submissions


def _no_metrics() -> None:
    """Stands in for the metrics of an engine that was shut down."""
