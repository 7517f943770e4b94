"""``TokenCost``: what a token of a context counts for in a step's budget, by how many tokens come before it.

Made by ``MicroBatchScheduler``; the chunking policies reckon with it. Whole numbers only, so that sums are exact.
"""

from typing import NamedTuple

MAX_TOKEN_WEIGHT = 4
"""Most that a token counts for, in tokens with nothing before them. A step reads all weights of the model however few
tokens it has, so chunks far smaller than the budget would cost a long prompt more than they spare those who wait.
"""

_MAX_CONTEXT_COST_TOKENS = 1 << 30
"""No text is long enough to tell more from this, and sums of costs over a step stay within 64 bits."""


class TokenCost(NamedTuple):
    """A token with nothing before it costs ``base``, and ``per_token_before`` more for each token before its chunk, at
    most ``most``. The defaults: every token costs 1.

    A chunk's tokens all cost what its first one costs: chunks are short beside the texts for which it matters.
    """

    base: int = 1
    per_token_before: int = 0
    most: int = 1

    def at(self, start: int) -> int:
        """Of each token of a chunk that begins after ``start`` tokens."""
        return min(self.base + self.per_token_before * start, self.most)

    @classmethod
    def of(cls, context_cost_tokens: int) -> "TokenCost":
        """``1 + start / context_cost_tokens`` tokens each, at most ``MAX_TOKEN_WEIGHT``, counted in parts of a token of
        which ``context_cost_tokens`` make one; 0 = position costs nothing.
        """
        if context_cost_tokens == 0:
            return EVEN_COST
        base = min(context_cost_tokens, _MAX_CONTEXT_COST_TOKENS)
        return cls(base, 1, MAX_TOKEN_WEIGHT * base)


EVEN_COST = TokenCost()
