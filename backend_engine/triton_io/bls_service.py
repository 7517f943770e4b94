"""``BlsService``: runs many BLS requests at once in one process.

A bounded pool has a thread per request (a call of another model blocks its thread), and one watcher thread looks
for clients that left and sends the engine a ``stop`` for them. Started and closed by the BLS adapter.
"""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backend_engine.errors import EngineError
from backend_engine.logger import get_logger
from backend_engine.triton_io.bls_flow import BlsFlow
from backend_engine.triton_io.error_codes import (
    CANCELLED,
    CANCELLED_TEXT,
    INTERNAL,
    INTERNAL_ERROR_TEXT,
    UNAVAILABLE,
    ModelCallError,
    code_of,
)
from backend_engine.triton_io.parameters import BlsParameters
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.request_view import Array, RequestView

_log = get_logger(__name__)


class _Live:
    """A request that was taken and not yet answered."""

    def __init__(self, view: RequestView, reply: Reply) -> None:
        self.view = view
        self.reply = reply
        self.inner_id = str(uuid.uuid4())
        self.is_started = False
        self.is_cancelled = False


class BlsService:
    """A process's BLS requests.

    ``decoupled``: send pieces and, at the end, an empty final response; otherwise one single response.
    """

    MAX_POLLS = 32  # clients asked per period, each a call into Triton Server (0.2 ms)

    def __init__(self, flow: BlsFlow, pb_utils: Any, parameters: BlsParameters, *, decoupled: bool) -> None:
        self._flow = flow
        self._pb_utils = pb_utils
        self._parameters = parameters
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(parameters.max_concurrency, thread_name_prefix="bls")
        self._watcher = threading.Thread(target=self._watch, name="bls-watcher", daemon=True)
        self._watcher.start()

    def submit(self, request: Any) -> None:
        """Take a request of Triton Server and return at once; it is answered from another thread."""
        view = RequestView.of(request)
        reply = Reply(self._pb_utils, request.get_response_sender(), view.requested_outputs)
        live = _Live(view, reply)
        capacity = 2 * self._parameters.max_concurrency
        with self._lock:
            is_full = len(self._live) >= capacity
            if not is_full:
                self._live[live.inner_id] = live
        if is_full:
            reply.close(UNAVAILABLE, f"the BLS works on {capacity} requests and takes no more; see bls_max_concurrency")
            return
        self._pool.submit(self._serve, live)

    def close(self) -> None:
        """End what is running and stop the threads."""
        with self._lock:
            running = list(self._live.values())
        for live in running:
            live.is_cancelled = True
        self._pool.shutdown(wait=True)
        self._closing.set()
        self._watcher.join()
        self._flow.close()

    def _serve(self, live: _Live) -> None:
        reply = live.reply
        live.is_started = True
        try:
            self._answer(live)
        except EngineError as error:
            reply.close(code_of(error), str(error))
        except Exception:  # border: one request; log once, answer, go on
            _log.exception("a BLS request failed")
            self._flow.stop(live.inner_id)
            reply.close(INTERNAL, INTERNAL_ERROR_TEXT)
        finally:
            reply.close(INTERNAL, INTERNAL_ERROR_TEXT)
            with self._lock:
                self._live.pop(live.inner_id, None)

    def _answer(self, live: _Live) -> None:
        """Send the responses; every one is taken from the engine, also when the client is gone."""
        single: dict[str, Array] = {}

        def respond(tensors: dict[str, Array]) -> None:
            if live.is_cancelled:
                return
            if not self._decoupled:
                single.update(tensors)
                return
            try:
                live.reply.send(tensors, final=False)
            except self._pb_utils.TritonModelException as error:
                _log.error("a response could not be sent; its request ends: %s", error)
                live.is_cancelled = True

        self._flow.run(live.view, live.inner_id, lambda: live.is_cancelled, respond)
        if live.is_cancelled:
            raise ModelCallError(CANCELLED, CANCELLED_TEXT)
        if self._decoupled:
            live.reply.end()
        else:
            live.reply.send(single, final=True)

    def _watch(self) -> None:
        """Ask for each request, in turn, whether its client is gone; tell the engine so until the request has ended."""
        turn = 0
        while not self._closing.wait(self._parameters.cancellation_check_period_ms / 1000):
            with self._lock:
                running = list(self._live.values())
            for index, live in enumerate(running):
                if not live.is_cancelled and (index - turn) % len(running) < self.MAX_POLLS:
                    live.is_cancelled = live.reply.is_cancelled()
                if live.is_cancelled and live.is_started:
                    self._flow.stop(live.inner_id)
            turn += self.MAX_POLLS
