"""``Deadlines``: which requests have run out of time. O(log n) each, cheap when nothing is due.

Used by the executor thread alone. Entries of finished requests are dropped when they come up, or all at once
when they outnumber the living.
"""

import heapq
import math
from collections.abc import Mapping

from backend_engine.core.request import LlmRequest

_SLACK = 1024


class Deadlines:
    """Heap of ``(time, request_id)``; times are ``time.monotonic`` seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, request: LlmRequest) -> None:
        """Watch the request's deadline and its time limit in the queue."""
        for limit in (request.limits.deadline, request.limits.queue_deadline):
            if limit is not None:
                heapq.heappush(self._heap, (limit, request.request_id))

    def due(self, now: float, live: Mapping[int, LlmRequest]) -> list[LlmRequest]:
        """Living requests whose deadline, or time in the queue, has passed; each at most once."""
        if len(self._heap) > 4 * len(live) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
        due: dict[int, LlmRequest] = {}
        while self._heap and self._heap[0][0] <= now:
            request = live.get(heapq.heappop(self._heap)[1])
            if request is not None and is_out_of_time(request, now):
                due[request.request_id] = request
        return list(due.values())

    def next_time(self) -> float:
        """When to look again; infinity when nothing is watched."""
        return self._heap[0][0] if self._heap else math.inf


def is_out_of_time(request: LlmRequest, now: float) -> bool:
    """True when the deadline has passed, or the time in the queue for a request that never ran."""
    deadline, queue_deadline = request.limits.deadline, request.limits.queue_deadline
    if deadline is not None and deadline <= now:
        return True
    return queue_deadline is not None and queue_deadline <= now and request.first_scheduled_time is None
