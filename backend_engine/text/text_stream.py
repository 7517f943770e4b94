"""``TextStream``: one sequence's text as deltas that are safe to send and never taken back.

Used by the sender threads of ``triton_io`` and by ``LLM``'s results, one stream a sequence, one thread at a time. The
deltas joined are the whole text, the same one whether it is streamed or not. Never decides when a request ends.
"""

from collections.abc import Sequence

from backend_engine.core.protocols import Detokenizer
from backend_engine.text.stop_strings import StopWordSearch


class TextStream:
    """Text of one sequence, cut at its first stop word.

    ``detokenizer`` is this stream's own, fresh one. Held back: unfinished characters, and an end of the text that may
    be the beginning of a stop word. The text ends right before the first stop word, or right after it with
    ``include_stop_words``; which one is the first, ``stop_strings`` says. A word that is complete while the output has
    fewer than ``min_tokens`` tokens is ordinary text. ``prefix`` comes before everything, not searched.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_words: Sequence[str] = (),
        include_stop_words: bool = False,
        min_tokens: int = 0,
        prefix: str = "",
    ) -> None:
        self._detokenizer = detokenizer
        self._search = StopWordSearch(stop_words)
        self._include_stop_words = include_stop_words
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._prefix = prefix
        self._held = ""
        self._ended = False

    @property
    def stopped(self) -> bool:
        """True once a stop word was found; no text comes after that."""
        return self._ended

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that may be sent now that these tokens follow; may be empty."""
        out, self._prefix = self._prefix, ""
        num_uncounted = max(self._min_tokens - 1 - self._num_tokens, 0)
        self._num_tokens += len(token_ids)
        for tokens, counts in ((token_ids[:num_uncounted], False), (token_ids[num_uncounted:], True)):
            if tokens and not self._ended:
                out += self._take(self._detokenizer.append(tokens), counts)
        return out

    def finish(self) -> str:
        """The rest of the text, once no token follows: what was held back comes out unless it completes a stop word."""
        out, self._prefix = self._prefix, ""
        if self._ended:
            return out
        out += self._take(self._detokenizer.flush(), self._num_tokens >= self._min_tokens)
        if not self._ended:
            out, self._held = out + self._held, ""
        self._ended = True
        return out

    def _take(self, piece: str, counts: bool) -> str:
        """Search new text and return what may be sent of it and of what was held back."""
        match = self._search.feed(piece, counts)
        num_before = len(self._held)
        text, self._held = self._held + piece, ""
        if match is not None:
            self._ended = True
            end = num_before + match.end
            return text[: end if self._include_stop_words else end - len(match.word)]
        # With the stop word itself in the text there is nothing to take back.
        num_held = 0 if self._include_stop_words else self._search.num_open
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
