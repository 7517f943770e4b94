"""Word lists: both forms, there and back, and every way in which they can be wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.word_lists import WordLimits, from_word_ids, read_words, to_word_ids

LIMITS = WordLimits(max_words=3, max_word_bytes=5)
WIDE = WordLimits()


def strings(*words: bytes) -> np.ndarray:
    return np.array([list(words)], dtype=np.object_)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, []),
        (strings(), []),
        (strings(b""), []),
        (strings(b"STOP"), ["STOP"]),
        (strings(b"a", b"", b"b"), ["a", "b"]),
        (strings(b"x, y"), ["x, y"]),
        (strings(b"\n", b","), ["\n", ","]),
        (np.array(["é".encode()], dtype=np.object_), ["é"]),
    ],
)
def test_words_are_taken_as_they_are(values: np.ndarray | None, words: list[str]) -> None:
    assert read_words(values, "stop_words", LIMITS) == words


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (strings(b"a", b"b", b"c", b"d"), "stop_words has 4 words; at most 3 are allowed"),
        (strings(b"123456"), "a word of stop_words has 6 bytes; at most 5 are allowed"),
        (strings(b"ab\xff"), "a word of stop_words is not valid UTF-8 (byte 2)"),
    ],
)
def test_words_out_of_bounds_are_refused(values: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_words(values, "stop_words", LIMITS)
    assert str(caught.value) == message


def test_the_id_form_is_that_of_the_contract() -> None:
    assert to_word_ids(None, 2).shape == (2, 2, 0)
    assert to_word_ids([[]], 1).tolist() == [[[0], [-1]]]
    assert to_word_ids([[[5, 6], [7]], [[8]]], 2).tolist() == [[[5, 6, 7], [2, 3, -1]], [[8, 0, 0], [1, -1, -1]]]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=5))
def test_ids_survive_the_way_there_and_back(words: list[list[int]]) -> None:
    assert from_word_ids(to_word_ids([words], 1)[0], "bad_words_list", WIDE) == words


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ([[1, 2, 3]], "[1, 3]"),
        ([1, 2], "[2]"),
        ([[1, 2, 3], [2, -1, 3]], "offset 3 follows a -1"),
        ([[1, 2, 3], [2, 2, -1]], "offset 2 must be more than 2"),
        ([[1, 2, 3], [4, -1, -1]], "offset 4 must be more than 0 and at most 3"),
        ([[1, 2, 3], [0, -1, -1]], "offset 0"),
        ([[1, 2, 3], [-2, -1, -1]], "offset -2"),
        ([[1, -7, 3], [2, -1, -1]], "-7"),
    ],
)
def test_a_malformed_id_form_is_refused(values: list, culprit: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Invalid format for word list\. bad_words_list: ") as caught:
        from_word_ids(np.array(values, np.int32), "bad_words_list", WIDE)
    assert culprit in str(caught.value)


@pytest.mark.parametrize("words", [[[1]] * 4, [[1, 2, 3, 4, 5, 6]]])
def test_too_many_or_too_long_id_words_are_refused(words: list[list[int]]) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop_words_list has .* at most 3 words of 5 ids are allowed"):
        from_word_ids(to_word_ids([words], 1), "stop_words_list", LIMITS)
