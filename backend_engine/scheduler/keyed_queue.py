"""``KeyedQueue``: waiting requests in the order of a rank, by priority or by length.

Owned and written by ``RequestScheduler``, which finds the two functions at the end in the catalog. A rank never
changes while a request waits, so a heap holds it; ageing is part of the rank.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from backend_engine.core.request import LlmRequest
from backend_engine.scheduler.waiting_queue import PausedLine, WaitingQueue

DEFAULT_AGEING_TOKENS_PER_SECOND = 100.0
SECONDS_PER_PRIORITY_LEVEL = 5.0
"""Waiting this long makes up for one level of priority."""

Rank = tuple[float, int]
"""Lower is served first; equal ones in the order in which they were added."""


class _Entry(NamedTuple):
    """A place in the order. ``sequence`` is unique, so comparing never reaches the request."""

    rank: Rank
    sequence: int
    request: LlmRequest


class KeyedQueue(WaitingQueue):
    """Lowest ``rank`` first; ``rank`` is asked once for each request, when it is added.

    Adding costs O(log n), and so does, amortized, removing or looking one request further than anybody did before.
    """

    def __init__(self, rank: Callable[[LlmRequest], Rank]) -> None:
        self._rank = rank
        self._paused = PausedLine()
        self._live: dict[int, _Entry] = {}
        # ``_next`` is sorted and holds the first entries, as far as somebody has looked; the heap holds the rest,
        # and entries that were removed while in it, until they surface.
        self._next: list[_Entry] = []
        self._heap: list[_Entry] = []
        self._sequence = itertools.count()

    def add(self, request: LlmRequest) -> None:
        assert request.request_id not in self._live, f"request {request.request_id} waits twice"
        entry = _Entry(self._rank(request), next(self._sequence), request)
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
        return self._live.get(entry.request.request_id) is entry


def shortest_first_queue(ageing_tokens_per_second: float = DEFAULT_AGEING_TOKENS_PER_SECOND) -> KeyedQueue:
    """Fewest tokens to compute first; each second of waiting counts like ``ageing_tokens_per_second`` fewer tokens.

    At time t a request ranks by ``num_tokens - ageing * (t - arrival_time)``. The term ``ageing * t`` is the same
    for all who wait, so ``num_tokens + ageing * arrival_time`` gives the same order and never changes: a long request
    is overtaken for a bounded time only. Ties go to the lower ``request_id``.
    """
    return KeyedQueue(
        lambda request: (request.num_tokens + ageing_tokens_per_second * request.arrival_time, request.request_id)
    )


class _PriorityRank:
    """``SECONDS_PER_PRIORITY_LEVEL * priority + arrival time``, with arrival times that never go back.

    Requests from several threads may be added a moment out of order; an arrival time before that of the request added
    last counts as equal to it, so equal priorities are served exactly in the order in which they were added.
    """

    def __init__(self) -> None:
        self._latest_arrival = float("-inf")

    def __call__(self, request: LlmRequest) -> Rank:
        self._latest_arrival = max(self._latest_arrival, request.arrival_time)
        return SECONDS_PER_PRIORITY_LEVEL * request.priority + self._latest_arrival, 0


def priority_queue() -> KeyedQueue:
    """Lowest ``priority`` (most urgent) first, equal ones first come, first served.

    A request is overtaken by those that are d levels more urgent and arrive at most
    ``d * SECONDS_PER_PRIORITY_LEVEL`` seconds after it, so none waits for ever.
    """
    return KeyedQueue(_PriorityRank())
