"""Stop words: found in the text however it is split, cut exactly, and never shown in part."""

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_engine.text.detokenizer import create_detokenizer
from backend_engine.text.stop_strings import StopMatch, StopStringMatcher, StopWordSearch
from backend_engine.text.text_stream import TextStream
from backend_engine.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import sentencepiece_like
from tests.support.table_model import build_tokenizer, token_id

TABLE = Tokenizer(build_tokenizer())
STOP_TEXT = [token_id(word) for word in (" alpha", " beta", " ST", "OP", " tail")]


class CharacterDetokenizer:
    """Token ids are code points."""

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


class LateDetokenizer(CharacterDetokenizer):
    """Gives each character one token late, as a detokenizer does that holds something back."""

    def __init__(self) -> None:
        self._held = ""

    def append(self, token_ids: Sequence[int]) -> str:
        text = self._held + super().append(token_ids)
        self._held = text[-1:]
        return text[:-1]

    def flush(self) -> str:
        return self._held


def first_match(text: str, words: Sequence[str], min_end: int) -> tuple[int, int] | None:
    """(start, end) by definition: complete first, then longest; what ends before ``min_end`` doesn't count."""
    ends = range(max(min_end, 1), len(text) + 1)
    for end in ends:
        ending = [word for word in words if word and text[:end].endswith(word)]
        if ending:
            return end - max(map(len, ending)), end
    return None


SMALL = st.text("ab", max_size=14)
WORD_LISTS = st.lists(st.text("abc", max_size=4), max_size=4)


@settings(max_examples=400, deadline=None)
@given(SMALL, WORD_LISTS, st.booleans(), st.integers(0, 6), st.lists(st.integers(0, 14), max_size=5), st.booleans())
def test_the_text_is_cut_by_definition_however_it_arrives(
    text: str, words: list[str], include: bool, min_tokens: int, cuts: list[int], is_late: bool
) -> None:
    """One character a token. A late detokenizer shows the last character with the flush, the others a token late."""
    lateness = 1 if is_late else 0
    min_end = min_tokens - lateness
    match = first_match(text, words, min_end)
    if is_late and min_tokens > len(text):
        match = None  # all of the text belongs to tokens before the minimum
    expected = text if match is None else text[: match[1] if include else match[0]]
    stream = TextStream(LateDetokenizer() if is_late else CharacterDetokenizer(), words, include, min_tokens)
    ids = [ord(c) for c in text]
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    deltas = [stream.append(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    shown = "".join(deltas)
    assert expected.startswith(shown)
    assert shown + stream.finish() == expected
    assert stream.append([ord("a")] * 3) + stream.finish() == ""


@settings(max_examples=300, deadline=None)
@given(SMALL, WORD_LISTS, st.integers(0, 6))
def test_matcher_and_stream_agree(text: str, words: list[str], min_tokens: int) -> None:
    matcher = StopStringMatcher(words, CharacterDetokenizer(), min_tokens)
    stream = TextStream(CharacterDetokenizer(), words, False, min_tokens)
    match = first_match(text, words, min_tokens)
    for at, character in enumerate(text, 1):
        stream.append([ord(character)])
        found = matcher.append(ord(character))
        is_past = match is not None and at >= match[1]
        assert stream.stopped == is_past
        assert found == (text[match[0] : match[1]] if match is not None and is_past else None)


def test_search_reports_where_the_word_ends() -> None:
    search = StopWordSearch(["STOP", "OP", ""])
    assert search.feed("a ST") is None
    assert search.num_open == 2
    assert search.feed("OPEN") == StopMatch("STOP", 2)


def test_search_finds_overlapping_beginnings() -> None:
    assert StopWordSearch(["aab"]).feed("aaab") == StopMatch("aab", 4)
    assert StopWordSearch(["abab", "bb"]).feed("aababab") == StopMatch("abab", 5)


@pytest.mark.parametrize(
    ("words", "include", "expected"),
    [
        ((), False, " alpha beta STOP tail"),
        (("",), False, " alpha beta STOP tail"),
        (("STOP",), False, " alpha beta "),
        (("STOP",), True, " alpha beta STOP"),
        (("beta", "STOP"), False, " alpha "),
        (("TO", "STOP"), False, " alpha beta S"),
        (("OP", "STOP"), False, " alpha beta "),
        (("absent",), False, " alpha beta STOP tail"),
        ((" tail", " tailor"), False, " alpha beta STOP"),
    ],
)
def test_stop_word_over_token_borders(words: tuple[str, ...], include: bool, expected: str) -> None:
    stream = TextStream(create_detokenizer(TABLE), words, include)
    deltas = [stream.append([token]) for token in STOP_TEXT]
    assert "".join(deltas) + stream.finish() == expected
    if words == ("STOP",) and not include:
        assert not any("S" in delta for delta in deltas)
    whole = TextStream(create_detokenizer(TABLE), words, include)
    assert whole.append(STOP_TEXT) + whole.finish() == expected


def test_matcher_finds_the_word_at_the_token_that_completes_it() -> None:
    matcher = StopStringMatcher(["STOP"], create_detokenizer(TABLE))
    assert [matcher.append(token) for token in STOP_TEXT] == [None, None, None, "STOP", "STOP"]
    assert StopStringMatcher([], create_detokenizer(TABLE)).append(STOP_TEXT[0]) is None


def test_minimum_of_tokens() -> None:
    """The word is complete with the 4th token: a minimum of 4 is met then, one of 5 is not."""
    for min_tokens, expected in ((4, "STOP"), (5, None)):
        matcher = StopStringMatcher(["STOP"], create_detokenizer(TABLE), min_tokens=min_tokens)
        assert [matcher.append(token) for token in STOP_TEXT][-1] == expected
    stream = TextStream(create_detokenizer(TABLE), ["STOP"], min_tokens=5)
    assert stream.append(STOP_TEXT) + stream.finish() == " alpha beta STOP tail"


def test_what_may_begin_a_stop_word_is_held_back_and_released() -> None:
    stream = TextStream(CharacterDetokenizer(), ["STOP"])
    assert [stream.append([ord(c)]) for c in "aSTaSTO"] == ["a", "", "", "STa", "", "", ""]
    assert stream.finish() == "STO"


def test_a_stop_word_that_only_the_end_makes_certain() -> None:
    """Byte tokens are certain at the end of their run; the word in them still cuts the text."""
    tokenizer = Tokenizer(sentencepiece_like("llama"))
    ids = [tokenizer.encode_plain("Hello")[-1], *(5 + byte for byte in "€🦙".encode())]
    stream = TextStream(create_detokenizer(tokenizer), ["€"])
    assert stream.append(ids) == "Hello"
    assert stream.finish() == ""


def test_prefix_comes_first_and_is_not_searched() -> None:
    stream = TextStream(CharacterDetokenizer(), ["x"], prefix="prompt x")
    assert stream.append([]) == "prompt x"
    assert stream.append([ord("a")]) == "a"
    silent = TextStream(CharacterDetokenizer(), prefix="only")
    assert silent.finish() == "only"


def test_cost_follows_the_new_text() -> None:
    """A long text that keeps beginning a long stop word: work per token must not grow with either."""
    stream = TextStream(CharacterDetokenizer(), ["a" * 2000 + "b"])
    start = time.perf_counter()
    for _ in range(20_000):
        stream.append([ord("a")])
    assert time.perf_counter() - start < 20
    assert len(stream.finish()) == 2000
