"""Unsigned integers of a few bits in int32 words: unpacking them, and packing them as ``GroupwiseInt`` has them.

For the readers of weight formats. What goes along the last dimension is done some rows at a time, so that little is
needed in between however large the weight is. Nothing here looks at what the integers mean.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.quantization.schemes.grouped import pack_nibbles

WORD_BITS = 32
# Numbers that are unpacked at once: at most some ten bytes each are needed in between.
_CHUNK_NUMBERS = 1 << 20


def row_chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows in order, each of about a million numbers, or of one row."""
    step = max(1, _CHUNK_NUMBERS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def num_words(num_values: int, bits: int, crosses_words: bool = True) -> int:
    """Words that hold ``num_values`` integers of ``bits`` bits, the last one filled up; see ``unpack_int32``."""
    return -(-num_values * bits // WORD_BITS) if crosses_words else -(-num_values // (WORD_BITS // bits))


def unpack_int32(
    packed: Tensor, bits: int, num_values: int, order: Sequence[int] | None = None, crosses_words: bool = True
) -> Tensor:
    """int32 ``[..., num_words] -> uint8 [..., num_values]``: integers of 1 to 8 ``bits``, the first in the lowest bits.

    order: value j of a word is found in its place ``order[j]`` (AWQ: 0, 4, 1, 5, 2, 6, 3, 7), where none crosses words.
    crosses_words: whether an integer may begin in one word and end in the next (GPTQ's 3 bits); where it may not, a
    word has ``32 // bits`` integers and unused upper bits. Of no account for bits that divide 32.
    """
    assert packed.dtype == torch.int32 and 1 <= bits <= 8, (packed.dtype, bits)
    assert packed.shape[-1] == num_words(num_values, bits, crosses_words), (packed.shape, bits, num_values)
    cycle, words_of_cycle = _cycle(bits, crosses_words)
    assert order is None or len(order) == cycle, (bits, order)
    rows = packed.reshape(-1, packed.shape[-1])
    out = torch.empty(rows.shape[0], num_values, dtype=torch.uint8, device=packed.device)
    for chunk in row_chunks(rows.shape[0], num_values):
        words = F.pad(rows[chunk], (0, -rows.shape[1] % words_of_cycle))
        if order is None and 8 % bits == 0:
            # Integers that lie within bytes are taken from bytes, which is less to move.
            values = _spread(words.contiguous().view(torch.uint8).view(-1, 1, 1), bits, range(8 // bits))
        else:
            values = _spread(words.reshape(-1, words_of_cycle, 1), bits, range(cycle) if order is None else order)
        out[chunk] = values.view(words.shape[0], -1)[:, :num_values]
    return out.view(*packed.shape[:-1], num_values)


def unpack_int32_down(packed: Tensor, bits: int) -> Tensor:
    """int32 ``[num_words, n] -> uint8 [num_words * 32 / bits, n]``: ``unpack_int32`` down the columns instead, which
    crosses words. All at once: the caller hands over some columns at a time.
    """
    cycle, words_of_cycle = _cycle(bits, crosses_words=True)
    assert packed.dtype == torch.int32 and packed.shape[0] % words_of_cycle == 0, (packed.dtype, packed.shape, bits)
    return _spread(packed.reshape(-1, words_of_cycle, packed.shape[1]), bits, range(cycle)).flatten(0, 1)


def pack_codes(values: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., n]`` as codes of ``bits`` 8, the same, or 4, ``[..., n / 2]``, the first in the lower half."""
    return pack_nibbles(values) if bits == 4 else values


def repack_int32(
    packed: Tensor,
    bits: int,
    num_values: int,
    code_bits: int,
    order: Sequence[int] | None = None,
    crosses_words: bool = True,
) -> Tensor:
    """``unpack_int32`` and ``pack_codes`` with codes of ``code_bits``, without all the integers in between."""
    num_bytes = num_values * code_bits // 8
    if bits == code_bits and order is None:
        # Bytes of a word come in the order of their significance, hence codes are packed alike.
        return packed.contiguous().view(torch.uint8)[..., :num_bytes]
    rows = packed.reshape(-1, packed.shape[-1])
    out = torch.empty(rows.shape[0], num_bytes, dtype=torch.uint8, device=packed.device)
    for chunk in row_chunks(rows.shape[0], num_values):
        out[chunk] = pack_codes(unpack_int32(rows[chunk], bits, num_values, order, crosses_words), code_bits)
    return out.view(*packed.shape[:-1], num_bytes)


def _cycle(bits: int, crosses_words: bool) -> tuple[int, int]:
    """Integers, and the words they fill, after which their places are the same again."""
    if not crosses_words:
        return WORD_BITS // bits, 1
    common = math.gcd(bits, WORD_BITS)
    return WORD_BITS // common, bits // common


def _spread(words: Tensor, bits: int, places: Sequence[int]) -> Tensor:
    """Words of any size ``[a, words_of_cycle, b] -> uint8 [a, len(places), b]``."""
    word_bits = words.element_size() * 8
    values = torch.empty(words.shape[0], len(places), words.shape[2], dtype=torch.uint8, device=words.device)
    for j, place in enumerate(places):
        word, shift = divmod(place * bits, word_bits)
        # The shift fills up with the sign, of which the mask leaves nothing.
        num_lower = min(bits, word_bits - shift)
        value = (words[:, word] >> shift).bitwise_and_((1 << num_lower) - 1)
        if num_lower < bits:
            value |= (words[:, word + 1] << num_lower) & ((1 << bits) - 1)
        values[:, j] = value
    return values
