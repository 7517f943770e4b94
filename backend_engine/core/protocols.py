"""The few interfaces that cross rooms. No implementation lives here."""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, Protocol

from backend_engine.core.outputs import RequestOutput
from backend_engine.core.request import LlmRequest

OutputSink = Callable[[RequestOutput], None]


class PrefixMatch(NamedTuple):
    """What the cache holds of a request's beginning.

    ``num_tokens`` (a multiple of ``tokens_per_block``, always less than the request's tokens) can be reused.
    Of the ``num_tokens // tokens_per_block`` blocks, ``num_held_blocks`` are held by other requests now and so
    cost no free block; the rest come out of the free ones. ``is_pending``: another request computes the block after
    them, or is about to, and this one can take it from there. ``next_block`` names the block after them, of those that
    this request would fill with its context; ``None`` = it would fill none.
    """

    num_tokens: int
    num_held_blocks: int
    is_pending: bool
    next_block: bytes | None = None


class KvCapacity(Protocol):
    """What the scheduler may ask of the KV cache. Asking changes nothing."""

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def num_total_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, the ones kept for reuse included."""
        ...

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        ...

    def num_blocks_of(self, request_id: int) -> int:
        """Blocks that a request holds now; 0 for one the cache does not know."""
        ...

    def num_releasable_blocks(self, request_id: int) -> int:
        """Blocks that would become free if this request let go (those it shares with nobody)."""
        ...

    def match_prefix(self, request: LlmRequest, claimed: Set[bytes] = frozenset()) -> PrefixMatch:
        """Look the beginning of a waiting request up.

        ``claimed``: the ``next_block`` of each request that is admitted in the same step; they are pending too.
        """
        ...


class StopMatcher(Protocol):
    """Watches one request's text for its stop words. Built in ``text/``, called by the executor thread."""

    def append(self, token_id: int) -> str | None:
        """Take the next output token; return the stop word that it completes, if any."""
        ...


class Detokenizer(Protocol):
    """Turns one request's tokens into text, piece by piece; the pieces joined are the whole text."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; may be empty."""
        ...

    def flush(self) -> str:
        """Text still held back, at the end."""
        ...


class RowProcessor(Protocol):
    """Changes the logits of one sequence before each of its tokens is chosen. Of a plugin; made for it alone."""

    def apply(self, logits: Any, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Change the row ``logits [vocab_size]``, float32, in place."""
        ...


class NamedProcessor(NamedTuple):
    """A processor and what messages call it: its name and its plugin."""

    label: str
    processor: RowProcessor
