"""A ``tokenizers.Tokenizer`` of a folder that has only a tekken.json, Mistral's way to write a tiktoken vocabulary.

Called by ``tokenizer_folder`` for folders without tokenizer.json. The file says its split pattern and control tokens
itself; ids are those of the mistral-common library, which is not needed.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from backend_engine.errors import ModelLoadError
from backend_engine.text.added_tokens import add_tokens, read_object
from backend_engine.text.bpe_merges import ordered_merges
from backend_engine.text.tiktoken_ranks import check_ranks, is_portable
from backend_engine.text.tiktoken_tokenizer import Built, spelled_ranks

MODEL_FILE = "tekken.json"
_BOS, _EOS = "<s>", "</s>"
# Control tokens of files that do not list theirs, by id; the others have no name.
_USUAL = (
    "<unk>", _BOS, _EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def build_from_tekken(path: Path) -> Built:
    """The tokenizer of a tekken.json. ``ModelLoadError`` names file, key and what was expected.

    Control tokens have the first ids and the ranks follow them; of the ranks only those count that the vocabulary's
    size leaves room for. A text begins with ``<s>``.
    """
    state = read_object(path)
    config = state.get("config")
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: config is {type(config).__name__}; expected an object")
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not is_portable(pattern):
        raise ModelLoadError(f"{path}: config.pattern is {pattern!r}; expected a regular expression without $")
    num_ids, num_special = (_size(path, config, key) for key in ("default_vocab_size", "default_num_special_tokens"))
    ranks = _ranks(path, state.get("vocab"), num_ids - num_special)
    special = _special_tokens(path, state.get("special_tokens"), num_special)
    spelled = spelled_ranks(ranks)
    shifted = {token: rank + num_special for token, rank in spelled.items()}
    rust = Tokenizer(models.BPE({**special, **shifted}, ordered_merges(spelled), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    rust.decoder = decoders.ByteLevel()
    added = {i: AddedToken(text, special=True, normalized=False) for text, i in special.items()}
    add_tokens(rust, added, str(path))
    if _BOS in special:
        begin = (_BOS, special[_BOS])
        rust.post_processor = processors.TemplateProcessing(single=f"{_BOS} $A", special_tokens=[begin])
    return Built(rust, *(name if name in special else None for name in (_BOS, _EOS)))


def _size(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{path}: config.{key} is {value!r}; expected an integer of at least 1")
    return value


def _ranks(path: Path, vocab: Any, size: int) -> dict[bytes, int]:
    """Token and rank of the first ``size`` entries."""
    if not isinstance(vocab, list) or not 256 <= size <= len(vocab):
        raise ModelLoadError(
            f"{path}: vocab has {len(vocab) if isinstance(vocab, list) else 0} tokens; expected {size} or more, as "
            "default_vocab_size without default_num_special_tokens, and at least 256"
        )
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(vocab[:size]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            rank = int(entry["rank"])
        except (TypeError, KeyError, ValueError, binascii.Error):
            raise ModelLoadError(
                f"{path}: vocab[{number}] is {str(entry)[:60]}; expected rank, and token_bytes in base64"
            ) from None
        if token in ranks:
            raise ModelLoadError(f"{path}: vocab[{number}] has the token {token!r} a second time; expected each once")
        ranks[token] = rank
    check_ranks(path, ranks)
    return ranks


def _special_tokens(path: Path, listed: Any, size: int) -> dict[str, int]:
    """Id of each control token; ids that the file gives no name are ``<SPECIAL_ID>``."""
    names = dict(enumerate(_USUAL[:size])) if listed is None else {}
    for number, entry in enumerate(listed or ()):
        rank, text = (entry.get(key) for key in ("rank", "token_str")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(rank, int) or not 0 <= rank < size or rank in names:
            raise ModelLoadError(
                f"{path}: special_tokens[{number}] is {str(entry)[:60]}; expected token_str, and a rank of its own "
                f"below {size}"
            )
        names[rank] = text
    ids = {names.get(i, f"<SPECIAL_{i}>"): i for i in range(size)}
    if len(ids) != size:
        raise ModelLoadError(f"{path}: special_tokens has a token_str twice; expected each once")
    return ids
