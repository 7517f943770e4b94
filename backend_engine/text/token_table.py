"""``TokenTable``: what each token id is in text, taken once from a tokenizer's decoder and shared by detokenizers.

Two kinds cover nearly every language model: byte-level BPE (``ByteTable``: each token is a few bytes) and
SentencePiece style (``TextTable``: each token is text, or one byte of a run). Any other decoder of the ``tokenizers``
library is a ``StepTable``: tokens, and the decoders that ``decoder_steps`` runs. Never decodes a request.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers.decoders import Decoder

DecoderSettings = Mapping[str, Any]
"""One decoder as tokenizer.json writes it: ``{"type": "WordPiece", "prefix": "##", "cleanup": true}``."""

JOIN: DecoderSettings = {"type": "Join"}
"""What the library does without a decoder: a blank between tokens."""

BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F+][0-9a-fA-F])>")


@dataclass(frozen=True)
class ByteTable:
    """Byte-level BPE. ``pieces[id]``: the token's bytes, empty for an unused id; ``visible``: also for special ones."""

    pieces: Sequence[bytes]
    visible: Sequence[bytes]


class Replacement(NamedTuple):
    """Replaces ``pattern`` by ``content``, or by ``first_content`` in the text's first token."""

    pattern: str
    content: str
    first_content: str

    def apply(self, text: str, is_first: bool) -> str:
        return text.replace(self.pattern, self.first_content if is_first else self.content)


@dataclass(frozen=True)
class TextTable:
    """SentencePiece style. ``pieces[id]``: the token's text, ``None`` for an unused id; ``visible``: and a special one.

    ``first_pieces``: what some tokens are instead when they come first (no leading blank).
    ``byte_values``: ids of byte tokens. A run of them is UTF-8 as a whole, or else one U+FFFD a byte; then
    ``run_replacements`` apply. Up to ``num_stripped`` characters ``stripped`` are left out at the text's beginning.
    """

    pieces: Sequence[str | None]
    visible: Sequence[str | None]
    first_pieces: Mapping[int, str]
    byte_values: Mapping[int, int]
    run_replacements: Sequence[Replacement]
    stripped: str
    num_stripped: int


@dataclass(frozen=True)
class StepTable:
    """Any other decoder: ``steps`` in a row, over ``tokens[id]``, ``None`` for an unused id; ``visible``: and special.

    Sequences of decoders are flattened; the last step's tokens are joined.
    """

    tokens: Sequence[str | None]
    visible: Sequence[str | None]
    steps: Sequence[DecoderSettings]


TokenTable = ByteTable | TextTable | StepTable | None


def build_token_table(rust: Any, num_ids: int, special_ids: frozenset[int]) -> TokenTable:
    """The table of a ``tokenizers.Tokenizer`` with ids below ``num_ids``; ``None`` without one, or when its decoder is
    written in Python.
    """
    steps = None if rust is None else _decoder_steps(rust)
    if steps is None:
        return None
    tokens: list[str | None] = [rust.id_to_token(i) for i in range(num_ids)]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_table(tokens, special_ids)
    visible = [None if i in special_ids else token for i, token in enumerate(tokens)]
    return _text_table(tokens, special_ids, steps) or StepTable(tokens, visible, steps)


def _decoder_steps(rust: Any) -> list[DecoderSettings] | None:
    """The decoder as a flat list of its steps' settings; ``None`` for one written in Python."""
    if rust.decoder is None:
        return [JOIN]
    if type(rust.decoder) is Decoder:  # the class of custom ones; the library's own have classes of their own
        return None
    state = json.loads(rust.decoder.__getstate__())
    steps: list[DecoderSettings] = []
    pending = [state]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            steps.append(step)
    return steps


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte in byte-level BPE (GPT-2): printable Latin-1 is itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def to_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    """A byte-level token's bytes; one that is not in ``alphabet`` (an added token with a blank) stands for itself."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_table(tokens: Sequence[str | None], special_ids: frozenset[int]) -> ByteTable:
    alphabet = byte_level_alphabet()
    pieces = [b"" if token is None else to_bytes(token, alphabet) for token in tokens]
    return ByteTable(pieces, [b"" if i in special_ids else piece for i, piece in enumerate(pieces)])


def _text_table(
    tokens: Sequence[str | None], special_ids: frozenset[int], steps: Sequence[Mapping[str, Any]]
) -> TextTable | None:
    """Understands Replace and Metaspace around one ByteFallback, then Fuse, then Strip at the start.

    Replace works on each token alone, and so does it behind Fuse when it looks for one character. ``None`` for
    anything else.
    """
    before: list[Replacement] = []
    after: list[Replacement] = []
    has_bytes = is_fused = False
    stripped, num_stripped = "", 0
    for step in steps:
        kind = step["type"]
        if num_stripped:
            return None
        replacement = _replacement(step)
        if replacement is not None and (not is_fused or (kind == "Replace" and len(replacement.pattern) == 1)):
            (after if has_bytes else before).append(replacement)
        elif kind == "ByteFallback" and not has_bytes and not is_fused:
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and step["stop"] == 0:
            stripped, num_stripped = step["content"], step["start"]
        else:
            return None

    def replaced(replacements: Sequence[Replacement], token: str | None, is_first: bool) -> str | None:
        for replacement in replacements:
            token = None if token is None else replacement.apply(token, is_first)
        return token

    byte_values: dict[int, int] = {}
    if has_bytes:
        matches = ((i, BYTE_TOKEN.fullmatch(replaced(before, token, False) or "")) for i, token in enumerate(tokens))
        byte_values = {i: int(match[1], 16) for i, match in matches if match}
    pieces = [replaced((*before, *after), token, False) for token in tokens]
    firsts = ((i, replaced((*before, *after), token, True)) for i, token in enumerate(tokens))
    visible = [None if i in special_ids else piece for i, piece in enumerate(pieces)]
    return TextTable(
        pieces,
        visible,
        {i: first for i, first in firsts if first is not None and first != pieces[i]},
        byte_values,
        after,
        stripped,
        num_stripped,
    )


def _replacement(step: Mapping[str, Any]) -> Replacement | None:
    """A Replace of a fixed string, or a Metaspace, which also takes the blank off the text's first token."""
    if step["type"] == "Metaspace":
        is_kept = step["prepend_scheme"] == "never"
        return Replacement(step["replacement"], " ", " " if is_kept else "")
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return Replacement(step["pattern"]["String"], step["content"], step["content"])
    return None
