"""``SentencePieceModel``: what a SentencePiece model file says, read straight from its protocol buffer.

Used by ``sentencepiece_tokenizer`` and for comparing a tokenizer.model with the tokenizer.json beside it. Knows only
the fields that encoding and decoding depend on (sentencepiece_model.proto); needs no protobuf library.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from backend_engine.errors import ModelLoadError

UNIGRAM, BPE = 1, 2
_ALGORITHMS = {UNIGRAM: "unigram", BPE: "bpe", 3: "word", 4: "char"}


class Kind(IntEnum):
    """What a piece is. ``USER_DEFINED`` ones are never split and never merged; ``UNUSED`` ones never come out."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """Pieces and settings. ``charsmap``: the compiled normalization rules, empty for none.

    ``bos_id`` and ``eos_id`` are ``None`` where the model has none.
    """

    pieces: list[Piece]
    is_unigram: bool
    has_byte_fallback: bool
    unk_id: int
    bos_id: int | None
    eos_id: int | None
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_blanks: bool
    escapes_blanks: bool


_Field = tuple[int, int | bytes]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a model. ``ModelLoadError`` names the file for anything that is no such model or not built."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        at = _take_pieces(data, pieces)
        for number, value in _fields(data[at:]):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
    except (IndexError, ValueError, struct.error):
        raise ModelLoadError(f"{path} is corrupt or no SentencePiece model; expected its protocol buffer") from None
    if not pieces:
        raise ModelLoadError(f"{path} is no SentencePiece model: it has no pieces")
    _check(path, pieces, trainer)
    return _model(pieces, trainer, normalizer)


def _model(
    pieces: list[Piece], trainer: dict[int, int | bytes], normalizer: dict[int, int | bytes]
) -> SentencePieceModel:
    charsmap = normalizer.get(2, b"")
    unk_id = next((i for i, piece in enumerate(pieces) if piece.kind == Kind.UNKNOWN), 0)
    return SentencePieceModel(
        pieces=pieces,
        is_unigram=_number(trainer, 3, UNIGRAM) == UNIGRAM,
        has_byte_fallback=bool(_number(trainer, 35, 0)),
        unk_id=unk_id,
        bos_id=_control_id(pieces, _number(trainer, 41, 1)),
        eos_id=_control_id(pieces, _number(trainer, 42, 2)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        adds_dummy_prefix=bool(_number(normalizer, 3, 1)),
        removes_extra_blanks=bool(_number(normalizer, 4, 1)),
        escapes_blanks=bool(_number(normalizer, 5, 1)),
    )


def _check(path: Path, pieces: list[Piece], trainer: dict[int, int | bytes]) -> None:
    algorithm = _number(trainer, 3, UNIGRAM)
    if algorithm not in (UNIGRAM, BPE):
        name = _ALGORITHMS.get(algorithm, algorithm)
        raise ModelLoadError(f"{path}: model_type is {name}, which is not built; expected unigram or bpe")
    if _number(trainer, 24, 0):
        raise ModelLoadError(f"{path}: treat_whitespace_as_suffix is true, which is not built; expected false")
    unused = [piece.text for piece in pieces if piece.kind == Kind.UNUSED]
    if unused:
        raise ModelLoadError(f"{path} has {len(unused)} unused pieces, as {unused[0]!r}, which is not built")
    seen: set[str] = set()
    for piece in pieces:
        if not piece.text or piece.text in seen:
            raise ModelLoadError(f"{path} has the piece {piece.text!r} twice or empty; expected each once")
        seen.add(piece.text)


def _take_pieces(data: bytes, pieces: list[Piece]) -> int:
    """Append the pieces at the beginning of ``data`` that are written the usual way; where the first other field is.

    That is text, score and, unless it is normal, kind, in fewer than 128 bytes: nearly all, and 10 times as fast.
    """
    at, size, unpack = 0, len(data), struct.unpack_from
    while at + 2 < size and data[at] == 0x0A and data[at + 1] < 0x80 and data[at + 2] == 0x0A:
        length = data[at + 3]
        score_at = at + 4 + length
        end = at + 2 + data[at + 1]
        rest = end - score_at
        if length >= 0x80 or rest not in (5, 7) or data[score_at] != 0x15 or (rest == 7 and data[score_at + 5] != 0x18):
            break
        kind = data[score_at + 6] if rest == 7 else 1
        pieces.append(Piece(data[at + 4 : score_at].decode("utf-8"), unpack("<f", data, score_at + 1)[0], kind))
        at = end
    return at


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, int(Kind.NORMAL)
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[_Field]:
    """Number and value of each field: an integer for varints, else the bytes (fixed-size numbers too)."""
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > size:
            raise ValueError("cut off")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _number(fields: dict[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ModelLoadError(f"a SentencePiece setting (field {number}) is no number")
    return value - (1 << 64) if value >= 1 << 63 else value


def _control_id(pieces: list[Piece], token_id: int) -> int | None:
    is_there = 0 <= token_id < len(pieces) and pieces[token_id].kind in (Kind.CONTROL, Kind.USER_DEFINED)
    return token_id if is_there else None
