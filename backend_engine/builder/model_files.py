"""Writes what a model folder holds beside its weights: configurations, the tokenizer, the chat template.

For whoever writes folders of models. Nothing that could be run is written: no code, and no key that asks for any. What
was written is opened again and compared with the tokenizer that it came from.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.hf_folder import CONFIG_FILE, GENERATION_FILE
from backend_engine.config.gguf_metadata import find_gguf, read_gguf_header, split_files
from backend_engine.config.regular_files import open_regular
from backend_engine.errors import ConfigError, ModelLoadError, one_line
from backend_engine.text.added_tokens import ADDED_FILE, SPECIAL_FILE, read_object
from backend_engine.text.added_tokens import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from backend_engine.text.folder_agreement import FAST_FILE
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer
from backend_engine.text.tokenizer_folder import TEMPLATE_FILE, TOKENIZER_FILES, open_tokenizer

_CODE_KEY = "auto_map"
_GGUF_MODEL, _NO_TOKENIZER = "tokenizer.ggml.model", ("none", "no_vocab")
_COPIED = (*TOKENIZER_FILES, SPECIAL_FILE, ADDED_FILE, "merges.txt", TEMPLATE_FILE, "chat_template.json")
# Ranks, and versions of a file that transformers or Mistral's tools choose from.
_COPIED_PATTERNS = ("*.tiktoken", "tokenizer.*.json", "tokenizer.model.*")
# Texts that tokenizers treat unlike each other: blanks, case, digits, marks, scripts, and what looks like tokens.
_TEXTS = (
    "", " ", "Hello, world!", "  two  blanks \n\n\tand a tab ", "I'LL don't we've 'tis", "3.14159 1234567890 ١٢٣",
    "naïve café e\u0301 ﬁ ǅ", "中文 日本語 한국어", "🦙🏽 \U0001f1e9\U0001f1ea \u200d", "f(x) != {1: [2]}",
    "<s> </s> <|im_start|>user<|im_end|> [INST] <unk>", "\u00a0\u3000\ufeff\x00\x7f", "aaaaaaaaaaaaaaaa zqzqz Straße ſ",
    "https://example.org/a?b=c#d", "▁Ġ<0x41>",
)  # fmt: skip


def write_model_files(
    checkpoint: Checkpoint, folder: Path, config: Mapping[str, Any], trust_remote_code: bool = False
) -> tuple[str, ...]:
    """Write ``config`` as config.json, and the checkpoint's generation_config.json and tokenizer, if any.

    folder: is there and has none of them; it gets no folders. trust_remote_code: whether code beside the checkpoint's
    tokenizer may run to open it; none is written, so that a tokenizer that is not the same without is a ``ConfigError``
    (one line). Returns what is worth a line in a log.
    """
    _write_json(folder / CONFIG_FILE, config)
    if checkpoint.generation is not None:
        _write_json(folder / GENERATION_FILE, checkpoint.generation)
    return _write_tokenizer(checkpoint.path, folder, trust_remote_code)


def check_model_files(checkpoint: Checkpoint, trust_remote_code: bool = False) -> tuple[str, ...]:
    """Raise what ``write_model_files`` would raise, and return what it would, before any long work."""
    with tempfile.TemporaryDirectory() as folder:
        return write_model_files(checkpoint, Path(folder), checkpoint.config, trust_remote_code)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    kept = {key: value for key, value in values.items() if key != _CODE_KEY}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(source: Path, folder: Path, trust_remote_code: bool) -> tuple[str, ...]:
    files = [*_tokenizer_files(source)] if source.is_dir() else []
    names = {path.name for path in files if path.name in TOKENIZER_FILES or path.suffix == ".tiktoken"}
    # As ``open_tokenizer`` has it.
    gguf = find_gguf(source) if names <= {TOKENIZER_CONFIG_FILE} else None
    if not names and not (gguf and _has_tokenizer(gguf)):
        return (f"no tokenizer in {source}: none is written",)
    try:
        opened = open_tokenizer(source, trust_remote_code)
        tokenizer = Tokenizer(opened)
    except ModelLoadError as error:
        if names == {TOKENIZER_CONFIG_FILE} and not _has_code(source):
            return (f"no tokenizer in {source}: none is written ({error})",)
        raise ConfigError(f"the tokenizer cannot be written: {error}") from None
    if gguf or (_has_code(source) and FAST_FILE not in names and tokenizer.rust is not None):
        _save(opened, folder)
    else:
        _copy_all([*files, *_class_files(opened, source)], opened, folder)
    _check_same(tokenizer, source, folder)
    return ()


def _has_tokenizer(gguf: Path) -> bool:
    """Whether a GGUF file says anything of a tokenizer; converters can leave it out."""
    header = read_gguf_header(split_files(gguf)[0])
    return header.text(_GGUF_MODEL, _NO_TOKENIZER[0]) not in _NO_TOKENIZER


def _tokenizer_files(source: Path) -> Iterator[Path]:
    named = (source / name for name in _COPIED)
    matching = (path for pattern in _COPIED_PATTERNS for path in sorted(source.glob(pattern)))
    yield from dict.fromkeys(path for path in (*named, *matching) if path.is_file())


def _class_files(opened: Any, source: Path) -> list[Path]:
    """Further files that the tokenizer's class says it reads."""
    names = getattr(opened, "vocab_files_names", {}).values()
    paths = [source / name for name in names if isinstance(name, str) and Path(name).name == name]
    return [path for path in paths if path.name not in _COPIED and path.suffix != ".py" and path.is_file()]


def _has_code(source: Path) -> bool:
    return bool(read_object(source / TOKENIZER_CONFIG_FILE).get(_CODE_KEY))


def _copy_all(files: list[Path], opened: Any, folder: Path) -> None:
    """Copy ``files``. Several chat templates, of which some may be in a folder, go to tokenizer_config.json."""
    templates = opened.chat_template
    has_several = isinstance(templates, dict)
    for path in files:
        if path.name == TOKENIZER_CONFIG_FILE or (has_several and path.name == TEMPLATE_FILE):
            continue
        try:
            with open_regular(path) as stored, (folder / path.name).open("wb") as written:
                shutil.copyfileobj(stored, written)
        except OSError as error:
            raise ConfigError(f"the tokenizer cannot be written: {path}: {error.strerror}") from None
    config = read_object(files[0].parent / TOKENIZER_CONFIG_FILE)
    if has_several:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    if config:
        _write_json(folder / TOKENIZER_CONFIG_FILE, config)


def _save(opened: Any, folder: Path) -> None:
    """Let transformers write the tokenizer as tokenizer.json."""
    opened.save_pretrained(folder, save_jinja_files=not isinstance(opened.chat_template, dict))
    path = folder / TOKENIZER_CONFIG_FILE
    _write_json(path, read_object(path))


def _check_same(tokenizer: Tokenizer, source: Path, folder: Path) -> None:
    """Refuse what was written where it is not the tokenizer of ``source``."""
    try:
        difference = _difference(tokenizer, load_tokenizer(folder))
    except ModelLoadError as error:
        # What it names lies in a folder that is about to be gone.
        reason = one_line(error).replace(str(folder), str(source))
        raise ConfigError(f"the tokenizer of {source} cannot be written without code of its own: {reason}") from None
    if difference is not None:
        raise ConfigError(
            f"the tokenizer of {source} cannot be written: without code of its own it has {difference}; take it out of "
            "that folder and name another one when the model is served"
        )


def _difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """In what the two are unlike each other, ``None`` if in nothing."""
    pairs = {
        "another vocabulary": (one.vocabulary(), other.vocabulary()),
        "other control tokens": (one.control_tokens, other.control_tokens),
        "other special tokens": (one.special_ids, other.special_ids),
        "other names of special tokens": (_ids(one), _ids(other)),
        "another chat template": (one.chat_template(False), other.chat_template(False)),
        "another chat template for tools": (one.chat_template(True), other.chat_template(True)),
    }
    found = next((what for what, (first, second) in pairs.items() if first != second), None)
    if found is not None:
        return found
    for text in _TEXTS:
        ids = one.encode(text)
        if ids != other.encode(text) or one.encode_plain(text) != other.encode_plain(text):
            return f"other ids for {text!r}"
        if one.decode(ids, skip_special_tokens=False) != other.decode(ids, skip_special_tokens=False):
            return f"another text for the ids of {text!r}"
    return None


def _ids(tokenizer: Tokenizer) -> tuple[int | None, ...]:
    return tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
