"""The requests that wait for a place, in the order in which they will be served; the line of those who came first.

Owned and written by ``RequestScheduler``; other orders are in ``keyed_queue.py``. A queue never looks at memory or at
budgets, and looking at its first few requests costs the same whether ten or ten thousand wait behind them.
"""

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from backend_engine.core.request import LlmRequest


class WaitingQueue(ABC):
    """Requests in service order. Policies differ in ``add``; paused requests always come first, oldest first."""

    @abstractmethod
    def add(self, request: LlmRequest) -> None:
        """Let a new request wait."""

    @abstractmethod
    def add_front(self, request: LlmRequest) -> None:
        """Let a paused request wait, before all that are not paused."""

    @abstractmethod
    def remove(self, request: LlmRequest) -> bool:
        """Take a request out, wherever it stands; False if it is not in here."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[LlmRequest]:
        """The requests in service order, lazily. The queue must not be changed meanwhile."""


class PausedLine:
    """Paused requests ordered by arrival. Few at any time (they all ran at once), so a sorted list will do."""

    def __init__(self) -> None:
        self._line: list[tuple[float, int, LlmRequest]] = []
        self._ids: set[int] = set()

    def add(self, request: LlmRequest) -> None:
        assert request.request_id not in self._ids, f"request {request.request_id} is paused twice"
        insort(self._line, (request.arrival_time, request.request_id, request))
        self._ids.add(request.request_id)

    def remove(self, request: LlmRequest) -> bool:
        if request.request_id not in self._ids:
            return False
        self._ids.remove(request.request_id)
        del self._line[bisect_left(self._line, (request.arrival_time, request.request_id, request))]
        return True

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[LlmRequest]:
        return (request for _, _, request in self._line)


class FcfsQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._paused = PausedLine()
        # An OrderedDict and not a dict: a dict that loses its first items again and again walks over their traces.
        self._line: OrderedDict[int, LlmRequest] = OrderedDict()

    def add(self, request: LlmRequest) -> None:
        assert request.request_id not in self._line, f"request {request.request_id} waits twice"
        self._line[request.request_id] = request

    def add_front(self, request: LlmRequest) -> None:
        self._paused.add(request)

    def remove(self, request: LlmRequest) -> bool:
        return self._line.pop(request.request_id, None) is not None or self._paused.remove(request)

    def __len__(self) -> int:
        return len(self._paused) + len(self._line)

    def __iter__(self) -> Iterator[LlmRequest]:
        return itertools.chain(self._paused, self._line.values())
