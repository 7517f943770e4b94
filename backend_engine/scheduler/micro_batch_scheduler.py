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
from backend_engine.scheduler.token_cost import EVEN_COST, TokenCost


@dataclass(slots=True)
class MicroBatch:
    """The rows of one step while they are being chosen.

    ``budget_left`` is what the tokens of a context that joins now may cost, at ``token_cost`` each: a number of tokens
    where all cost 1. ``is_blocked``: a context got nothing although it had work, so no later one may have a row, or
    short contexts could keep a long one waiting for ever.
    """

    budget_left: int
    token_cost: TokenCost = EVEN_COST
    context: list[ScheduledRequest] = field(default_factory=list)
    generation: list[ScheduledRequest] = field(default_factory=list)
    is_blocked: bool = False

    @property
    def rows(self) -> list[ScheduledRequest]:
        return self.context + self.generation

    @property
    def is_full(self) -> bool:
        """Whether not even a token with nothing before it could join."""
        return self.budget_left < self.token_cost.base


class MicroBatchScheduler:
    """Plans rows within ``max_num_tokens`` tokens, contexts in chunks of ``chunk_unit_size`` tokens.

    A token late in a long text takes longer than one at its beginning, since attention reads all that came before. So
    beside generation rows, whose requests wait for the step to end, it counts as more than one token of the budget
    (``TokenCost``), and the chunks of a context take about equally long (Agrawal et al., "Medha", arXiv 2409.17264).
    Nobody waits so in a step of contexts alone, where all tokens count the same. No token counts less than one, so
    ``max_num_tokens`` holds in any case.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_num_tokens = config.max_num_tokens
        self._chunk_unit_size = config.chunk_unit_size
        self._enable_chunked_context = config.enable_chunked_context
        policy = CONTEXT_CHUNKING_POLICIES.get(config.context_chunking_policy)
        # Whole contexts cannot share anything: without chunks there is one policy, and no chunk to make smaller.
        self._chunking: ContextChunking = policy() if config.enable_chunked_context else FirstComeFirstServed()
        cost_tokens = config.context_cost_tokens if config.enable_chunked_context else None
        self._cost_beside_generation = TokenCost.of(cost_tokens or 0)
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
        assert len(generation) <= self._max_num_tokens, (
            f"{len(generation)} generation rows, {self._max_num_tokens} tokens allowed"
        )
        if generation:
            batch.token_cost = self._cost_beside_generation
        batch.budget_left = self._context_budget(batch)
        for request in in_context:
            if not self.add_context(batch, request, request.num_computed_tokens):
                break
        self.share_out(batch)
        return batch

    def next_chunk(self, batch: MicroBatch, request: LlmRequest, start: int) -> int:
        """Most tokens that ``request`` would get in ``batch``, computing from ``start`` on; 0 = none this step."""
        num_pending = request.num_tokens + request.num_promised_tokens - start
        num_affordable = batch.budget_left // batch.token_cost.at(start)
        if num_pending <= num_affordable:
            return num_pending
        # A context longer than any step is split even if splitting is off: a paused request may have grown past the
        # budget, and it could never go on otherwise.
        if not self._enable_chunked_context and num_pending <= self._max_num_tokens:
            return 0
        unit = self._chunk_unit_size
        if num_affordable < unit and not batch.context:
            # Whoever is first must go on, however dear its tokens are: it gets a unit if there are so many tokens left.
            least = min(num_pending, unit)
            return least if least * batch.token_cost.base <= batch.budget_left else 0
        return num_affordable // unit * unit

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
        # The first may have had more than the budget pays for: then nothing is left.
        batch.budget_left = max(batch.budget_left - num_tokens * batch.token_cost.at(start), 0)
        return True

    def share_out(self, batch: MicroBatch) -> None:
        """Give the contexts that joined their chunks; called again whenever others have joined."""
        budget = self._context_budget(batch)
        batch.context = self._chunking.share(batch.context, budget, batch.token_cost, self._chunk_unit_size)

    def _context_budget(self, batch: MicroBatch) -> int:
        """What the tokens of all contexts may cost together."""
        return (self._max_num_tokens - len(batch.generation)) * batch.token_cost.base
