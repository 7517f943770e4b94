"""``Tokenizer``: text to ids and back, and what the rest of the engine wants to know about a vocabulary.

Wraps a Hugging Face tokenizer folder or a GGUF file; called by ``LLM`` and the adapters from any thread. Goes straight
to the Rust tokenizer underneath and never changes its settings, since Hugging Face's own call does so and is not
thread-safe. Never loads weights.
"""

import functools
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend_engine.errors import InvalidRequestError
from backend_engine.logger import get_logger
from backend_engine.text.folder_agreement import check_folder, check_same_ids, has_tokenizer
from backend_engine.text.literal_encoder import LiteralEncoder, encode_inside
from backend_engine.text.post_processor import ids_around_texts
from backend_engine.text.token_table import TokenTable, build_token_table
from backend_engine.text.tokenizer_folder import open_tokenizer

_log = get_logger(__name__)

# Control tokens that some models forget to mark as special, such as <|user|> or DeepSeek's wide-barred ones.
_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
# Places for images and sounds, which a model for text alone has no embedding of.
_MEDIA_NAMES = re.compile(r"(image|video|audio|boi|eoi|boa|eoa|vision).*_token")


def load_tokenizer(tokenizer_dir: str | Path, trust_remote_code: bool = False) -> "Tokenizer":
    """Load the tokenizer of a Hugging Face folder or of a GGUF file (or a folder with nothing else).

    No network is asked, and no code of the folder's run unless trusted. Raises ``ModelLoadError`` (one line: the
    folder, and the files looked for or what is wrong with them).
    """
    folder = Path(tokenizer_dir)
    tokenizer = Tokenizer(open_tokenizer(folder, trust_remote_code))
    check_folder(folder, tokenizer.rust)
    if tokenizer.has_end_token:
        _log.info("%s puts an end token behind texts; prompts go without it, since they are to be continued", folder)
    return tokenizer


def check_same_tokenizer(
    tokenizer: "Tokenizer", tokenizer_dir: str | Path, model_dir: str | Path, trust_remote_code: bool = False
) -> None:
    """Refuse a tokenizer from elsewhere whose ids are not those of the tokenizer that the model's folder brings.

    It may have more or fewer tokens. Nothing is compared when the model's folder is the same or brings none.
    """
    folder, model = Path(tokenizer_dir), Path(model_dir)
    if not has_tokenizer(model) or folder.resolve() == model.resolve():
        return
    check_same_ids(tokenizer.vocabulary(), folder, load_tokenizer(model, trust_remote_code).vocabulary(), model)


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
        self._literal_encoder: LiteralEncoder | None = None

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
        self._prefix_ids, self.has_end_token = self._around_texts()

    @property
    def rust(self) -> Any:
        """The ``tokenizers.Tokenizer`` underneath, ``None`` for tokenizers in Python."""
        return self._rust

    def vocabulary(self) -> dict[str, int]:
        """Id of each token, added ones included."""
        if self._rust is not None:
            return dict(self._rust.get_vocab(with_added_tokens=True))
        return dict(self._hf.get_vocab())

    @functools.cached_property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary().values(), default=-1) + 1

    def ids_from(self, first_id: int) -> dict[int, str]:
        """The tokens of all ids from ``first_id`` on, by id."""
        if first_id >= self.num_ids:
            return {}
        beyond = {i: token for token, i in self.vocabulary().items() if i >= first_id}
        return {i: beyond[i] for i in sorted(beyond)}

    @property
    def media_tokens(self) -> frozenset[str]:
        """Tokens that stand for images and sounds, as the tokenizer's own settings name them."""
        names = self.special_token_names.items()
        return frozenset(token for name, token in names if _MEDIA_NAMES.fullmatch(name))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; control tokens spelled in it are control tokens.

        ``add_special_tokens`` puts in front what the model wants there: a begin token stands once, also before a text
        that starts with one or several (a rendered chat template), and nothing is put behind, since a prompt is to be
        continued. Raises ``InvalidRequestError`` for text that is not Unicode.
        """
        ids = self._encode(text, False)
        if not add_special_tokens:
            return ids
        prefix, bos, start = self._prefix_ids, self.bos_token_id, 0
        while prefix and ids[start : start + len(prefix)] == prefix:
            start += len(prefix)
        while bos is not None and ids[start : start + 2] == [bos, bos]:
            start += 1
        if bos is not None and ids[start : start + 1] == [bos]:
            prefix = [i for i in prefix if i != bos]
        return [*prefix, *ids[start:]]

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
                self._literal_encoder = LiteralEncoder(self._rust, self.control_tokens)
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
            ids = encode_inside(self.encode_plain, spelling)
            if ids and ids not in variants:
                variants.append(ids)
        return variants

    def token_table(self) -> TokenTable:
        """What each token is in text, for detokenizers; built on first use and shared."""
        with self._lock:
            if self._table is None:
                self._table = build_token_table(self._rust, self.num_ids, self.special_ids)
            return self._table

    def _around_texts(self) -> tuple[list[int], bool]:
        """What the tokenizer puts in front of a text, a begin token at most once, and whether it puts one behind."""
        if self._rust is None:
            place = -1  # no id of any token
            whole = list(self._hf.build_inputs_with_special_tokens([place]))
            before, after = whole[: whole.index(place)], whole[whole.index(place) + 1 :]
        else:
            before, after = ids_around_texts(self._rust.post_processor)
        bos = self.bos_token_id
        return [i for at, i in enumerate(before) if i != bos or i not in before[:at]], bool(after)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._rust is None:
            with self._lock:
                return list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        try:
            return list(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            raise _not_unicode(text) from None


def _not_unicode(text: str) -> InvalidRequestError:
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), 0)
    return InvalidRequestError(f"the text is not valid Unicode: character {at} is half of a surrogate pair")
