"""``Outbox``: what the engine still owes to whom, and the one lock through which every output leaves.

The executor thread admits requests and sends their outputs. Once the watchdog (or the dying executor thread itself)
has called ``close_with`` the debts are its own: it answers every living request with an error, and whatever the
executor thread sends afterwards is dropped. So each request gets one final output, whoever comes first.
"""

import threading
from collections.abc import Iterable

from backend_engine.core.outputs import RequestOutput, Usage
from backend_engine.core.request import FinishReason, LlmRequest
from backend_engine.errors import EngineError, ShutdownError, StepFailedError
from backend_engine.logger import get_logger

_logger = get_logger(__name__)

BLOCKED_SINK_S = 1.0


class Outbox:
    """Sends outputs to sinks until it is closed. Sinks neither raise nor block; one that does harms itself alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unanswered: dict[int, LlmRequest] = {}
        self._closed_because = ""

    def __len__(self) -> int:
        """Requests that were admitted and have not got their final output."""
        return len(self._unanswered)

    @property
    def closed_because(self) -> str:
        """Why nothing leaves any more; empty while the outbox is open."""
        return self._closed_because

    def admit(self, requests: Iterable[LlmRequest]) -> None:
        """Owe each request a final output. When the outbox is closed they get it now."""
        with self._lock:
            for request in requests:
                self._unanswered[request.request_id] = request
            late = self._take_all() if self._closed_because else []
        self._answer(late)

    def send(self, outgoing: Iterable[tuple[LlmRequest, RequestOutput]]) -> list[int]:
        """Hand the outputs to their sinks, in order; return the ids of the requests whose sink raised."""
        failed: list[int] = []
        with self._lock:
            for request, output in outgoing:
                # Looked at for each output: a sink that blocked may have been overtaken by ``close_with``.
                if self._closed_because:
                    break
                if output.finished:
                    self._unanswered.pop(request.request_id, None)
                if not _hand_over(request, output):
                    failed.append(request.request_id)
        return failed

    def close_with(self, reason: str) -> None:
        """Send nothing of the executor's from now on, and end every living request with an error that says why.

        Called by any thread; only the first call counts. Does not wait for ever for a sink that blocks.
        """
        if self._closed_because:
            return
        self._closed_because = reason
        is_mine = self._lock.acquire(timeout=BLOCKED_SINK_S)
        try:
            living = self._take_all()
        finally:
            if is_mine:
                self._lock.release()
        if not is_mine:
            _logger.error("a sink has blocked the engine's outputs for %g s", BLOCKED_SINK_S)
        self._answer(living)

    def _take_all(self) -> list[LlmRequest]:
        living, self._unanswered = list(self._unanswered.values()), {}
        return living

    def _answer(self, living: list[LlmRequest]) -> None:
        """Final outputs with an error. The requests themselves belong to the executor thread and are only read."""
        for request in living:
            was_run = request.first_scheduled_time is not None
            error: EngineError = (StepFailedError if was_run else ShutdownError)(self._closed_because)
            reason = FinishReason.ERROR
            final = RequestOutput(request.request_id, [], True, reason, error=error, usage=Usage.of(request))
            _hand_over(request, final)


def _hand_over(request: LlmRequest, output: RequestOutput) -> bool:
    try:
        request.sink(output)
    except Exception:  # border: one sink
        _logger.exception("the sink of request %d failed; the request is cancelled", request.request_id)
        return False
    return True
