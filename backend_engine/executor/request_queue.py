"""``RequestQueue``: the executor's inbox. Any thread puts, the executor thread takes.

Bounded: new requests are refused when those waiting, here or in the scheduler, reach the limit.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from backend_engine.core.request import LlmRequest
from backend_engine.errors import OutOfCapacityError, ShutdownError


class Inbox(NamedTuple):
    """What arrived since the last look, in order of arrival."""

    requests: list[LlmRequest]
    cancelled: list[int]


class RequestQueue:
    """Thread-safe inbox of new requests and cancellations."""

    def __init__(self, max_queue_size: int) -> None:
        self._max_queue_size = max_queue_size
        self._condition = threading.Condition()
        self._requests: list[LlmRequest] = []
        self._cancelled: list[int] = []
        self._closed_because: str | None = None
        self._num_waiting_elsewhere = 0

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, requests: Sequence[LlmRequest]) -> None:
        """Add all of them or none. ``OutOfCapacityError`` when the queue is full, ``ShutdownError`` once closed."""
        with self._condition:
            if self._closed_because is not None:
                raise ShutdownError(self._closed_because)
            num_waiting = len(self._requests) + self._num_waiting_elsewhere
            if self._max_queue_size and num_waiting + len(requests) > self._max_queue_size:
                raise OutOfCapacityError(
                    f"Maximum queue size of {self._max_queue_size} has been reached, please try again later"
                )
            self._requests += requests
            self._condition.notify()

    def cancel(self, request_id: int) -> None:
        """Ask for a request's end; unknown and finished ids are harmless."""
        with self._condition:
            self._cancelled.append(request_id)
            self._condition.notify()

    def close(self, reason: str) -> None:
        """Refuse what comes from now on, with ``reason``."""
        with self._condition:
            self._closed_because = self._closed_because or reason
            self._condition.notify()

    def take(self, num_waiting: int) -> Inbox:
        """Take everything. ``num_waiting`` is how many requests wait in the scheduler now."""
        with self._condition:
            inbox = Inbox(self._requests, self._cancelled)
            self._requests, self._cancelled = [], []
            self._num_waiting_elsewhere = num_waiting + len(inbox.requests)
            return inbox

    def note_waiting(self, num_waiting: int) -> None:
        """Tell how many requests wait in the scheduler after a step."""
        self._num_waiting_elsewhere = num_waiting

    def wait(self, timeout: float | None) -> None:
        """Sleep until something arrives, the queue is closed, or ``timeout`` seconds pass."""
        with self._condition:
            if not self._requests and not self._cancelled and self._closed_because is None:
                self._condition.wait(timeout)
