"""Stop words in a growing text: ``StopWordSearch`` finds them, ``StopStringMatcher`` watches one request for them.

``StopStringMatcher`` is the ``StopMatcher`` the executor calls with each token; ``text_stream`` cuts the text with the
same search, so both always agree. Both work on text, so it doesn't matter how a stop word is split into tokens.

The rule: the stop word that is complete first wins, the longest of those that end at the same place. So the answer
does not depend on how the text arrives. Never decides what to do about a match.
"""

from collections.abc import Sequence
from typing import NamedTuple

from backend_engine.core.protocols import Detokenizer


class StopMatch(NamedTuple):
    """A stop word was found; it ends ``end`` characters into the text of the last ``feed``."""

    word: str
    end: int


class StopWordSearch:
    """Looks for several words at once, character by character (Knuth, Morris and Pratt 1977).

    Work is proportional to the new text times the number of words; nothing of the old text is kept but how much of
    each word it ends in. Empty words are ignored.
    """

    def __init__(self, words: Sequence[str]) -> None:
        unique = {word for word in words if word}
        # Longest first: of the words that end together the first one found is the longest.
        self._words = sorted(unique, key=lambda word: (-len(word), word))
        self._failures = [_failure_links(word) for word in self._words]
        self._matched = [0] * len(self._words)
        self._first_characters = frozenset(word[0] for word in self._words)

    @property
    def num_open(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop word."""
        return max(self._matched, default=0)

    def feed(self, text: str, counts: bool = True) -> StopMatch | None:
        """Take the next text; the first match in it, if any, after which the search must not be used again.

        With ``counts`` false, words that become complete in this text are no matches.
        """
        matched = self._matched
        if not any(matched) and self._first_characters.isdisjoint(text):
            return None
        for at, character in enumerate(text):
            for index, word in enumerate(self._words):
                length, failure = matched[index], self._failures[index]
                while length and word[length] != character:
                    length = failure[length]
                if word[length] == character:
                    length += 1
                    if length == len(word):
                        if counts:
                            return StopMatch(word, at + 1)
                        length = failure[length]
                matched[index] = length
        return None


def _failure_links(word: str) -> list[int]:
    """``links[n]``: length of the longest beginning of ``word`` that also ends ``word[:n]``, itself excepted."""
    links = [0] * (len(word) + 1)
    length = 0
    for at in range(1, len(word)):
        while length and word[at] != word[length]:
            length = links[length]
        if word[at] == word[length]:
            length += 1
        links[at + 1] = length
    return links


class StopStringMatcher:
    """Watches one request's text for its stop words; implements ``core.protocols.StopMatcher``.

    ``detokenizer`` is this matcher's own, fresh one. A word that is complete while the output has fewer than
    ``min_tokens`` tokens does not count. Used by one thread.
    """

    def __init__(self, stop_words: Sequence[str], detokenizer: Detokenizer, min_tokens: int = 0) -> None:
        self._search = StopWordSearch(stop_words)
        self._detokenizer = detokenizer
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._found: str | None = None

    def append(self, token_id: int) -> str | None:
        """Take the next output token; the stop word the text now has, the same one ever after."""
        self._num_tokens += 1
        if self._found is None:
            piece = self._detokenizer.append((token_id,))
            match = self._search.feed(piece, counts=self._num_tokens >= self._min_tokens)
            self._found = None if match is None else match.word
        return self._found
