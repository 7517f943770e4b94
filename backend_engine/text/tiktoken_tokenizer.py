"""A ``tokenizers.Tokenizer`` of a folder with a tiktoken ranks file, whose ids are those of the tiktoken library.

Called by ``tokenizer_folder`` for folders without tokenizer.json: Kimi's, Qwen 1's, Llama 3's original files, and those
named after one of OpenAI's encodings. Needs neither tiktoken nor code of the folder's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from backend_engine.errors import ModelLoadError
from backend_engine.text.added_tokens import add_tokens, declared_tokens
from backend_engine.text.bpe_merges import ordered_merges
from backend_engine.text.tiktoken_ranks import ENCODINGS, Encoding, is_ranks_file, pattern_in_source, read_ranks
from backend_engine.text.token_table import byte_level_alphabet

_KIMI_FILE = "tiktoken.model"
_SHARED_FILE = "tokenizer.model"  # of SentencePiece models too
_BY_CLASS = {"TikTokenTokenizer": "kimi", "QWenTokenizer": "qwen"}
_LLAMA_CLASSES = ("", "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")


class Built(NamedTuple):
    """A tokenizer, and the names of the tokens that begin and end a text where the folder's JSON files say none."""

    rust: Tokenizer
    bos: str | None
    eos: str | None


def find_ranks_file(folder: Path) -> Path | None:
    """The ranks file of a folder, ``None`` without one. Several are refused."""
    found = sorted(path for path in folder.glob("*.tiktoken") if path.is_file())
    if (folder / _KIMI_FILE).is_file():
        found.append(folder / _KIMI_FILE)
    if not found and (folder / _SHARED_FILE).is_file() and is_ranks_file(folder / _SHARED_FILE):
        found.append(folder / _SHARED_FILE)
    if len(found) > 1:
        raise ModelLoadError(
            f"two tokenizers that disagree: {folder} has the ranks files {', '.join(path.name for path in found)}; "
            "expected one"
        )
    return found[0] if found else None


def build_from_ranks(path: Path, config: Mapping[str, Any]) -> Built | None:
    """The tokenizer of ranks file ``path``; ``config`` is tokenizer_config.json beside it.

    ``None`` when nothing says how a text is split: the folder's own code would have to be run. ``ModelLoadError`` for a
    corrupt file, and for added tokens that contradict it.
    """
    encoding = _encoding(path, config)
    if encoding is None:
        return None
    ranks = spelled_ranks(read_ranks(path))
    rust = Tokenizer(models.BPE(ranks, ordered_merges(ranks), ignore_merges=True))
    if encoding.is_nfc:
        rust.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(encoding.pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    rust.decoder = decoders.ByteLevel()
    added = _control_tokens(encoding, len(ranks), declared_tokens(path.parent, config))
    add_tokens(rust, added, str(path), num_ids=len(ranks) + encoding.num_ids_after)
    contents = {token.content for token in added.values()}
    return Built(rust, *(name if name in contents else None for name in (encoding.bos, encoding.eos)))


def spelled_ranks(ranks: Mapping[bytes, int]) -> dict[str, int]:
    """Tokens and ranks, the tokens written as byte-level BPE writes them: one character a byte."""
    symbols = {byte: character for character, byte in byte_level_alphabet().items()}
    return {"".join([symbols[byte] for byte in token]): rank for token, rank in ranks.items()}


def _encoding(path: Path, config: Mapping[str, Any]) -> Encoding | None:
    """What was published with the file: known by the tokenizer's class or the file's name.

    A split pattern that the folder's own code states wins, since that is what the file was made with.
    """
    kind = str(config.get("tokenizer_class") or "")
    name: str | None = _BY_CLASS.get(kind) or path.name.removesuffix(".tiktoken")
    if path.name == _SHARED_FILE:
        name = _BY_CLASS.get(kind) or ("llama3" if kind in _LLAMA_CLASSES and not config.get("auto_map") else None)
    known = ENCODINGS.get(name or "")
    stated = pattern_in_source(path.parent / source) if (source := _source_file(config)) else None
    if stated is None:
        return known
    return known._replace(pattern=stated) if known is not None else Encoding(stated)


def _source_file(config: Mapping[str, Any]) -> str | None:
    """Name of the file with the folder's own tokenizer class."""
    auto_map = config.get("auto_map")
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    for reference in classes if isinstance(classes, list | tuple) else [classes]:
        if isinstance(reference, str) and "--" not in reference and reference.count(".") == 1:
            return f"{reference.split('.')[0]}.py"
    return None


def _control_tokens(encoding: Encoding, num_ranks: int, declared: Mapping[int, AddedToken]) -> dict[int, AddedToken]:
    """The added tokens by id: those that the folder declares, and the published ones that it says nothing about."""
    contents = {token.content for token in declared.values()}
    tokens = {
        num_ranks + i: AddedToken(text, special=True, normalized=False)
        for i, text in enumerate(encoding.tokens)
        if text is not None and text not in contents
    }
    tokens |= declared
    return {i: tokens[i] for i in sorted(tokens)}
