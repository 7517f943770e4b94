"""Word lists in both of their forms: lists of words as text, and the ``[2, N]`` form of token ids.

Text: a STRING tensor, one word an element; an empty element is no word; commas and newlines belong to a word.
Ids: row 0 is all words' ids in a row, padded with 0; row 1 the end offset of each word, padded with -1.
Pure; the parsers of preprocessing and of the engine model call it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backend_engine.errors import InvalidRequestError


class WordLimits(NamedTuple):
    """Bounds on what one request may send. ``max_word_bytes`` counts UTF-8 bytes, or ids in the id form."""

    max_words: int = 128
    max_word_bytes: int = 1024


def decode_text(value: Any, field: str, max_bytes: int | None = None) -> str:
    """One element of a STRING tensor as text. ``InvalidRequestError`` names ``field``, never the content."""
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    if max_bytes is not None and len(data) > max_bytes:
        raise InvalidRequestError(f"{field} has {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{field} is not valid UTF-8 (byte {error.start})") from None


def read_elements(values: npt.NDArray[Any] | None, field: str, limits: WordLimits) -> list[str]:
    """The elements of one request row, empty ones too. ``values``: any shape, ``None`` = not sent."""
    elements = [] if values is None else list(values.reshape(-1))
    if len(elements) > limits.max_words:
        raise InvalidRequestError(f"{field} has {len(elements)} words; at most {limits.max_words} are allowed")
    return [decode_text(element, f"a word of {field}", limits.max_word_bytes) for element in elements]


def read_words(values: npt.NDArray[Any] | None, field: str, limits: WordLimits) -> list[str]:
    """The words of one request row: its elements, empty ones left out."""
    return [word for word in read_elements(values, field, limits) if word]


def to_word_ids(rows: Sequence[Sequence[Sequence[int]]] | None, num_rows: int) -> npt.NDArray[np.int32]:
    """The id form ``[num_rows, 2, N]`` of one list of words (each a list of ids) per row.

    N is the most ids in a row, at least 1; ``None`` = nobody sent any words, and N is 0.
    """
    if rows is None:
        return np.zeros((num_rows, 2, 0), np.int32)
    flat = [[token_id for word in words for token_id in word] for words in rows]
    width = max(1, *(len(ids) for ids in flat))
    result = np.zeros((num_rows, 2, width), np.int32)
    result[:, 1, :] = -1
    for row, (words, ids) in enumerate(zip(rows, flat, strict=True)):
        result[row, 0, : len(ids)] = ids
        ends = np.cumsum([len(word) for word in words if word])
        result[row, 1, : len(ends)] = ends
    return result


def from_word_ids(values: npt.NDArray[Any] | None, field: str, limits: WordLimits) -> list[list[int]]:
    """The words of one row in the id form, ``[2, N]`` or ``[1, 2, N]``; ``None`` = not sent.

    ``InvalidRequestError`` on an odd shape, on an offset after a -1, on offsets that do not grow or exceed N, and
    on negative ids.
    """
    if values is None or values.size == 0:
        return []
    if values.ndim == 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 2 or values.shape[0] != 2:
        raise InvalidRequestError(_invalid(field, f"its shape must be [2, N], got {list(values.shape)}"))
    ids, offsets = values[0].tolist(), values[1].tolist()
    words: list[list[int]] = []
    start = 0
    ended = False
    for end in offsets:
        if end == -1:
            ended = True
            continue
        if ended:
            raise InvalidRequestError(_invalid(field, f"offset {end} follows a -1"))
        if not start < end <= len(ids):
            raise InvalidRequestError(_invalid(field, f"offset {end} must be more than {start} and at most {len(ids)}"))
        words.append(ids[start:end])
        start = end
    if len(words) > limits.max_words or any(len(word) > limits.max_word_bytes for word in words):
        bounds = f"at most {limits.max_words} words of {limits.max_word_bytes} ids are allowed"
        raise InvalidRequestError(
            f"{field} has {len(words)} words, the longest of {max(map(len, words))} ids; {bounds}"
        )
    negative = [token_id for token_id in ids[:start] if token_id < 0]
    if negative:
        raise InvalidRequestError(_invalid(field, f"token id {negative[0]} is negative"))
    return words


def _invalid(field: str, detail: str) -> str:
    return f"Invalid format for word list. {field}: {detail}"
