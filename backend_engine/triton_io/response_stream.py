"""``ResponseStream``: one request's way back to its client.

The executor thread puts outputs in (never blocking); the sender thread takes everything that is unsent and sends
it as one response. Late tokens are thus coalesced and the engine never waits for a client.
"""

import threading
import time
from collections.abc import Callable

import numpy as np

from backend_engine.core.outputs import RequestOutput
from backend_engine.errors import EngineError, InvalidRequestError
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
from backend_engine.triton_io.request_view import Array, RequestView
from backend_engine.triton_io.response_builder import ResponseBuilder, error_tensors

_log = get_logger(__name__)


class ResponseStream:
    """Collects and sends one request's outputs.

    ``on_ready`` is called (by any thread) when there is something to send. ``put``, ``fail`` and ``resume`` may be
    called from any thread; ``flush``, ``poll_cancelled`` and ``close`` by the sender thread alone.

    A piecewise stream answers each ``Reply`` with one final response, and waits for the next reply: a BLS that
    iterates over several responses of one call can lock up inside the Python backend (seen on Triton Server 2.51).
    """

    def __init__(
        self,
        reply: Reply,
        builder: ResponseBuilder,
        options: RequestOptions,
        on_ready: Callable[["ResponseStream"], None],
    ) -> None:
        self._reply: Reply | None = reply
        self._builder = builder
        self.options = options
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._unsent: list[RequestOutput] = []
        self._failure: EngineError | None = None
        self._is_announced = False
        self._is_cancelled_by_client = False
        self._waiting_since = 0.0
        self.is_closed = False
        self.request_id: int | None = None

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

    def resume(self, reply: Reply) -> None:
        """Answer ``reply`` with the next piece. ``InvalidRequestError`` while another one is waiting for it."""
        with self._lock:
            if self._reply is not None:
                raise InvalidRequestError("the next piece of this request is being waited for already")
            self._reply = reply
        self._announce()

    def _announce(self) -> None:
        with self._lock:
            first, self._is_announced = not self._is_announced, True
        if first:
            self._on_ready(self)

    def flush(self) -> bool:
        """Send what is unsent; True when that failed, and the request was ended though the engine may still run it."""
        with self._lock:
            self._is_announced = False
            reply = self._reply
            if self.is_closed or reply is None:
                return False
            outputs, self._unsent = self._unsent, []
        try:
            self._answer(reply, outputs)
        except Exception:  # border: one response; log once, answer, go on
            _log.exception("a response could not be sent; its request ends")
            self.close(INTERNAL, INTERNAL_ERROR_TEXT)
            reply.close(INTERNAL, INTERNAL_ERROR_TEXT)
            return True
        return False

    def _answer(self, reply: Reply, outputs: list[RequestOutput]) -> None:
        last = outputs[-1] if outputs and outputs[-1].finished else None
        error = self._failure or (last.error if last is not None else None)
        if error is not None:
            if self._send_before_error(reply, outputs):
                return
            self._fail(reply, code_of(error), str(error))
        elif last is not None and self._is_cancelled_by_client:
            self._fail(reply, CANCELLED, CANCELLED_TEXT)
        else:
            tensors = self._builder.build(outputs)
            if tensors is not None:
                self._send(reply, tensors, is_last=last is not None)

    def _send_before_error(self, reply: Reply, outputs: list[RequestOutput]) -> bool:
        """Send what came before the error, which is not lost; True when the error has to wait for the next reply."""
        tensors = self._builder.build(outputs[:-1]) if self.options.streaming else None
        if tensors is None:
            return False
        if self.options.piecewise:
            with self._lock:
                self._unsent.insert(0, outputs[-1])
        self._send(reply, tensors, is_last=False)
        return self.options.piecewise

    def _fail(self, reply: Reply, code: str, message: str) -> None:
        if self.options.errors_in_band:
            with_reason = self.options.return_finish_reason
            self._send(reply, error_tensors(message, code, with_finish_reason=with_reason), is_last=True)
        else:
            reply.fail(code, message)
            self.is_closed = True

    def _send(self, reply: Reply, tensors: dict[str, Array], *, is_last: bool) -> None:
        if not self.options.piecewise:
            reply.send(tensors, final=is_last)
        else:
            with self._lock:
                self._reply = None
                self._waiting_since = time.monotonic()
            reply.send(tensors | {"more": np.array([[not is_last]])}, final=True)
        self.is_closed = is_last

    def poll_cancelled(self) -> bool:
        """True when the client is gone; a call into Triton Server until it is. A BLS sends ``stop`` instead."""
        reply = self._reply
        if self.options.piecewise or reply is None:
            return False
        self._is_cancelled_by_client = self._is_cancelled_by_client or reply.is_cancelled()
        return self._is_cancelled_by_client

    def is_abandoned(self, after_s: float) -> bool:
        """True when nobody has asked for the next piece for ``after_s`` seconds."""
        with self._lock:
            return self._reply is None and time.monotonic() - self._waiting_since > after_s

    def close(self, code: str, message: str) -> None:
        """End with an error unless it has ended: the last resort of the sender thread."""
        with self._lock:
            reply, self._reply = self._reply, None
            is_closed, self.is_closed = self.is_closed, True
        if reply is not None and not is_closed:
            reply.close(code, message)


def refuse(reply: Reply, view: RequestView, code: str, message: str) -> None:
    """Answer a request that could not be parsed, in band when it asks so."""
    if "return_errors_in_band" in view.inputs and view.inputs["return_errors_in_band"].any():
        reply.send(error_tensors(message, code), final=True)
    else:
        reply.fail(code, message)
