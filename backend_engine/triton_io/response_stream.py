"""``ResponseStream``: one request's way back to its client.

The executor thread puts outputs in (never blocking); the sender thread takes everything that is unsent and sends
it as one response. Late tokens are thus coalesced and the engine never waits for a client.
"""

import threading
from collections.abc import Callable

from backend_engine.core.outputs import RequestOutput
from backend_engine.errors import EngineError
from backend_engine.logger import get_logger
from backend_engine.triton_io.error_codes import (
    CANCELLED,
    CANCELLED_TEXT,
    INTERNAL,
    INTERNAL_ERROR_TEXT,
    code_of,
)
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.request_parser import RequestOptions
from backend_engine.triton_io.request_view import RequestView
from backend_engine.triton_io.response_builder import ResponseBuilder, error_tensors

_log = get_logger(__name__)


class ResponseStream:
    """Collects and sends one request's outputs.

    ``on_ready`` is called (by any thread) when there is something to send. ``put`` and ``fail`` may be called from
    any thread; ``flush``, ``poll_cancelled`` and ``close`` by the sender thread alone.
    """

    def __init__(
        self,
        reply: Reply,
        builder: ResponseBuilder,
        options: RequestOptions,
        on_ready: Callable[["ResponseStream"], None],
    ) -> None:
        self._reply = reply
        self._builder = builder
        self.options = options
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._unsent: list[RequestOutput] = []
        self._failure: EngineError | None = None
        self._is_announced = False
        self._is_cancelled_by_client = False
        self.request_id: int | None = None

    @property
    def is_closed(self) -> bool:
        """True once the final response is out."""
        return self._reply.is_closed

    def put(self, output: RequestOutput) -> None:
        """Take one output of the executor. A request that is not streamed is announced at its end only."""
        with self._lock:
            self._unsent.append(output)
        if output.finished or self.options.streaming:
            self._announce()

    def fail(self, error: EngineError) -> None:
        """End with ``error``: the request was never run."""
        self._failure = error
        self._announce()

    def _announce(self) -> None:
        with self._lock:
            first, self._is_announced = not self._is_announced, True
        if first:
            self._on_ready(self)

    def flush(self) -> bool:
        """Send what is unsent; True when that failed, and the request was ended though the engine may still run it."""
        with self._lock:
            outputs, self._unsent = self._unsent, []
            self._is_announced = False
        if self.is_closed:
            return False
        try:
            self._answer(outputs)
        except Exception:  # border: one response; log once, answer, go on
            _log.exception("a response could not be sent; its request ends")
            self.close(INTERNAL, INTERNAL_ERROR_TEXT)
            return True
        return False

    def _answer(self, outputs: list[RequestOutput]) -> None:
        last = outputs[-1] if outputs and outputs[-1].finished else None
        error = self._failure or (last.error if last is not None else None)
        if error is not None:
            if self.options.streaming and outputs[:-1]:
                self._send(outputs[:-1], final=False)  # what came before the error is not lost
            self._fail(code_of(error), str(error))
        elif last is not None and self._is_cancelled_by_client:
            self._fail(CANCELLED, CANCELLED_TEXT)
        else:
            self._send(outputs, final=last is not None)

    def _send(self, outputs: list[RequestOutput], *, final: bool) -> None:
        tensors = self._builder.build(outputs)
        if tensors is not None:
            self._reply.send(tensors, final=final)

    def _fail(self, code: str, message: str) -> None:
        if self.options.errors_in_band:
            with_reason = self.options.return_finish_reason
            self._reply.send(error_tensors(message, code, with_finish_reason=with_reason), final=True)
        else:
            self._reply.fail(code, message)

    def poll_cancelled(self) -> bool:
        """True when the client is gone; a call into Triton Server until it is."""
        self._is_cancelled_by_client = self._is_cancelled_by_client or self._reply.is_cancelled()
        return self._is_cancelled_by_client

    def close(self, code: str, message: str) -> None:
        """End with an error unless it has ended: the last resort of the sender thread."""
        self._reply.close(code, message)


def refuse(reply: Reply, view: RequestView, code: str, message: str) -> None:
    """Answer a request that could not be parsed, in band when it asks so."""
    if "return_errors_in_band" in view.inputs and view.inputs["return_errors_in_band"].any():
        reply.send(error_tensors(message, code), final=True)
    else:
        reply.fail(code, message)
