"""``RequestScheduler``: from the requests that wait and run to the plan of the next step.

Owned by the executor thread, called once a step. Composes the waiting queue (order), the capacity scheduler (memory)
and the micro batch scheduler (tokens). It changes no request and no block: what it decides is in the plan.
"""

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.batch import SchedulerOutput
from backend_engine.core.protocols import KvCapacity
from backend_engine.core.request import LlmRequest
from backend_engine.plugins.catalog import CAPACITY_POLICIES, WAITING_QUEUES
from backend_engine.scheduler.capacity_scheduler import CapacityScheduler
from backend_engine.scheduler.micro_batch_scheduler import MicroBatch, MicroBatchScheduler
from backend_engine.scheduler.waiting_queue import WaitingQueue


class RequestScheduler:
    """Keeps who waits and who runs. A request runs from its first row until it is removed or paused."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._waiting: WaitingQueue = WAITING_QUEUES.get(config.waiting_queue_policy)()
        self._capacity: CapacityScheduler = CAPACITY_POLICIES.get(config.capacity_policy)()
        self._micro_batch = MicroBatchScheduler(config)
        self._max_skips = config.max_batch_size
        self._running: dict[int, LlmRequest] = {}
        self._step = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[LlmRequest, ...]:
        """The running requests in the order in which they began to run."""
        return tuple(self._running.values())

    def add(self, request: LlmRequest) -> None:
        """Let a new request wait. It must fit the KV cache when it has it to itself (checked at submission)."""
        self._waiting.add(request)

    def remove(self, request: LlmRequest) -> None:
        """Forget a finished or cancelled request, waiting or running; one that is neither is ignored."""
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request)

    def schedule(self, kv: KvCapacity) -> SchedulerOutput:
        """Plan the next step; it has no rows when there is nothing to do.

        Paused requests are waiting again once this returns, newly admitted ones are running.
        """
        batch, paused = self._plan_running(kv)
        if paused:
            for request in paused:
                del self._running[request.request_id]
                self._waiting.add_front(request)
        elif self._has_room(batch):
            self._admit(batch, kv)
        output = SchedulerOutput(self._step, tuple(batch.context), tuple(batch.generation), tuple(paused))
        self._step += 1
        return output

    def _plan_running(self, kv: KvCapacity) -> tuple[MicroBatch, list[LlmRequest]]:
        """Rows of the running requests that find their blocks, and those that are paused so that they do."""
        staying = list(self._running.values())
        paused: list[LlmRequest] = []
        batch = self._micro_batch.plan_running(staying)
        while victims := self._capacity.pick_paused(batch.rows, staying, paused, kv):
            paused += victims
            paused_ids = {request.request_id for request in victims}
            staying = [request for request in staying if request.request_id not in paused_ids]
            batch = self._micro_batch.plan_running(staying)  # again: the others share out their tokens
        if paused and not batch.rows:
            # The only one left waits for a token that is on its way and will end it: let all stand still until then.
            return batch, []
        return batch, paused

    def _has_room(self, batch: MicroBatch) -> bool:
        """Whether it is worth looking at those who wait, given that nobody is paused."""
        num_running = len(self._running)
        return (
            len(self._waiting) > 0
            and not batch.is_blocked
            and num_running < self._micro_batch.max_requests
            and self._capacity.may_admit(num_running)
        )

    def _admit(self, batch: MicroBatch, kv: KvCapacity) -> None:
        """Give waiting requests their first row, in order, until one does not fit.

        A request whose next block another one computes, or is about to, is passed over for this step. It waits until
        that block is there or the other one is gone, and holds nothing meanwhile. Of two that could begin in this step
        the first claims its next block, which is enough: their texts are the same up to a block that both lack, so the
        cache has the same of both, and the block after that is the next one of both.
        """
        num_spare = self._capacity.num_spare_blocks(batch.rows, self._running.values(), kv)
        num_places = self._micro_batch.max_requests - len(self._running)
        admitted: list[LlmRequest] = []
        claimed: set[bytes] = set()
        num_skips = 0
        for request in self._waiting:
            if len(admitted) == num_places or batch.is_full or num_skips >= self._max_skips:
                break
            match = kv.match_prefix(request, claimed)
            if match.is_pending and self._capacity.may_pass_over:
                num_skips += 1
                continue
            num_ever = kv.num_blocks_for(request.max_num_tokens)
            assert num_ever <= kv.num_total_blocks, f"{request} may need {num_ever} of {kv.num_total_blocks} blocks"
            num_tokens = self._micro_batch.next_chunk(batch, request, match.num_tokens)
            cost = self._capacity.num_blocks_to_admit(request, match, num_tokens, kv)
            if cost > num_spare or not self._micro_batch.add_context(
                batch, request, match.num_tokens, match.num_tokens
            ):
                break
            num_spare -= cost
            admitted.append(request)
            if match.next_block is not None:
                claimed.add(match.next_block)
        self._micro_batch.share_out(batch)
        for request in admitted:
            self._waiting.remove(request)
            self._running[request.request_id] = request
