"""Tokens beside a vocabulary: what a tokenizer folder's JSON files declare, and how they are put into a tokenizer.

Reads tokenizer_config.json, special_tokens_map.json and added_tokens.json for ``tokenizer_folder`` and the builders of
tokenizers without tokenizer.json. Every fault is a one-line ``ModelLoadError`` that names file and key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from backend_engine.errors import ModelLoadError

CONFIG_FILE = "tokenizer_config.json"
ADDED_FILE = "added_tokens.json"
SPECIAL_FILE = "special_tokens_map.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def declared_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Id and token of each added token that states its id, by id; those of tokenizer_config.json keep their flags.

    ``config`` is tokenizer_config.json. Two tokens for an id, or two ids for a token, are refused.
    """
    stated: dict[int, tuple[AddedToken, str]] = {}
    decoder = config.get("added_tokens_decoder")
    decoder = {} if decoder is None else decoder
    where = f"{folder / CONFIG_FILE}: added_tokens_decoder"
    if not isinstance(decoder, dict):
        raise ModelLoadError(f"{where} is a {type(decoder).__name__}; expected an object of id: token")
    for key, value in decoder.items():
        if not str(key).isdecimal():
            raise ModelLoadError(f"{where} has the key {key!r}; expected a token id")
        stated[int(key)] = _token(value, f"{where}.{key}"), where
    specials = _special_spellings(folder, config)
    path = folder / ADDED_FILE
    for content, token_id in read_object(path).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelLoadError(f"{path}: {content!r} is {token_id!r}; expected a token id")
        known = stated.get(token_id)
        if known is not None and known[0].content != content:
            raise ModelLoadError(
                f"two tokenizers that disagree: id {token_id} is {content!r} in {path} and {known[0].content!r} in "
                f"{known[1]}; expected one"
            )
        if known is None:
            stated[token_id] = AddedToken(content, special=content in specials, normalized=False), str(path)
    ids: dict[str, int] = {}
    for token_id, (token, source) in stated.items():
        if ids.setdefault(token.content, token_id) != token_id:
            raise ModelLoadError(
                f"two tokenizers that disagree: {token.content!r} is id {ids[token.content]} and id {token_id} in "
                f"{source}; expected one"
            )
    return {token_id: stated[token_id][0] for token_id in sorted(stated)}


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, AddedToken | None]:
    """``bos_token`` and the like, as tokenizer_config.json says, else special_tokens_map.json; unstated ones left out.

    ``None`` where a file says that the model has none.
    """
    named: dict[str, AddedToken | None] = {}
    for file, values in ((SPECIAL_FILE, read_object(folder / SPECIAL_FILE)), (CONFIG_FILE, config)):
        for name in NAMES:
            if name in values:
                value = values[name]
                named[name] = None if value is None else _token(value, f"{folder / file}: {name}", special=True)
    return named


def _special_spellings(folder: Path, config: Mapping[str, Any]) -> set[str]:
    spellings = {token.content for token in named_tokens(folder, config).values() if token is not None}
    return spellings | {token.content for token in listed_tokens(folder, config)}


def listed_tokens(folder: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """The further special tokens that the files list without saying their ids."""
    tokens: dict[str, AddedToken] = {}
    for file, values in ((SPECIAL_FILE, read_object(folder / SPECIAL_FILE)), (CONFIG_FILE, config)):
        for key in LISTS:
            listed = values.get(key) or []
            for value in listed.values() if isinstance(listed, dict) else listed:
                token = _token(value, f"{folder / file}: {key}", special=True)
                tokens[token.content] = token
    return list(tokens.values())


def add_tokens(rust: Any, tokens: Mapping[int, AddedToken], vocabulary: str, num_ids: int = 0) -> None:
    """Add ``tokens`` to a ``tokenizers.Tokenizer`` under exactly their ids.

    ``vocabulary``: the file that the tokenizer was made of, for the refusal when it says something else of an id or a
    token. Ids in between, and up to ``num_ids``, become ``<|reserved_token_ID|>``.
    """
    base = rust.get_vocab_size(with_added_tokens=True)
    for token_id, token in tokens.items():
        there, elsewhere = rust.id_to_token(token_id), rust.token_to_id(token.content)
        if (there, elsewhere) not in ((token.content, token_id), (None, None)):
            raise disagreement(token.content, token_id, "the added tokens", elsewhere, there, vocabulary)
    end = max([num_ids, *(token_id + 1 for token_id in tokens)])
    beyond = [
        tokens.get(i) or AddedToken(f"<|reserved_token_{i}|>", normalized=False, special=False)
        for i in range(base, end)
    ]
    rust.add_tokens([*(token for token_id, token in tokens.items() if token_id < base), *beyond])


def disagreement(
    content: str, token_id: int, source: str, other_id: int | None, other_content: str | None, other_source: str
) -> ModelLoadError:
    """The refusal of two tokenizers of which one says ``content`` is ``token_id`` and the other something else."""
    said = f"has it as id {other_id}" if other_id is not None else f"has {other_content!r} there"
    return ModelLoadError(
        f"two tokenizers that disagree: {source} say{'' if source.endswith('s') else 's'} that {content!r} is id "
        f"{token_id}, but {other_source} {said}; expected the same ids in both"
    )


def _token(value: Any, where: str, *, special: bool = False) -> AddedToken:
    """An added token from its text or its JSON object. ``special``: what it is when the object does not say."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=special, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str) or not content:
        raise ModelLoadError(f"{where} is {value!r}; expected a token's text or an object with content")
    flags = {name: value[name] for name in _FLAGS if name in value}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ModelLoadError(f"{where}: {name} is {flag!r}; expected true or false")
    special_flag = flags.pop("special", special)
    return AddedToken(content, special=special_flag or special, **{"normalized": not special_flag, **flags})
