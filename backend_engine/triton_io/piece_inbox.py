"""``PieceInbox``: the BLS's side of a piece group: one thread fetches the pieces of all requests of this process.

``BlsFlow`` owns it. While a request has pieces to come, the thread keeps one call of the engine model waiting; each
answer holds what a step has given to all of them. It never looks into a piece, but for whether more follow.
"""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from backend_engine.logger import get_logger
from backend_engine.triton_io.error_codes import INTERNAL, INTERNAL_ERROR_TEXT, ModelCallError
from backend_engine.triton_io.piece_text import from_text
from backend_engine.triton_io.request_view import Array

_log = get_logger(__name__)

Tensors = Mapping[str, Array]
# Asks the engine for the pieces of a group and yields its answers' outputs; raises ``ModelCallError``.
FetchPieces = Callable[[str], Iterable[Tensors]]


class PiecesLostError(ModelCallError):
    """The pieces could not be fetched, though the engine may still be making them."""


class PieceBox:
    """One request's further pieces: each is handed to ``take`` by the inbox's thread, in order, one at a time.

    What arrives before ``wait`` is kept for it, since the request's own thread may still be busy with the first piece.
    """

    def __init__(self, take: Callable[[Tensors], None]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._early: list[Tensors] | None = []
        self._end: Future[None] = Future()
        self.is_complete = False

    def put(self, tensors: Tensors) -> None:
        """Take a piece, now or once the first one has been taken."""
        with self._lock:
            if self._early is not None:
                self._early.append(tensors)
            else:
                self._hand_over(tensors)

    def begin(self) -> None:
        """The first piece has been taken: take those that came meanwhile."""
        with self._lock:
            early, self._early = self._early or [], None
            for tensors in early:
                self._hand_over(tensors)

    def fail(self, error: ModelCallError) -> None:
        """No piece comes any more."""
        if not self._end.done():
            self._end.set_exception(error)

    def wait(self) -> None:
        """Block until the last piece has been taken; raises what ``take`` raised, or ``PiecesLostError``."""
        self._end.result()

    def _hand_over(self, tensors: Tensors) -> None:
        if self._end.done():
            return
        try:
            self._take(tensors)
        except Exception as error:  # border: one request, whose own thread raises it
            self._end.set_exception(error)
            return
        if not tensors["more"].any():
            self._end.set_result(None)


class PieceInbox:
    """Pieces of the group ``group_id``, a box for each request. Safe for calls from several threads.

    The thread starts with the first request that waits for pieces. It asks the engine only while one does, so a call is
    always answered.
    """

    def __init__(self, fetch: FetchPieces) -> None:
        self.group_id = str(uuid.uuid4())
        self._fetch = fetch
        self._condition = threading.Condition()
        self._boxes: dict[str, PieceBox] = {}
        self._waiting: set[str] = set()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @contextmanager
    def box(self, request_id: str, take: Callable[[Tensors], None]) -> Iterator[PieceBox]:
        """A box for the further pieces of ``request_id``; what comes after the block is dropped."""
        box = PieceBox(take)
        with self._condition:
            self._boxes[request_id] = box
        try:
            yield box
        finally:
            with self._condition:
                del self._boxes[request_id]

    def close(self) -> None:
        """Stop the thread once nothing is awaited. Call when all requests have ended."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def wait(self, request_id: str, box: PieceBox) -> None:
        """Have the pieces of ``request_id`` fetched until the last one has been taken; see ``PieceBox.wait``."""
        with self._condition:
            if not box.is_complete:  # the last piece may have come with those of others
                self._waiting.add(request_id)
                self._condition.notify_all()
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bls-pieces", daemon=True)
                self._thread.start()
        box.begin()
        box.wait()

    def _run(self) -> None:
        failure = ModelCallError(INTERNAL, INTERNAL_ERROR_TEXT)
        try:
            while self._is_awaited():
                try:
                    for outputs in self._fetch(self.group_id):
                        self._deliver(from_text(outputs["pieces"].reshape(-1)[0]))
                except ModelCallError as error:
                    self._fail(error)
        finally:
            with self._condition:
                self._thread = None
            self._fail(failure)

    def _is_awaited(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._is_closing)
            return bool(self._waiting)

    def _deliver(self, pieces: Iterable[tuple[str, Tensors]]) -> None:
        for request_id, tensors in pieces:
            is_last = not tensors["more"].any()
            with self._condition:
                box = self._boxes.get(request_id)
                if is_last:
                    self._waiting.discard(request_id)
                    if box is not None:
                        box.is_complete = True
            if box is not None:
                box.put(tensors)

    def _fail(self, error: ModelCallError) -> None:
        """Nothing comes any more for those who wait."""
        with self._condition:
            waiting, self._waiting = self._waiting, set()
            boxes = [self._boxes[request_id] for request_id in waiting if request_id in self._boxes]
        for box in boxes:
            box.fail(PiecesLostError(error.code, str(error)))
