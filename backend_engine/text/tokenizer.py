"""``Tokenizer``: text to ids and back, and what the rest of the engine wants to know about a vocabulary.

Wraps a Hugging Face tokenizer folder; called by ``LLM`` and the adapters from any thread. Goes straight to the Rust
tokenizer underneath and never changes its settings, since Hugging Face's own call does so and is not thread-safe.
Never loads weights.
"""

import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend_engine.errors import InvalidRequestError, ModelLoadError
from backend_engine.text.token_table import TokenTable, build_token_table

# One of these must be there; the last ones serve tokenizers that bring their own code.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
_PLAIN_FAST_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Control tokens that some models forget to mark as special, such as <|user|> or DeepSeek's wide-barred ones.
_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_ANCHOR = "\n"  # what stands before a word in the middle of a text, and merges with no word
_MAX_REASON_CHARS = 300


def load_tokenizer(tokenizer_dir: str | Path, trust_remote_code: bool = False) -> "Tokenizer":
    """Load the tokenizer of a Hugging Face folder; no network is asked.

    Raises ``ModelLoadError`` (one line: the folder, and the files looked for or what is wrong with them).
    """
    folder = Path(tokenizer_dir)
    if not folder.is_dir():
        raise ModelLoadError(f"tokenizer folder {folder} does not exist or is not a folder")
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ModelLoadError(f"no tokenizer in {folder}: looked for {', '.join(TOKENIZER_FILES)}")
    try:
        if _is_plain_fast_tokenizer(folder):
            from transformers import PreTrainedTokenizerFast  # a second to import: not before a tokenizer is wanted

            loaded: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer  # imports torch too, where it is installed

            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The Rust library raises bare ``Exception``, beside the usual classes for unreadable files.
        usual = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError)
        if not isinstance(error, usual) and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it brings code of its own, which runs only with trust_remote_code"
        raise ModelLoadError(f"cannot load the tokenizer in {folder} ({', '.join(found)}): {reason}") from error
    return Tokenizer(loaded)


def _is_plain_fast_tokenizer(folder: Path) -> bool:
    """Whether ``AutoTokenizer`` would end at the class that only reads tokenizer.json, so that it need not be asked."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_plain = isinstance(config, dict) and config.get("tokenizer_class") in _PLAIN_FAST_CLASSES
    return is_plain and "auto_map" not in config and (folder / "tokenizer.json").is_file()


class Tokenizer:
    """A loaded tokenizer. ``hugging_face_tokenizer`` is what ``AutoTokenizer.from_pretrained`` returned.

    All methods may be called from any thread.
    """

    def __init__(self, hugging_face_tokenizer: Any) -> None:
        self._hf = hugging_face_tokenizer
        self._rust: Any = getattr(hugging_face_tokenizer, "backend_tokenizer", None)
        if self._rust is not None:
            self._rust.no_truncation()
            self._rust.no_padding()
        self._lock = threading.Lock()  # for what is built once, and for tokenizers in Python
        self._table: TokenTable | None = None
        self._literal_encoder: _LiteralEncoder | None = None

        self.bos_token_id: int | None = hugging_face_tokenizer.bos_token_id
        self.eos_token_id: int | None = hugging_face_tokenizer.eos_token_id
        pad = hugging_face_tokenizer.pad_token_id
        self.pad_token_id: int | None = self.eos_token_id if pad is None else pad
        self.vocab_size: int = len(hugging_face_tokenizer)
        """Number of ids, added tokens included."""
        added = hugging_face_tokenizer.added_tokens_decoder
        self.special_ids = frozenset(int(i) for i, token in added.items() if token.special)
        """Ids that ``skip_special_tokens`` leaves out of the text."""
        self.control_tokens: Mapping[str, int] = {
            token.content: int(i)
            for i, token in added.items()
            if token.special or _CONTROL_SHAPE.fullmatch(token.content)
        }
        """Spelling and id of each token that must never come out of a chat message's content."""
        self.special_token_names: Mapping[str, str] = {
            name: str(value)
            for name, value in hugging_face_tokenizer.special_tokens_map.items()
            if not isinstance(value, list | tuple)
        }
        """``{"bos_token": "<s>", ...}``, the variables of chat templates."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; control tokens spelled in it are control tokens.

        ``add_special_tokens`` adds what the model wants around a text, but no begin token before a text that
        starts with one (a rendered chat template). Raises ``InvalidRequestError`` for text that is not Unicode.
        """
        ids = self._encode(text, add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text`` with nothing added around it."""
        return self._encode(text, False)

    def encode_literal(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of ``text`` (nothing added) in which only the spans ``[start, end)`` are control tokens.

        Control tokens spelled elsewhere become ordinary text. Spans ascend and each spells one of
        ``control_tokens``. ``InvalidRequestError`` for tokenizers that cannot do it (those without tokenizer.json).
        """
        if self._rust is None:
            raise InvalidRequestError(
                "the text spells a control token of the model, which this model's tokenizer cannot encode as text"
            )
        with self._lock:
            if self._literal_encoder is None:
                self._literal_encoder = _LiteralEncoder(self._rust, self.control_tokens)
        try:
            return self._literal_encoder.encode(text, control_spans)
        except TypeError:
            raise _not_unicode(text) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, exactly as Hugging Face's ``decode`` gives it; ids outside the vocabulary give none."""
        text = self.decode_raw(ids, skip_special_tokens)
        return str(self._hf.clean_up_tokenization(text)) if self.cleans_up_spaces else text

    def decode_raw(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """``decode`` before blanks are cleaned up."""
        if self._rust is None:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            with self._lock:
                return str(
                    self._hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
                )
        return str(self._rust.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens=skip_special_tokens))

    @property
    def cleans_up_spaces(self) -> bool:
        """True when decoding takes out blanks before punctuation (never for BPE unless the folder insists)."""
        if not self._hf.clean_up_tokenization_spaces:
            return False
        if self._rust is None or type(self._rust.model).__name__ != "BPE":
            return True
        return bool(getattr(self._hf, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))

    def chat_template(self, with_tools: bool) -> str | None:
        """Source of the model's chat template, ``None`` without one; models may have another one for tools."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            named = template.get("tool_use") if with_tools else None
            template = named or template.get("default")
        return template or None

    def token_variants(self, word: str) -> list[list[int]]:
        """Id sequences that spell ``word`` inside a text, to forbid it: as it is, and after a blank.

        A word that begins with a blank is taken as it is. An empty word gives none.
        """
        if not word:
            return []
        variants: list[list[int]] = []
        for spelling in (word,) if word.startswith(" ") else (word, f" {word}"):
            # In front of a text some tokenizers put a blank of their own; after a line's end none does.
            prefix = self.encode_plain(_ANCHOR)
            ids = self.encode_plain(_ANCHOR + spelling)
            inside = ids[: len(prefix)] == prefix and len(ids) > len(prefix)
            ids = ids[len(prefix) :] if inside else self.encode_plain(spelling)
            if ids and ids not in variants:
                variants.append(ids)
        return variants

    def token_table(self) -> TokenTable:
        """What each token is in text, for detokenizers; built on first use and shared."""
        with self._lock:
            if self._table is None:
                self._table = build_token_table(self._rust, self.special_ids)
            return self._table

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._rust is None:
            with self._lock:
                return list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        try:
            return list(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            raise _not_unicode(text) from None


class _LiteralEncoder:
    """A copy of the tokenizer that knows the control tokens by secret names only.

    The spans that are to be control tokens are renamed before encoding; what is spelled elsewhere then is ordinary
    text, while everything around added tokens (stripping, prefixes) stays the Rust library's doing.
    """

    def __init__(self, rust: Any, control_tokens: Mapping[str, int]) -> None:
        nonce = secrets.token_hex(8)  # nobody can write these names into a message
        self._aliases = {text: f"\U000f0000{nonce}x{i}\U000f0001" for text, i in control_tokens.items()}
        self._copy = type(rust).from_str(_rename_added_tokens(rust.to_str(), self._aliases))
        self._copy.no_truncation()
        self._copy.no_padding()
        originals = {alias: text for text, alias in self._aliases.items()}
        self._real_ids: dict[int, int] = {}
        for copied, token in self._copy.get_added_tokens_decoder().items():
            self._real_ids[copied] = rust.token_to_id(originals.get(token.content, token.content))
        self._spellings = {i: text for text, i in control_tokens.items()}

    def encode(self, text: str, control_spans: Sequence[tuple[int, int]]) -> list[int]:
        parts: list[str] = []
        end = 0
        for start, stop in control_spans:
            parts += [text[end:start], self._aliases[text[start:stop]]]
            end = stop
        ids: list[int] = []
        for i in self._copy.encode("".join(parts) + text[end:], add_special_tokens=False).ids:
            if i in self._real_ids:
                ids.append(self._real_ids[i])
            elif i in self._spellings:  # a unigram vocabulary may hold the spelling as an ordinary piece
                for character in self._spellings[i]:
                    ids += self._copy.encode(character, add_special_tokens=False).ids
            else:
                ids.append(i)
        return ids


def _rename_added_tokens(tokenizer_json: str, aliases: Mapping[str, str]) -> str:
    state = json.loads(tokenizer_json)
    for token in state["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    return json.dumps(state, ensure_ascii=False)


def _not_unicode(text: str) -> InvalidRequestError:
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), 0)
    return InvalidRequestError(f"the text is not valid Unicode: character {at} is half of a surrogate pair")
