"""Opens the tokenizer of a Hugging Face folder, whatever kind of files it has, as an object of transformers.

Called by ``tokenizer.load_tokenizer``. tokenizer.json is transformers' affair; folders with only a tiktoken ranks file
or a SentencePiece model, and GGUF files, are read here, exactly and without code of their own. Asks no network, loads
no weights.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backend_engine.config.engine_files import check_listed, check_small_files, is_engine_folder
from backend_engine.config.engine_manifest import read_manifest
from backend_engine.config.gguf_metadata import find_gguf, split_files
from backend_engine.errors import ModelLoadError
from backend_engine.logger import get_logger
from backend_engine.text.added_tokens import (
    CONFIG_FILE,
    declared_tokens,
    listed_tokens,
    named_tokens,
    read_object,
)
from backend_engine.text.gguf_tokenizer import build_from_gguf
from backend_engine.text.sentencepiece_tokenizer import MODEL_FILE, PLAIN_CLASSES, build_from_sentencepiece
from backend_engine.text.tekken_tokenizer import MODEL_FILE as TEKKEN_FILE
from backend_engine.text.tekken_tokenizer import build_from_tekken
from backend_engine.text.tiktoken_tokenizer import Built, build_from_ranks, find_ranks_file

_log = get_logger(__name__)

FAST_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
# One of these must be there; the last ones serve tokenizers that bring their own code.
TOKENIZER_FILES = (
    FAST_FILE,
    MODEL_FILE,
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    TEKKEN_FILE,
    "vocab.json",
    "vocab.txt",
    CONFIG_FILE,
)
_FAST_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_MAX_REASON_CHARS = 300


def open_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder, or of a GGUF file, an object of transformers.

    A folder's GGUF file counts where nothing but tokenizer_config.json speaks of a tokenizer beside it; a chat template
    beside it comes before its own. An engine folder's files are compared with what its engine.json lists, and no code
    of it runs. Raises ``ModelLoadError`` (one line: folder or file, key, and what was expected or went wrong).
    """
    if folder.is_file() and folder.suffix == ".gguf":
        return _open_gguf(split_files(folder)[0])
    if not folder.is_dir():
        raise ModelLoadError(f"tokenizer folder {folder} does not exist or is neither a folder nor a GGUF file")
    if is_engine_folder(folder):
        _check_engine_folder(folder)
        if trust_remote_code:
            _log.info("%s is an engine folder, whose code never runs: trust_remote_code is ignored", folder)
        trust_remote_code = False
    ranks = find_ranks_file(folder)
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if set(found) <= {CONFIG_FILE} and ranks is None:
        gguf = find_gguf(folder)
        if gguf is not None:
            return _open_gguf(gguf, _chat_template(folder, read_object(folder / CONFIG_FILE)))
    if not found and ranks is None:
        raise ModelLoadError(f"no tokenizer in {folder}: looked for {', '.join(TOKENIZER_FILES)}, *.tiktoken, *.gguf")
    config = read_object(folder / CONFIG_FILE)
    declared_tokens(folder, config)
    with _one_line(f"{folder} ({', '.join(found)})"):
        return _open(folder, config, ranks, trust_remote_code)


def _check_engine_folder(folder: Path) -> None:
    manifest = read_manifest(folder)
    check_listed(folder, manifest)
    check_small_files(folder, manifest)


@contextlib.contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Turn what the libraries raise for files that they cannot read into a ``ModelLoadError`` of one line."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        # The Rust library raises bare ``Exception``, beside the usual classes for unreadable files.
        usual = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError)
        if not isinstance(error, usual) and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it brings code of its own, which runs only with trust_remote_code"
        raise ModelLoadError(f"cannot load the tokenizer in {where}: {reason}") from error


def _open_gguf(path: Path, chat_template: str | dict[str, str] | None = None) -> Any:
    """The tokenizer of a GGUF file; ``chat_template``, if any, stands in the place of the file's."""
    with _one_line(str(path)):
        built = build_from_gguf(path)
        return _as_hugging_face(built.rust, built.names, chat_template=chat_template or built.chat_template)


def _open(folder: Path, config: Mapping[str, Any], ranks: Path | None, trust_remote_code: bool) -> Any:
    has_code = _has_code(config)
    if (folder / FAST_FILE).is_file():
        if has_code and not trust_remote_code:
            _log.info("%s is used without the code beside it: trust_remote_code is off", folder / FAST_FILE)
        return _open_fast(folder, config, runs_code=has_code and trust_remote_code)
    if ranks is not None:
        built = build_from_ranks(ranks, config)
        if built is not None:
            return _wrap(folder, config, built)
        if not (has_code and trust_remote_code):
            raise _unknown_class(folder, config, f"nothing says how {ranks.name} splits a text")
    elif (folder / MODEL_FILE).is_file() and not (has_code and trust_remote_code):
        kind = str(config.get("tokenizer_class") or "LlamaTokenizer")
        if kind in PLAIN_CLASSES:
            return _wrap(folder, config, build_from_sentencepiece(folder / MODEL_FILE, config))
    elif (folder / TEKKEN_FILE).is_file() and not (has_code and trust_remote_code):
        return _wrap(folder, config, build_from_tekken(folder / TEKKEN_FILE))
    return _open_by_class(folder, config, has_code, trust_remote_code)


def _open_fast(folder: Path, config: Mapping[str, Any], runs_code: bool) -> Any:
    """The tokenizer of tokenizer.json, through the class that the folder names where transformers has it."""
    kind = config.get("tokenizer_class")
    is_plain = kind in _FAST_CLASSES or (not kind and not (folder / "config.json").is_file()) or _has_code(config)
    if not is_plain and kind:
        is_plain = not _is_known(str(kind))
    if is_plain and not runs_code:
        from transformers import PreTrainedTokenizerFast  # a second to import: not before a tokenizer is wanted

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return _ask_transformers(folder, runs_code)


def _open_by_class(folder: Path, config: Mapping[str, Any], has_code: bool, trust_remote_code: bool) -> Any:
    """Files that only the class which the folder names can read."""
    kind = config.get("tokenizer_class")
    if not (has_code and trust_remote_code) and kind and not _is_known(str(kind)):
        raise _unknown_class(folder, config, "its files need that class")
    return _ask_transformers(folder, has_code and trust_remote_code)


def _ask_transformers(folder: Path, runs_code: bool) -> Any:
    from transformers import AutoTokenizer  # imports torch too, where it is installed

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=runs_code)


def _has_code(config: Mapping[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    return bool(auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map)


def _is_known(kind: str) -> bool:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name  # imports torch too

    base = kind.removesuffix("Fast")
    return any(tokenizer_class_from_name(name) is not None for name in (kind, base, f"{base}Fast"))


def _unknown_class(folder: Path, config: Mapping[str, Any], why: str) -> ModelLoadError:
    kind = config.get("tokenizer_class")
    code = (
        "its own code runs only with trust_remote_code"
        if _has_code(config)
        else f"expected {FAST_FILE}, or a class that transformers has"
    )
    return ModelLoadError(f"{folder / CONFIG_FILE}: tokenizer_class {kind!r} is not known, and {why}; {code}")


def _wrap(folder: Path, config: Mapping[str, Any], built: Built) -> Any:
    """``built`` as a tokenizer of transformers, with the names and the chat template that the JSON files give."""
    named: dict[str, Any] = dict(named_tokens(folder, config))
    for name, default in (("bos_token", built.bos), ("eos_token", built.eos)):
        if name not in named and default is not None:
            named[name] = default
    known = {token.content for token in built.rust.get_added_tokens_decoder().values()}
    return _as_hugging_face(
        built.rust,
        {name: token for name, token in named.items() if token is not None},
        extra_special_tokens=[token for token in listed_tokens(folder, config) if token.content not in known],
        clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
        chat_template=_chat_template(folder, config),
    )


def _as_hugging_face(rust: Any, named: Mapping[str, Any], **settings: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    settings.setdefault("clean_up_tokenization_spaces", False)
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=_AsItIs(rust), **named, **settings)


class _AsItIs:
    """Stands for a tokenizer where transformers would copy it, which takes a second for a large vocabulary."""

    def __init__(self, rust: Any) -> None:
        self._rust = rust

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._rust


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template of chat_template.jinja, else of tokenizer_config.json; several by their names."""
    try:
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder / TEMPLATE_FILE} cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"{folder / CONFIG_FILE}: chat_template is a {type(template).__name__}; expected a text")
    return template
