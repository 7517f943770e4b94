"""Who runs now: the token budget of one step, shared out over generation rows and context chunks.

Called by ``RequestScheduler`` only. Knows nothing of blocks or of queues and changes no request.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.core.batch import ScheduledRequest
from backend_engine.core.request import LlmRequest
from backend_engine.plugins.catalog import CONTEXT_CHUNKING_POLICIES
from backend_engine.scheduler.context_chunking import ContextChunking, FirstComeFirstServed


@dataclass(slots=True)
class MicroBatch:
    """The rows of one step while they are being chosen.

    ``num_tokens_left`` is what a context that joins now may have. ``is_blocked``: a context got nothing although it
    had work, so no later one may have a row, or short contexts could keep a long one waiting for ever.
    """

    num_tokens_left: int
    context: list[ScheduledRequest] = field(default_factory=list)
    generation: list[ScheduledRequest] = field(default_factory=list)
    is_blocked: bool = False

    @property
    def rows(self) -> list[ScheduledRequest]:
        return self.context + self.generation


class MicroBatchScheduler:
    """Plans rows within ``max_num_tokens`` tokens, contexts in chunks of ``chunk_unit_size`` tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_num_tokens = config.max_num_tokens
        self._chunk_unit_size = config.chunk_unit_size
        self._enable_chunked_context = config.enable_chunked_context
        policy = CONTEXT_CHUNKING_POLICIES.get(config.context_chunking_policy)
        # Whole contexts cannot share anything: without chunks there is one policy.
        self._chunking: ContextChunking = policy() if config.enable_chunked_context else FirstComeFirstServed()
        # Each request in flight takes one token of a step sooner or later, so more of them could not all run.
        self.max_requests = min(config.max_batch_size, config.max_num_tokens)

    def plan_running(self, running: Iterable[LlmRequest]) -> MicroBatch:
        """Rows for the running requests: one token for each that generates, then chunks of contexts, in order."""
        batch = MicroBatch(self._max_num_tokens)
        generation, in_context = batch.generation, []
        for request in running:
            start = request.num_computed_tokens
            if start < request.num_context_tokens:
                in_context.append(request)
                continue
            num_promised = request.num_promised_tokens
            num_pending = request.num_tokens + num_promised - start
            # A promised token that is the last one allowed is never computed: the request ends when it arrives.
            if num_pending > 0 and not (num_promised and start >= request.max_num_tokens):
                generation.append(ScheduledRequest(request, start, 1, num_pending == 1))
        batch.num_tokens_left -= len(generation)
        assert batch.num_tokens_left >= 0, f"{len(generation)} generation rows, {self._max_num_tokens} tokens allowed"
        for request in in_context:
            if not self.add_context(batch, request, request.num_computed_tokens):
                break
        self.share_out(batch)
        return batch

    def next_chunk(self, batch: MicroBatch, request: LlmRequest, start: int) -> int:
        """Most tokens that ``request`` would get in ``batch``, computing from ``start`` on; 0 = none this step."""
        num_pending = request.num_tokens + request.num_promised_tokens - start
        if num_pending <= batch.num_tokens_left:
            return num_pending
        # A context longer than any step is split even if splitting is off: a paused request may have grown past the
        # budget, and it could never go on otherwise.
        if self._enable_chunked_context or num_pending > self._max_num_tokens:
            return batch.num_tokens_left // self._chunk_unit_size * self._chunk_unit_size
        return 0

    def add_context(self, batch: MicroBatch, request: LlmRequest, start: int, num_reused_tokens: int = 0) -> bool:
        """Let ``request`` join with its next chunk; False (and the batch is blocked) if there is no room for one.

        How long the chunk is is certain after ``share_out`` only.
        """
        num_tokens = self.next_chunk(batch, request, start)
        if num_tokens == 0:
            batch.is_blocked = True
            return False
        num_tokens = self._chunking.num_set_aside(num_tokens, self._chunk_unit_size)
        needs_logits = start + num_tokens == request.num_tokens + request.num_promised_tokens
        batch.context.append(ScheduledRequest(request, start, num_tokens, needs_logits, num_reused_tokens))
        batch.num_tokens_left -= num_tokens
        return True

    def share_out(self, batch: MicroBatch) -> None:
        """Give the contexts that joined their chunks; called again whenever others have joined."""
        num_tokens = self._max_num_tokens - len(batch.generation)
        batch.context = self._chunking.share(batch.context, num_tokens, self._chunk_unit_size)
