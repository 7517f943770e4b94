"""Finds two tokenizers that disagree: several files of one folder, or two folders that one request goes through.

Called when a tokenizer is loaded, and by ``LLM`` and the preprocessing adapter, which see both the tokenizer's folder
and the model's. A disagreement is a one-line ``ModelLoadError``; nothing is ever repaired.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend_engine.config.gguf_metadata import find_gguf
from backend_engine.errors import ModelLoadError
from backend_engine.logger import get_logger
from backend_engine.text.added_tokens import ADDED_FILE, CONFIG_FILE, declared_tokens, disagreement, read_object
from backend_engine.text.sentencepiece_model import Kind, read_sentencepiece
from backend_engine.text.tiktoken_ranks import is_ranks_file

_log = get_logger(__name__)

FAST_FILE = "tokenizer.json"
_VOCAB_FILE = "vocab.json"
_MODEL_FILE = "tokenizer.model"
_LEAST_SHARED = 0.5  # of the smaller vocabulary's tokens, for two folders to be about the same tokenizer


def check_folder(folder: Path, rust: Any) -> None:
    """Compare the loaded tokenizer ``rust`` (``None`` for one in Python) with the other files of its folder.

    Added tokens must have the ids that the JSON files state. Beside a tokenizer.json, the tokens of vocab.json and the
    text pieces of tokenizer.model must have the same ids in it, where it has them.
    """
    if rust is None:
        return
    config = read_object(folder / CONFIG_FILE)
    has_fast = (folder / FAST_FILE).is_file()
    source = str(folder / FAST_FILE) if has_fast else f"the vocabulary of {folder}"
    for token_id, token in declared_tokens(folder, config).items():
        found, there = rust.token_to_id(token.content), rust.id_to_token(token_id)
        if found != token_id or there != token.content:
            declaring = folder / (
                CONFIG_FILE if str(token_id) in (config.get("added_tokens_decoder") or {}) else ADDED_FILE
            )
            raise disagreement(token.content, token_id, str(declaring), found, there, source)
    if has_fast:
        for path, ids in _other_vocabularies(folder):
            _compare(path, ids, rust.get_vocab(with_added_tokens=True), folder / FAST_FILE)


def _other_vocabularies(folder: Path) -> list[tuple[Path, Mapping[str, int]]]:
    found: list[tuple[Path, Mapping[str, int]]] = []
    vocab, model = folder / _VOCAB_FILE, folder / _MODEL_FILE
    if vocab.is_file():
        found.append((vocab, {t: i for t, i in read_object(vocab).items() if isinstance(i, int)}))
    if model.is_file() and not is_ranks_file(model):
        try:
            pieces = read_sentencepiece(model).pieces
        except ModelLoadError as error:
            _log.warning("%s is used, and what lies beside it is not compared: %s", folder / FAST_FILE, error)
        else:
            found.append((model, {p.text: i for i, p in enumerate(pieces) if p.kind == Kind.NORMAL}))
    return found


def _compare(path: Path, ids: Mapping[str, int], known: Mapping[str, int], known_path: Path) -> None:
    # The one with the lowest id, so that it is the same one each time: vocabularies come in no order.
    first = min(((i, token) for token, i in ids.items() if known.get(token, i) != i), default=None)
    if first is not None:
        token_id, token = first
        raise disagreement(token, token_id, str(path), known[token], None, str(known_path))
    num_shared = sum(token in known for token in ids)
    if num_shared < _LEAST_SHARED * min(len(ids), len(known)):
        raise ModelLoadError(
            f"two tokenizers that disagree: {path} has {len(ids)} tokens and {known_path} {len(known)}, of which only "
            f"{num_shared} are the same; expected the same vocabulary in both"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder, or a GGUF file, brings a tokenizer that another one can be compared with."""
    names = (FAST_FILE, _MODEL_FILE, "tiktoken.model", "tekken.json", _VOCAB_FILE)
    if any((folder / name).is_file() for name in names) or any(folder.glob("*.tiktoken")):
        return True
    return folder.exists() and find_gguf(folder) is not None


def check_same_ids(ids: Mapping[str, int], path: Path, other_ids: Mapping[str, int], other_path: Path) -> None:
    """Refuse two tokenizer folders in which a token has different ids, or which have hardly a token in common.

    One may have tokens that the other lacks.
    """
    _compare(path, ids, other_ids, other_path)
