"""A ``tokenizers.Tokenizer`` of a folder that has only a SentencePiece model, whose ids are that library's.

Called by ``tokenizer_folder`` for tokenizer.model without tokenizer.json: Llama 1 and 2, Mistral, Gemma and the many
models made like them. Follows SentencePiece (Kudo and Richardson, 2018); needs neither that library nor protobuf.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backend_engine.errors import ModelLoadError
from backend_engine.text.added_tokens import (
    CONFIG_FILE,
    add_tokens,
    declared_tokens,
    disagreement,
    listed_tokens,
    named_tokens,
)
from backend_engine.text.bpe_merges import ordered_merges
from backend_engine.text.sentencepiece_model import Kind, Piece, SentencePieceModel, read_sentencepiece
from backend_engine.text.tiktoken_tokenizer import Built

MODEL_FILE = "tokenizer.model"
# Tokenizer classes that do nothing but what the model and the added tokens say.
PLAIN_CLASSES = (
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizer",
    "GemmaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "BaichuanTokenizer", "InternLMTokenizer",
    "InternLM2Tokenizer", "YiTokenizer", "OrionTokenizer", "MiniCPMTokenizer", "AquilaTokenizer", "SkyworkTokenizer",
)  # fmt: skip
_BLANK = "▁"
_NEVER = -1e6  # score of a piece that no text becomes
_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def build_from_sentencepiece(path: Path, config: Mapping[str, Any]) -> Built:
    """The tokenizer of model file ``path``; ``config`` is tokenizer_config.json beside it.

    ``add_bos_token`` (true unless stated) and ``add_eos_token`` (false) say what stands around a text;
    ``add_prefix_space`` false takes away the blank that the model puts before one. With ``legacy`` (true unless stated)
    each text between added tokens gets that blank, else only one that begins the prompt and has none. Raises
    ``ModelLoadError`` for a corrupt model and for added tokens that contradict it.
    """
    model = read_sentencepiece(path)
    declared = declared_tokens(path.parent, config)
    pieces = _renamed(path, model, declared)
    flags = {name: _flag(path, config, name, default) for name, default in _FLAGS.items()}
    has_prefix = model.adds_dummy_prefix and flags["add_prefix_space"]
    added = _added_tokens(path.parent, config, pieces, declared)
    rust = build_rust(model._replace(pieces=pieces, adds_dummy_prefix=has_prefix), added, flags["legacy"])
    add_tokens(rust, added, str(path))
    bos, eos = (None if i is None else pieces[i].text for i in (model.bos_id, model.eos_id))
    named = named_tokens(path.parent, config)
    begin = _name(named, "bos_token", bos) if flags["add_bos_token"] else None
    put_around(rust, begin, _name(named, "eos_token", eos) if flags["add_eos_token"] else None)
    return Built(rust, bos, eos)


def build_rust(model: SentencePieceModel, added: Mapping[int, AddedToken], prefixes_each: bool) -> Tokenizer:
    """The tokenizer of ``model`` before its ``added`` tokens (those found in a text as it is written) are added to it.

    ``prefixes_each``: whether each text between added tokens gets the model's blank, or only one that begins the
    prompt.
    """
    # Other pieces of the user's are found in the normalized text, as SentencePiece does.
    wholes = [p.text for i, p in enumerate(model.pieces) if p.kind == Kind.USER_DEFINED and i not in added]
    has_prefix = model.adds_dummy_prefix
    rust = Tokenizer(_algorithm(model, added, bool(wholes)))
    rust.normalizer = _normalizer(model, has_prefix and prefixes_each)
    steps: list[Any] = []
    if has_prefix and not prefixes_each:
        steps.append(pre_tokenizers.Metaspace(_BLANK, prepend_scheme="first", split=False))
    if wholes:
        longest_first = sorted(wholes, key=len, reverse=True)
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
        # What is left whole is looked up, and a text that is spelled as the piece of a byte is no such piece.
        steps.append(pre_tokenizers.Split(Regex(r"(?<=\A<0x[0-9A-F])[0-9A-F]>\z"), "isolated"))
    if steps:
        rust.pre_tokenizer = pre_tokenizers.Sequence(steps)
    rust.decoder = _decoder(model, has_prefix)
    return rust


_FLAGS = {"add_bos_token": True, "add_eos_token": False, "legacy": True, "add_prefix_space": True}


def _flag(path: Path, config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"{path.parent / CONFIG_FILE}: {name} is {value!r}; expected true or false")
    return value


def _renamed(path: Path, model: SentencePieceModel, declared: Mapping[int, AddedToken]) -> list[Piece]:
    """The pieces, those that are no text of the language's own under the names that the folder gives them."""
    pieces = list(model.pieces)
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    for token_id, token in declared.items():
        if token_id >= len(pieces) or pieces[token_id].text == token.content:
            continue
        piece, elsewhere = pieces[token_id], ids.get(token.content)
        if piece.kind in (Kind.NORMAL, Kind.BYTE) or (elsewhere is not None and elsewhere not in declared):
            source = f"{path.parent / CONFIG_FILE}: added_tokens_decoder"
            raise disagreement(token.content, token_id, source, elsewhere, piece.text, str(path))
        pieces[token_id] = piece._replace(text=token.content)
    return pieces


def _added_tokens(
    folder: Path, config: Mapping[str, Any], pieces: list[Piece], declared: Mapping[int, AddedToken]
) -> dict[int, AddedToken]:
    """Tokens that are found in the text as it is written: declared and named ones, and the model's control tokens."""
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    added = {
        i: AddedToken(piece.text, special=piece.kind == Kind.CONTROL, normalized=False)
        for i, piece in enumerate(pieces)
        if piece.kind == Kind.CONTROL or (piece.kind == Kind.USER_DEFINED and _CONTROL_SHAPE.fullmatch(piece.text))
    }
    named = [token for token in named_tokens(folder, config).values() if token is not None]
    for token in (*listed_tokens(folder, config), *named):
        if token.content in ids:
            added[ids[token.content]] = token
    for i, piece in enumerate(pieces):
        if piece.kind == Kind.UNKNOWN:
            added.setdefault(i, AddedToken(piece.text, special=True, normalized=False))
    added |= declared
    return {i: _in_raw_text(added[i]) for i in sorted(added)}


def _in_raw_text(token: AddedToken) -> AddedToken:
    """The token, found in the text as it is written whatever its flag ``normalized`` says.

    So did the tokenizers that these files were made for; in a normalized text the blank before each part is there
    already.
    """
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _algorithm(model: SentencePieceModel, added: Mapping[int, AddedToken], has_wholes: bool) -> Any:
    pieces = model.pieces
    unknown = pieces[model.unk_id].text
    if model.is_unigram:
        texts = (Kind.NORMAL, Kind.USER_DEFINED)
        scored = [
            (piece.text, piece.score if piece.kind in texts and i not in added else _NEVER)
            for i, piece in enumerate(pieces)
        ]
        return models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.has_byte_fallback)
    # Merged by score, equal ones by place; only pieces of text are merged.
    normal = [(i, piece) for i, piece in enumerate(pieces) if piece.kind == Kind.NORMAL]
    order = sorted(normal, key=lambda entry: (-entry[1].score, entry[0]))
    return models.BPE(
        {piece.text: i for i, piece in enumerate(pieces)},
        ordered_merges({piece.text: rank for rank, (_, piece) in enumerate(order)}),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
        ignore_merges=has_wholes,
    )


def _normalizer(model: SentencePieceModel, prefixes_each: bool) -> Any:
    blank = _BLANK if model.escapes_blanks else " "
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_blanks:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefixes_each:
        steps.append(normalizers.Prepend(" "))
    if model.escapes_blanks:
        steps.append(normalizers.Replace(" ", _BLANK))
    if model.removes_extra_blanks:  # at the end also the sign itself, as SentencePiece does
        steps.append(normalizers.Replace(Regex(rf"{blank}+\z"), ""))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel, has_prefix: bool) -> Any:
    steps: list[Any] = [decoders.Replace(_BLANK, " ")]
    if model.has_byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _name(named: Mapping[str, AddedToken | None], key: str, default: str | None) -> str | None:
    token = named.get(key)
    return default if key not in named else None if token is None else token.content


def put_around(rust: Tokenizer, begin: str | None, end: str | None) -> None:
    """Put tokens around each text, where there are such and the vocabulary has them."""
    ids = {token: rust.token_to_id(token) for token in (begin, end) if token is not None}
    around = [token for token in (begin, "$A", end) if token == "$A" or (token and ids[token] is not None)]
    if len(around) > 1:
        special = [(token, ids[token]) for token in around if token in ids]
        rust.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
