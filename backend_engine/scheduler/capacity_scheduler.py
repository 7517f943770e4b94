"""Who may hold memory: one policy object answers for the blocks, in four questions a step.

Called by ``RequestScheduler`` only. A policy keeps no state, asks the cache through ``KvCapacity``, changes neither
requests nor blocks, and knows nothing of token budgets.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from backend_engine.core.batch import ScheduledRequest
from backend_engine.core.protocols import KvCapacity, PrefixMatch
from backend_engine.core.request import LlmRequest


class CapacityScheduler(ABC):
    """A capacity policy. ``rows`` are the rows planned for running requests, ``running`` all that hold memory."""

    may_pass_over: bool = True
    """Whether a request may be left waiting because another one computes its next block. Not where it would wait for
    more than that block."""

    @abstractmethod
    def pick_paused(
        self,
        rows: Iterable[ScheduledRequest],
        running: Sequence[LlmRequest],
        paused: Sequence[LlmRequest],
        kv: KvCapacity,
    ) -> list[LlmRequest]:
        """The running requests that must give up their blocks so that the other rows find theirs this step.

        ``paused`` are those picked already in this step: not running any more, their blocks not yet given back.
        A step that pauses admits nobody: a newcomer may count on blocks that a paused request is about to let go,
        and what the pause frees must not be counted twice.
        """

    @abstractmethod
    def may_admit(self, num_running: int) -> bool:
        """Whether anybody new may begin beside ``num_running`` running requests, given that nobody is paused."""

    @abstractmethod
    def num_spare_blocks(self, rows: Iterable[ScheduledRequest], running: Iterable[LlmRequest], kv: KvCapacity) -> int:
        """Free blocks that newcomers may take this step, given that nobody is paused."""

    @abstractmethod
    def num_blocks_to_admit(self, request: LlmRequest, match: PrefixMatch, num_tokens: int, kv: KvCapacity) -> int:
        """Spare blocks it costs to admit a waiting request with a first row of ``num_tokens`` after ``match``.

        Matched blocks that nobody holds count (they are among the free ones), matched blocks held by others do not.
        """


class GuaranteedNoEvict(CapacityScheduler):
    """Admits only what can run to its end: every running request has all blocks it can ever need set aside."""

    def pick_paused(
        self,
        rows: Iterable[ScheduledRequest],
        running: Sequence[LlmRequest],
        paused: Sequence[LlmRequest],
        kv: KvCapacity,
    ) -> list[LlmRequest]:
        return []

    def may_admit(self, num_running: int) -> bool:
        return True

    def num_spare_blocks(self, rows: Iterable[ScheduledRequest], running: Iterable[LlmRequest], kv: KvCapacity) -> int:
        num_blocks_for, num_blocks_of = kv.num_blocks_for, kv.num_blocks_of
        reserved = 0
        for request in running:
            reserved += num_blocks_for(request.max_num_tokens) - num_blocks_of(request.request_id)
        assert reserved <= kv.num_free_blocks, f"{reserved} blocks are promised, only {kv.num_free_blocks} are free"
        return kv.num_free_blocks - reserved

    def num_blocks_to_admit(self, request: LlmRequest, match: PrefixMatch, num_tokens: int, kv: KvCapacity) -> int:
        return kv.num_blocks_for(request.max_num_tokens) - match.num_held_blocks


class StaticBatch(CapacityScheduler):
    """A batch runs to the end of its last request before another begins; nothing is admitted while anything runs.

    A batch is what one step admits, with all the blocks its requests can ever need, as ``GuaranteedNoEvict`` has it.
    Nobody in it waits for another's block: it would wait for the whole batch.
    """

    may_pass_over = False

    def __init__(self) -> None:
        self._to_the_end = GuaranteedNoEvict()

    def pick_paused(
        self,
        rows: Iterable[ScheduledRequest],
        running: Sequence[LlmRequest],
        paused: Sequence[LlmRequest],
        kv: KvCapacity,
    ) -> list[LlmRequest]:
        return self._to_the_end.pick_paused(rows, running, paused, kv)

    def may_admit(self, num_running: int) -> bool:
        return num_running == 0

    def num_spare_blocks(self, rows: Iterable[ScheduledRequest], running: Iterable[LlmRequest], kv: KvCapacity) -> int:
        return self._to_the_end.num_spare_blocks(rows, running, kv)

    def num_blocks_to_admit(self, request: LlmRequest, match: PrefixMatch, num_tokens: int, kv: KvCapacity) -> int:
        return self._to_the_end.num_blocks_to_admit(request, match, num_tokens, kv)


class MaxUtilization(CapacityScheduler):
    """Admits what fits now, and when blocks run out pauses the latest arrivals, to be computed again later.

    The oldest running request is never paused, so it always goes on and everybody gets to be the oldest.
    """

    def pick_paused(
        self,
        rows: Iterable[ScheduledRequest],
        running: Sequence[LlmRequest],
        paused: Sequence[LlmRequest],
        kv: KvCapacity,
    ) -> list[LlmRequest]:
        needs = _new_blocks(rows, kv)
        # Blocks that paused requests share with each other alone are left out here: at worst one pause too many.
        num_available = kv.num_free_blocks + sum(kv.num_releasable_blocks(request.request_id) for request in paused)
        num_needed = sum(needs.values())
        if num_needed <= num_available:
            return []
        oldest, *others = sorted(running, key=lambda request: (request.arrival_time, request.request_id))
        victims: list[LlmRequest] = []
        while others and num_needed > num_available:
            victim = others.pop()
            victims.append(victim)
            num_needed -= needs.get(victim.request_id, 0)
            num_available += kv.num_releasable_blocks(victim.request_id)
        if not others:
            num_available = kv.num_total_blocks - kv.num_blocks_of(oldest.request_id)
        assert num_needed <= num_available, (
            f"{oldest} needs {num_needed} more blocks, all others are paused and {num_available} are free"
        )
        return victims

    def may_admit(self, num_running: int) -> bool:
        return True

    def num_spare_blocks(self, rows: Iterable[ScheduledRequest], running: Iterable[LlmRequest], kv: KvCapacity) -> int:
        return kv.num_free_blocks - sum(_new_blocks(rows, kv).values())

    def num_blocks_to_admit(self, request: LlmRequest, match: PrefixMatch, num_tokens: int, kv: KvCapacity) -> int:
        return kv.num_blocks_for(match.num_tokens + num_tokens) - match.num_held_blocks


def _new_blocks(rows: Iterable[ScheduledRequest], kv: KvCapacity) -> dict[int, int]:
    """Request id to the blocks its row needs beyond those it holds; requests that need none are left out."""
    tokens_per_block, num_blocks_of = kv.tokens_per_block, kv.num_blocks_of
    needs: dict[int, int] = {}
    for row in rows:
        request_id = row.request.request_id
        num_new = -(-(row.start + row.num_tokens) // tokens_per_block) - num_blocks_of(request_id)
        if num_new > 0:
            needs[request_id] = num_new
    return needs
