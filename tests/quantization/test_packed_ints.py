"""Integers of a few bits in int32 words, checked against Python's own integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_engine.quantization.formats import packed_ints
from backend_engine.quantization.formats.packed_ints import (
    num_words,
    repack_int32,
    row_chunks,
    unpack_int32,
    unpack_int32_down,
)


def pack(values: Tensor, bits: int, crosses_words: bool) -> Tensor:
    """Over the borders of words, or ``32 // bits`` in each."""
    words = []
    for row in values.tolist():
        size = len(row) if crosses_words else 32 // bits
        data = b""
        for start in range(0, len(row), size):
            number = sum(value << (j * bits) for j, value in enumerate(row[start : start + size]))
            length = -(-size * bits // 32) * 4
            data += number.to_bytes(length, "little")
        words.append([int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)])
    return torch.tensor(words, dtype=torch.int32)


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(1, 8),
    num_rows=st.integers(1, 5),
    num_values=st.integers(1, 70),
    crosses_words=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_number_of_integers_of_any_width(
    bits: int, num_rows: int, num_values: int, crosses_words: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << bits, (num_rows, num_values), generator=rng, dtype=torch.uint8)
    packed = pack(values, bits, crosses_words)
    assert packed.shape == (num_rows, num_words(num_values, bits, crosses_words))
    assert torch.equal(unpack_int32(packed, bits, num_values, crosses_words=crosses_words), values)
    stacked = unpack_int32(packed.expand(3, *packed.shape), bits, num_values, crosses_words=crosses_words)
    assert torch.equal(stacked, values.expand(3, *values.shape))
    if bits <= 4 and num_values % 2 == 0:
        codes = repack_int32(packed, bits, num_values, 4, crosses_words=crosses_words)
        assert torch.equal(codes, values[:, ::2] + 16 * values[:, 1::2])
    assert torch.equal(repack_int32(packed, bits, num_values, 8, crosses_words=crosses_words), values)


def test_an_order_within_words() -> None:
    values = torch.arange(16, dtype=torch.uint8).view(1, 16)
    order = [7, 0, 6, 1, 5, 2, 4, 3]
    expected = torch.tensor([[*order, *(8 + place for place in order)]], dtype=torch.uint8)
    assert torch.equal(unpack_int32(pack(values, 4, True), 4, 16, order), expected)
    assert torch.equal(repack_int32(pack(values, 4, True), 4, 16, 8, order), expected)
    # Three bits that do not cross words leave two of a word unused.
    digits = torch.arange(10, dtype=torch.uint8).view(1, 10) % 8
    backwards = unpack_int32(pack(digits, 3, False), 3, 10, list(range(9, -1, -1)), crosses_words=False)
    assert torch.equal(backwards, digits.flip(-1))


@pytest.mark.parametrize("bits", range(1, 9))
def test_down_the_columns(bits: int) -> None:
    values = torch.randint(0, 1 << bits, (5, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack(values, bits, True).t()
    assert torch.equal(unpack_int32_down(packed, bits), values.t())
    assert torch.equal(unpack_int32_down(packed[:, 1:4], bits), values[1:4].t())


def test_chunks_cover_all_rows_once() -> None:
    assert list(row_chunks(0, 10)) == []
    for num_rows, num_columns in ((1, 1 << 30), (7, packed_ints._CHUNK_NUMBERS // 3), (5, 0)):
        chunks = list(row_chunks(num_rows, num_columns))
        assert [row for chunk in chunks for row in range(num_rows)[chunk]] == list(range(num_rows))
        assert all(
            chunk.stop - chunk.start <= max(1, packed_ints._CHUNK_NUMBERS // max(1, num_columns)) for chunk in chunks
        )
