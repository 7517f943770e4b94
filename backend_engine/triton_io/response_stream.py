"""``ResponseStream``: one request's way back to its client.

The executor thread puts outputs in (never blocking); the sender thread takes everything that is unsent and sends
it as one response. Late tokens are thus coalesced and the engine never waits for a client.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
from backend_engine.triton_io.piece_group import ALREADY_WAITED_FOR, PieceGroup
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.request_view import Array, RequestView
from backend_engine.triton_io.response_builder import Place, ResponseBuilder, error_tensors

_log = get_logger(__name__)


class _Message(NamedTuple):
    """One response to be: tensors, or an error of class ``code``. ``ends``: the last one of its sequence."""

    tensors: dict[str, Array]
    ends: bool
    code: str = ""
    text: str = ""
    place: Place = Place()


class _Part:
    """One sequence of the request: what the executor has put in and nobody has sent yet."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self.builder = builder
        self.unsent: list[RequestOutput] = []
        self.request_id: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is something to send; a sequence that is not streamed is sent at its end."""
        return bool(self.unsent) and (self.builder.options.streaming or self.unsent[-1].finished)


class ResponseStream:
    """Collects and sends one request's outputs; a request has a sequence for each row and each of its answers.

    ``on_ready`` is called (by any thread) when there is something to send. The sinks, ``fail`` and ``resume`` may be
    called from any thread; ``flush``, ``poll_cancelled`` and ``close`` by the sender thread alone. The final flag goes
    out once, with the last response of the last sequence.

    A piecewise stream answers each ``Reply`` with one final response, and waits for the next reply: a BLS that
    iterates over several responses of one call can lock up inside the Python backend (seen on Triton Server 2.51).
    With a ``group``, only the first reply is its own; further pieces go through the group.
    """

    def __init__(
        self,
        reply: Reply,
        builders: Sequence[ResponseBuilder],
        on_ready: Callable[["ResponseStream"], None],
        group: PieceGroup | None = None,
    ) -> None:
        self._reply: Reply | None = reply
        self._wanted = reply.wanted
        self.group = group
        self.options = builders[0].options
        self._parts = [_Part(builder) for builder in builders]
        self._num_open = len(builders)
        self._turn = 0
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._messages: deque[_Message] = deque()
        self._failure: EngineError | None = None
        self._is_announced = False
        self._is_cancelled_by_client = False
        self._waiting_since = 0.0
        self.is_closed = False
        self.request_ids: tuple[int, ...] = ()

    def sink(self, index: int) -> Callable[[RequestOutput], None]:
        """Where the executor puts the outputs of sequence ``index``."""
        part = self._parts[index]

        def put(output: RequestOutput) -> None:
            with self._lock:
                part.unsent.append(output)
                is_ready = part.is_ready
            if is_ready:
                self.announce()

        return put

    def fail(self, error: EngineError) -> None:
        """End with ``error``: the request was never run."""
        self._failure = error
        self.announce()

    def resume(self, reply: Reply) -> None:
        """Answer ``reply`` with the next piece. ``InvalidRequestError`` while another one is waiting for it."""
        with self._lock:
            if self._reply is not None:
                raise InvalidRequestError(ALREADY_WAITED_FOR)
            self._reply = reply
        self.announce()

    def announce(self) -> None:
        """Have ``flush`` called soon."""
        with self._lock:
            first, self._is_announced = not self._is_announced, True
        if first:
            self._on_ready(self)

    def flush(self) -> bool:
        """Send what is unsent; True when that failed, and the request was ended though the engine may still run it."""
        with self._lock:
            self._is_announced = False
        reply = self._reply
        try:
            while not self.is_closed and self._may_send(reply) and self._has_message():
                self._send(reply, self._messages.popleft())
                reply = self._reply
        except Exception:  # border: one response; log once, answer, go on
            _log.exception("a response could not be sent; its request ends")
            self.close(INTERNAL, INTERNAL_ERROR_TEXT)
            if reply is not None:
                reply.close(INTERNAL, INTERNAL_ERROR_TEXT)
            elif self.group is not None:
                end = error_tensors(INTERNAL_ERROR_TEXT, INTERNAL) | {"more": np.array([[False]])}
                self.group.put(self.options.client_id, end)
            return True
        return False

    def _may_send(self, reply: Reply | None) -> bool:
        return reply is not None or (self.group is not None and self.group.offer(self))

    def _has_message(self) -> bool:
        """Whether there is one to send; makes the next ones of the sequence whose turn it is."""
        if self._failure is not None and not self._messages:
            self._num_open = 1
            self._messages.append(_Message({}, True, code_of(self._failure), str(self._failure)))
        for _ in range(len(self._parts)):
            if self._messages:
                break
            part = self._parts[self._turn]
            self._turn = (self._turn + 1) % len(self._parts)
            with self._lock:
                outputs: list[RequestOutput] = []
                if part.is_ready:
                    outputs, part.unsent = part.unsent, []
            if outputs:
                self._messages.extend(self._messages_of(part.builder, outputs))
        return bool(self._messages)

    def _messages_of(self, builder: ResponseBuilder, outputs: list[RequestOutput]) -> list[_Message]:
        last = outputs[-1] if outputs[-1].finished else None
        code, text = "", ""
        if last is not None and last.error is not None:
            code, text = code_of(last.error), f"{builder.place}{last.error}"
        elif last is not None and self._is_cancelled_by_client:
            code, text = CANCELLED, CANCELLED_TEXT
        if not code:
            tensors = builder.build(outputs)
            return [] if tensors is None else [_Message(tensors, last is not None)]
        # What came before the error is not lost.
        before = builder.build(outputs[:-1]) if builder.options.streaming and len(outputs) > 1 else None
        messages = [] if before is None else [_Message(before, False)]
        return [*messages, _Message({}, True, code, text, builder.place)]

    def _send(self, reply: Reply | None, message: _Message) -> None:
        """Send through ``reply``, or through the group when there is none."""
        self._num_open -= message.ends
        is_last = self._num_open == 0
        tensors = message.tensors
        if message.code and (self.options.errors_in_band or self.options.piecewise):
            with_reason = self.options.return_finish_reason
            tensors = error_tensors(message.text, message.code, with_finish_reason=with_reason, place=message.place)
        more = {"more": np.array([[not is_last]])}
        if reply is None:
            assert self.group is not None, "a response without anyone to send it to"
            wanted = {name: values for name, values in tensors.items() if not self._wanted or name in self._wanted}
            self.group.put(self.options.client_id, wanted | more)
        elif self.options.piecewise:
            with self._lock:
                self._reply = None
                self._waiting_since = time.monotonic()
            reply.send(tensors | more, final=True)
        elif tensors:
            reply.send(tensors, final=is_last)
        else:
            reply.fail(message.code, message.text, final=is_last)
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
        if self.group is not None and not self.group.is_abandoned(after_s):
            return False
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
