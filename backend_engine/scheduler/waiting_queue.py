"""The requests that wait for a place, in the order in which they will be served.

Owned and written by ``RequestScheduler``. A queue never looks at memory or at budgets, and looking at its first
few requests costs the same whether ten or ten thousand wait behind them.
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from backend_engine.core.request import LlmRequest

DEFAULT_AGEING_TOKENS_PER_SECOND = 100.0


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


class _PausedLine:
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
        self._paused = _PausedLine()
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


class _Entry(NamedTuple):
    """A place in the shortest-first order. ``sequence`` is unique, so comparing never reaches the request."""

    key: float
    request_id: int
    sequence: int
    request: LlmRequest


class ShortestFirstQueue(WaitingQueue):
    """Fewest tokens to compute first; each second of waiting counts like ``ageing_tokens_per_second`` fewer tokens.

    At time t a request ranks by ``num_tokens - ageing * (t - arrival_time)``. The term ``ageing * t`` is the same
    for all who wait, so ``num_tokens + ageing * arrival_time`` gives the same order and never changes: a heap
    can hold it, and a long request is overtaken for a bounded time only. Ties go to the lower ``request_id``.
    """

    def __init__(self, ageing_tokens_per_second: float = DEFAULT_AGEING_TOKENS_PER_SECOND) -> None:
        self._ageing = ageing_tokens_per_second
        self._paused = _PausedLine()
        self._live: dict[int, _Entry] = {}
        # ``_next`` is sorted and holds the first entries, as far as somebody has looked; the heap holds the rest,
        # and entries that were removed while in it, until they surface.
        self._next: list[_Entry] = []
        self._heap: list[_Entry] = []
        self._sequence = itertools.count()

    def add(self, request: LlmRequest) -> None:
        assert request.request_id not in self._live, f"request {request.request_id} waits twice"
        key = request.num_tokens + self._ageing * request.arrival_time
        entry = _Entry(key, request.request_id, next(self._sequence), request)
        self._live[request.request_id] = entry
        if self._next and entry < self._next[-1]:
            insort(self._next, entry)
        else:
            heapq.heappush(self._heap, entry)

    def add_front(self, request: LlmRequest) -> None:
        self._paused.add(request)

    def remove(self, request: LlmRequest) -> bool:
        entry = self._live.pop(request.request_id, None)
        if entry is None:
            return self._paused.remove(request)
        index = bisect_left(self._next, entry)
        if index < len(self._next) and self._next[index] is entry:
            del self._next[index]
        elif len(self._heap) > 2 * len(self._live) + 64:
            # Mostly removed entries: drop them. Paid for by the removals that got us here.
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def __len__(self) -> int:
        return len(self._paused) + len(self._live)

    def __iter__(self) -> Iterator[LlmRequest]:
        yield from self._paused
        index = 0
        while True:
            if index == len(self._next):
                while self._heap and not self._is_live(self._heap[0]):
                    heapq.heappop(self._heap)
                if not self._heap:
                    return
                self._next.append(heapq.heappop(self._heap))
            yield self._next[index].request
            index += 1

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(entry.request_id) is entry
