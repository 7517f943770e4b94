"""How the contexts of one step share its tokens: one policy object, asked when a context joins and when all have.

Called by ``MicroBatchScheduler`` only. Knows nothing of blocks or of queues and changes no request.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from backend_engine.core.batch import ScheduledRequest
from backend_engine.scheduler.token_cost import TokenCost


class ContextChunking(ABC):
    """A chunking policy: contexts join one by one, each is given tokens of its own, the rest is shared out at last."""

    @abstractmethod
    def num_set_aside(self, num_tokens: int, chunk_unit_size: int) -> int:
        """Tokens taken from the step's for a context that joins and could have ``num_tokens``; at least 1, at most
        all of them. What is not set aside is there for those who join after it.
        """

    @abstractmethod
    def share(
        self, rows: list[ScheduledRequest], budget: int, token_cost: TokenCost, chunk_unit_size: int
    ) -> list[ScheduledRequest]:
        """The rows of all contexts once they have joined, whose tokens may together cost ``budget``.

        ``rows`` hold what was set aside, or what they got when asked before. No row gets more than it could have had
        when it joined. What the first row holds is its own even where it costs more than the budget: it is alone then.
        """


class FirstComeFirstServed(ContextChunking):
    """Each context takes all it can use, in the order of joining."""

    def num_set_aside(self, num_tokens: int, chunk_unit_size: int) -> int:
        return num_tokens

    def share(
        self, rows: list[ScheduledRequest], budget: int, token_cost: TokenCost, chunk_unit_size: int
    ) -> list[ScheduledRequest]:
        return rows


class EqualProgress(ContextChunking):
    """Every context takes one unit, then every one another, in the order of joining, until one does not fit.

    TensorRT-LLM's EQUAL_PROGRESS, except that sharing ends there: whoever joins later can then only make the chunks of
    the others smaller, so blocks counted for them before it joined are enough.
    """

    def num_set_aside(self, num_tokens: int, chunk_unit_size: int) -> int:
        return min(num_tokens, chunk_unit_size)

    def share(
        self, rows: list[ScheduledRequest], budget: int, token_cost: TokenCost, chunk_unit_size: int
    ) -> list[ScheduledRequest]:
        if not rows:
            return rows
        ends = [row.request.num_tokens + row.request.num_promised_tokens for row in rows]
        num_pending = [end - row.start for row, end in zip(rows, ends, strict=True)]
        costs = [token_cost.at(row.start) for row in rows]
        sizes = equal_shares(num_pending, costs, max(budget, rows[0].num_tokens * costs[0]), chunk_unit_size)
        return [
            ScheduledRequest(row.request, row.start, size, row.start + size == end, row.num_reused_tokens)
            for row, size, end in zip(rows, sizes, ends, strict=True)
        ]


def equal_shares(num_pending: Sequence[int], costs: Sequence[int], budget: int, unit: int) -> list[int]:
    """Tokens for each of those who have ``num_pending`` (all > 0) to compute, dealt out as ``EqualProgress`` says.

    ``costs``: of a token of each. The tokens dealt out cost at most ``budget`` together.

    Whole rounds are counted by bisection, so the cost does not grow with the tokens that are dealt out.
    """
    pending, cost = np.asarray(num_pending, np.int64), np.asarray(costs, np.int64)
    max_rounds = -(-max(num_pending) // unit)
    num_rounds = bisect_right(
        range(1, max_rounds + 1), budget, key=lambda rounds: int(np.minimum(pending, rounds * unit) @ cost)
    )
    sizes = [min(n, num_rounds * unit) for n in num_pending]
    left = budget - sum(size * each for size, each in zip(sizes, costs, strict=True))
    for i, num in enumerate(num_pending):
        increment = min(unit, num - sizes[i])
        if increment * costs[i] > left:
            break
        sizes[i] += increment
        left -= increment * costs[i]
    return sizes
