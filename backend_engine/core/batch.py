"""``SchedulerOutput``: the plan of one step, and its rows.

Made by ``RequestScheduler``, carried through every room of the step, changed by nobody.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from backend_engine.core.request import LlmRequest


class ScheduledRequest(NamedTuple):
    """One row: compute tokens ``[start, start + num_tokens)`` of ``request``.

    ``needs_logits``: the row reaches the newest token, so it yields a new one. ``num_reused_tokens`` > 0 only
    on a request's first row after a cache hit; then ``start == num_reused_tokens``.
    A NamedTuple and not a dataclass because a row is made per running request and step.
    """

    request: LlmRequest
    start: int
    num_tokens: int
    needs_logits: bool
    num_reused_tokens: int = 0

    def context_logits_range(self) -> tuple[int, int]:
        """Positions ``[first, end)`` of prompt tokens whose logits this row owes its request; empty if it wants none.

        What was given before a pause is not given again.
        """
        request = self.request
        if not request.sampling_params.return_context_logits:
            return 0, 0
        end = min(self.start + self.num_tokens, len(request.prompt_token_ids))
        return max(self.start, request.num_context_logits), end


@dataclass(frozen=True)
class SchedulerOutput:
    """The plan of step ``step``. Batch order is context rows first, then generation rows (one token each).

    ``paused`` requests lose their blocks before the rows are prepared and are computed again later.
    """

    step: int
    context: tuple[ScheduledRequest, ...]
    generation: tuple[ScheduledRequest, ...]
    paused: tuple[LlmRequest, ...] = ()

    @cached_property
    def rows(self) -> tuple[ScheduledRequest, ...]:
        """All rows in batch order."""
        return self.context + self.generation

    @cached_property
    def logits_rows(self) -> tuple[ScheduledRequest, ...]:
        """The rows that yield a token, in batch order; decoder outputs are aligned with these."""
        return tuple([row for row in self.rows if row.needs_logits])

    @property
    def batch_size(self) -> int:
        return len(self.context) + len(self.generation)

    @cached_property
    def num_context_tokens(self) -> int:
        return sum([row.num_tokens for row in self.context])

    @cached_property
    def num_tokens(self) -> int:
        return self.num_context_tokens + sum([row.num_tokens for row in self.generation])

    @property
    def is_generation_only(self) -> bool:
        return not self.context
