"""``PieceGroup``: the engine's side of a BLS process: the pieces of all its requests, handed over together.

A response of Triton Server costs some tenths of a millisecond whatever it holds, and a call of a BLS twice that. So a
BLS keeps one request (``next_piece`` with the group's id) waiting here, and gets what a step has given to all of its
streams in one response. ``ResponseSenderThread`` owns it. It never looks into a piece.
"""

import threading
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from backend_engine.errors import InvalidRequestError
from backend_engine.logger import get_logger
from backend_engine.triton_io.error_codes import INTERNAL, INTERNAL_ERROR_TEXT
from backend_engine.triton_io.piece_text import Entry, entry, to_text
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.request_view import Array

_log = get_logger(__name__)

ALREADY_WAITED_FOR = "the next piece of this request is being waited for already"


class Waiting(Protocol):
    """A stream that has something to say and nobody to say it to."""

    def announce(self) -> None: ...


class PieceGroup:
    """Collects pieces while a reply waits for them. ``resume``, ``offer`` and ``is_abandoned``: from any thread.

    ``put`` and ``send`` belong to the sender thread: it puts in what its streams have, and sends once a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reply: Reply | None = None
        self._held: dict[int, Waiting] = {}
        self._entries: list[Entry] = []
        self._waiting_since = time.monotonic()
        self.num_members = 0

    def resume(self, reply: Reply) -> None:
        """Answer ``reply`` with the next pieces. ``InvalidRequestError`` while another one is waiting for them."""
        with self._lock:
            if self._reply is not None:
                raise InvalidRequestError(ALREADY_WAITED_FOR)
            self._reply = reply
            held, self._held = list(self._held.values()), {}
        for stream in held:
            stream.announce()

    def offer(self, stream: Waiting) -> bool:
        """Whether pieces can be put in now; if not, ``stream`` is told when they can."""
        with self._lock:
            if self._reply is None:
                self._held[id(stream)] = stream
            return self._reply is not None

    def put(self, request_id: str, tensors: Mapping[str, Array]) -> None:
        """Add a piece of the request ``request_id``, after ``offer`` said so."""
        self._entries.append(entry(request_id, tensors))

    def send(self) -> None:
        """Send what was put in, if anything. When that fails the BLS is told so, and ends its requests."""
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        with self._lock:
            reply, self._reply = self._reply, None
            self._waiting_since = time.monotonic()
        assert reply is not None, f"{len(entries)} pieces were put in and no reply waits"
        try:
            reply.send({"pieces": np.array([[to_text(entries)]], dtype=np.object_)}, final=True)
        except Exception:  # border: one response; log once, answer, go on
            _log.exception("%d pieces could not be sent; their requests end", len(entries))
            reply.close(INTERNAL, INTERNAL_ERROR_TEXT)

    def is_abandoned(self, after_s: float) -> bool:
        """True when nobody has asked for the next pieces for ``after_s`` seconds."""
        with self._lock:
            return self._reply is None and time.monotonic() - self._waiting_since > after_s

    def forget(self, stream: Waiting) -> None:
        """``stream`` has nothing more to say."""
        with self._lock:
            self._held.pop(id(stream), None)

    def close(self, code: str, message: str) -> None:
        """Answer whoever waits with an error."""
        with self._lock:
            reply, self._reply = self._reply, None
        if reply is not None:
            reply.close(code, message)
