"""The tokenizer and the chat templates of a GGUF file, as its ``tokenizer.*`` metadata state them.

Called by ``tokenizer_folder`` for a .gguf file, and for a folder that has no other tokenizer. Reads two kinds:
SentencePiece pieces (``llama``, ``t5``) and byte-level BPE (``gpt2``). Reads no tensor, runs no code. Every fault is a
one-line ``ModelLoadError`` that names file and key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from backend_engine.config.gguf_metadata import GgufHeader, read_gguf_header
from backend_engine.errors import ModelLoadError
from backend_engine.text.added_tokens import add_tokens
from backend_engine.text.bpe_merges import ordered_merges
from backend_engine.text.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from backend_engine.text.sentencepiece_model import Kind, Piece, SentencePieceModel
from backend_engine.text.sentencepiece_tokenizer import build_rust, put_around

_KEY = "tokenizer.ggml."
_TOKENS, _TYPES, _SCORES, _MERGES, _PRE, _CHARSMAP = (
    f"{_KEY}{name}" for name in ("tokens", "token_type", "scores", "merges", "pre", "precompiled_charsmap")
)
_MODEL = f"{_KEY}model"
_PREFIX = f"{_KEY}add_space_prefix"
_TEMPLATE = "tokenizer.chat_template"
# Name for chat templates and transformers -> key of its id.
_NAMES = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "mask_token": "mask_token_id",
}  # fmt: skip
# Further tokens that end a turn or a message; models must not spell them as text.
_ENDS = ("eot_token_id", "eom_token_id")
_BLANK = "▁"
_SPECIAL_ALWAYS = ("bos_token", "eos_token")


@dataclass(frozen=True)
class _Kind:
    """One value of ``tokenizer.ggml.model``. ids: what names mean that the file says nothing about. The flags: what
    stands around a text unless the file says otherwise.
    """

    ids: Mapping[str, int]
    adds_bos: bool = False
    adds_eos: bool = False


_KINDS: Mapping[str, _Kind] = {
    "llama": _Kind({"bos_token": 1, "eos_token": 2, "unk_token": 0}, adds_bos=True),
    "gpt2": _Kind({}),
    "t5": _Kind({"eos_token": 1, "unk_token": 2, "pad_token": 0}, adds_eos=True),
}


@dataclass(frozen=True)
class GgufTokenizer:
    """rust: the tokenizer. names: ``{"bos_token": "<s>", ...}``. chat_template: one, several by name, or none."""

    rust: Tokenizer
    names: Mapping[str, str]
    chat_template: str | dict[str, str] | None


def build_from_gguf(path: Path) -> GgufTokenizer:
    """The tokenizer of a GGUF file (of a model in parts: the first), after llama.cpp's rules for its metadata.

    Control tokens are special, the user's tokens are not; both are found in a text as it is written. Raises
    ``ModelLoadError`` for a broken file, for a kind or a pre-tokenizer that is not known, and for lists and ids that
    contradict each other.
    """
    header = read_gguf_header(path)
    kind_name = header.text(_MODEL)
    kind = _KINDS.get(kind_name)
    if kind is None:
        raise header.refuse(_MODEL, f"one of {', '.join(_KINDS)}")
    pieces = _read_pieces(header, needs_scores=kind_name != "gpt2")
    ids = _special_ids(header, kind, len(pieces))
    if kind_name != "gpt2":
        pieces = _with_blanks(pieces, (_BLANK, " ") if header.flag(_PREFIX, True) else (" ", _BLANK))
    added = _added_tokens(pieces, ids)
    if kind_name == "gpt2":
        pre = _pre_tokenizer(header)
        adds_bos = pre.adds_bos
        rust = _byte_level(header, pieces, pre)
    else:
        adds_bos = kind.adds_bos
        rust = build_rust(_sentencepiece(header, pieces, ids, kind_name == "t5"), added, prefixes_each=True)
    add_tokens(rust, added, str(path))
    begin = _around(header, "add_bos_token", adds_bos, ids.get("bos_token"), "bos_token_id")
    end = _around(header, "add_eos_token", kind.adds_eos, ids.get("eos_token"), "eos_token_id")
    put_around(rust, *(None if i is None else pieces[i].text for i in (begin, end)))
    names = {name: pieces[i].text for name, i in ids.items() if name in _SPECIAL_ALWAYS or i in added}
    return GgufTokenizer(rust, names, _chat_template(header))


def _read_pieces(header: GgufHeader, needs_scores: bool) -> list[Piece]:
    """The vocabulary, by id. Tokens without text get one, as llama.cpp gives them; a text must stand once."""
    tokens, kinds = header.texts(_TOKENS), header.integers(_TYPES)
    scores = header.numbers(_SCORES) if needs_scores else (0.0,) * len(tokens)
    for key, values in ((_TYPES, kinds), (_SCORES, scores)):
        if len(values) != len(tokens):
            raise header.refuse(key, f"one value for each of the {len(tokens)} tokens in {_TOKENS}")
    if not tokens:
        raise header.refuse(_TOKENS, "at least one token")
    wrong = next((i for i, kind in enumerate(kinds) if not Kind.NORMAL <= kind <= Kind.BYTE), None)
    if wrong is not None:
        raise ModelLoadError(f"{header.path}: {_TYPES}[{wrong}] is {kinds[wrong]}; expected 1 to 6")
    texts = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        if first.setdefault(text, i) != i:
            raise ModelLoadError(
                f"{header.path}: {_TOKENS}[{i}] is {text!r}, which is token {first[text]} already; expected each once"
            )
    return list(map(Piece, texts, scores, kinds))


def _special_ids(header: GgufHeader, kind: _Kind, num_tokens: int) -> dict[str, int]:
    """Id of each of ``_NAMES`` and ``_ENDS`` that the file or its kind has."""
    found: dict[str, int] = {}
    for name, key in (*_NAMES.items(), *zip(_ENDS, _ENDS, strict=True)):
        key = f"{_KEY}{key}"
        if key in header:
            found[name] = header.count(key)
            if found[name] >= num_tokens:
                raise header.refuse(key, f"an id below {num_tokens}, the number of tokens")
        elif kind.ids.get(name, num_tokens) < num_tokens:
            found[name] = kind.ids[name]
    return found


def _with_blanks(pieces: list[Piece], replacement: tuple[str, str]) -> list[Piece]:
    """The pieces, the user's ones with blanks as they are looked for: in the text as it is written as such.

    Where no blank is put before a text they are looked for in the normalized text, as SentencePiece does, and have its
    sign. Converters have written either.
    """
    texts = {piece.text for piece in pieces}
    renamed = [
        piece._replace(text=piece.text.replace(*replacement)) if piece.kind == Kind.USER_DEFINED else piece
        for piece in pieces
    ]
    return [old if new.text in texts else new for old, new in zip(pieces, renamed, strict=True)]


def _added_tokens(pieces: list[Piece], ids: Mapping[str, int]) -> dict[int, AddedToken]:
    """Tokens that are found in the text as it is written, by id; with signs for blanks, in the normalized text."""
    special = {i for i, piece in enumerate(pieces) if piece.kind in (Kind.CONTROL, Kind.UNKNOWN)}
    special |= {i for name, i in ids.items() if name in (*_SPECIAL_ALWAYS, *_ENDS)}
    added = special | {i for i, piece in enumerate(pieces) if piece.kind == Kind.USER_DEFINED}
    signed = {i for i in added - special if _BLANK in pieces[i].text}
    return {i: AddedToken(pieces[i].text, special=i in special, normalized=i in signed) for i in sorted(added)}


def _sentencepiece(
    header: GgufHeader, pieces: list[Piece], ids: Mapping[str, int], is_unigram: bool
) -> SentencePieceModel:
    unknown = next((i for i, piece in enumerate(pieces) if piece.kind == Kind.UNKNOWN), ids.get("unk_token", 0))
    charsmap = [value & 0xFF for value in header.integers(_CHARSMAP)] if _CHARSMAP in header else []
    return SentencePieceModel(
        pieces=pieces,
        is_unigram=is_unigram,
        has_byte_fallback=any(piece.kind == Kind.BYTE for piece in pieces),
        unk_id=unknown,
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        charsmap=bytes(charsmap),
        adds_dummy_prefix=header.flag(_PREFIX, True),
        removes_extra_blanks=header.flag(f"{_KEY}remove_extra_whitespaces", False),
        escapes_blanks=True,
    )


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    found = PRE_TOKENIZERS.get(header.text(_PRE)) if _PRE in header else None
    if found is None:
        raise header.refuse(_PRE, f"one of {', '.join(PRE_TOKENIZERS)}; or give the model's own tokenizer folder")
    return found


def _byte_level(header: GgufHeader, pieces: list[Piece], pre: PreTokenizer) -> Tokenizer:
    vocabulary = {piece.text: i for i, piece in enumerate(pieces)}
    if pre.merges_by_id:
        merges = ordered_merges({p.text: i for i, p in enumerate(pieces) if p.kind == Kind.NORMAL})
    else:
        merges = _read_merges(header, vocabulary)
    rust = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.takes_wholes))
    if pre.is_nfc:
        rust.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    rust.decoder = decoders.ByteLevel()
    return rust


def _read_merges(header: GgufHeader, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges: two tokens with a blank between them, which make a third."""
    merges: list[tuple[str, str]] = []
    for i, merge in enumerate(header.texts(_MERGES)):
        cut = merge.find(" ", 1)
        left, right = merge[: max(cut, 0)], merge[cut + 1 :]
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelLoadError(
                f"{header.path}: {_MERGES}[{i}] is {merge!r}; expected two tokens that make a third, with a blank "
                "between them"
            )
        merges.append((left, right))
    return merges


def _around(header: GgufHeader, flag: str, default: bool, token_id: int | None, id_key: str) -> int | None:
    """The token that stands at one end of each text, where the file or its kind wants one."""
    if not header.flag(f"{_KEY}{flag}", default):
        return None
    if token_id is None and f"{_KEY}{flag}" in header:
        raise header.refuse(f"{_KEY}{flag}", f"false, since there is no {_KEY}{id_key}")
    return token_id


def _chat_template(header: GgufHeader) -> str | dict[str, str] | None:
    named = {key.removeprefix(f"{_TEMPLATE}."): header.text(key) for key in header if key.startswith(f"{_TEMPLATE}.")}
    usual = header.text(_TEMPLATE) if _TEMPLATE in header else None
    if not named:
        return usual
    return named if usual is None else {**named, "default": usual}
