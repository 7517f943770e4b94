"""Merges of a byte-pair vocabulary that states only how early each token is made, in the order that a BPE model wants.

tiktoken and SentencePiece merge the neighbours whose concatenation comes first; the ``tokenizers`` library merges by
a list of pairs. Called by ``tiktoken_tokenizer`` and ``sentencepiece_tokenizer``. Reads no file.
"""

from collections.abc import Mapping
from typing import TypeVar

Token = TypeVar("Token", str, bytes)


def ordered_merges(ranks: Mapping[Token, float]) -> list[tuple[Token, Token]]:
    """Every pair of tokens whose concatenation is a token, the pairs of lower ranks first.

    Both halves and the whole must be in ``ranks``; all such pairs are needed, not only the one that training merged,
    since a text may bring the others together.
    """
    return [
        (token[:cut], token[cut:])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
