"""tiktoken's ranks files, and the split patterns and control tokens that were published with them.

A ranks file is the vocabulary of a byte-level BPE, one ``base64-of-token rank`` a line (Kimi's tiktoken.model, Qwen's
qwen.tiktoken, OpenAI's o200k_base.tiktoken); how a text is split, and the control tokens, are said elsewhere. Used by
``tiktoken_tokenizer``. Runs no code of a folder; its source is at most read for a literal.
"""

import ast
import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from backend_engine.errors import ModelLoadError

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s+(?!\S)|\s+"
_OTHER_SYNTAX = re.compile(r"\$|\{[0-9,]+\}\+")  # means one thing to tiktoken and another here

GPT2_PATTERN = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_BLANKS}"
"""GPT-2 and r50k_base."""
CL100K_PATTERN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    rf"\s++\z|\s*[\r\n]|{_BLANKS}"
)
"""cl100k_base, in the form of tiktoken 0.8 and later (blanks at a text's end are one piece)."""
LLAMA3_PATTERN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_BLANKS}"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _cased_words(also: str, end: str = rf"{_CONTRACTIONS}?") -> str:
    """A word begins at a capital letter; ``also`` narrows its letters, ``end`` may follow them."""
    upper, lower = (rf"[\p{{{c}}}\p{{Lm}}\p{{Lo}}\p{{M}}{also}]" for c in (r"Lu}\p{Lt", "Ll"))
    begin = r"[^\r\n\p{L}\p{N}]?"
    return rf"{begin}{upper}*{lower}+{end}|{begin}{upper}+{lower}*{end}"


O200K_PATTERN = rf"{_cased_words('')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_BLANKS}"
"""o200k_base and o200k_harmony (GPT-OSS)."""
TEKKEN_PATTERN = rf"{_cased_words('', end='')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_BLANKS}"
"""Mistral's Tekken, as its tekken.json files state it."""
_NOT_HAN = r"&&[^\p{Han}]"
KIMI_PATTERN = (
    rf"[\p{{Han}}]+|{_cased_words(_NOT_HAN)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_BLANKS}"
)
"""Moonlight, Kimi K2 and Kimi Linear: Chinese is split from the rest."""


class Encoding(NamedTuple):
    """What was published with a ranks file.

    ``pattern``: regular expression of the pieces that BPE works on. ``tokens``: control tokens behind the last rank,
    one an id, ``None`` for an unused id. ``num_ids_after``: how many ids follow the ranks at least. ``bos``, ``eos``:
    the tokens that begin and end a text, unless the folder says others. ``is_nfc``: texts are brought into Unicode's
    form NFC first.
    """

    pattern: str
    tokens: tuple[str | None, ...] = ()
    num_ids_after: int = 0
    bos: str | None = None
    eos: str | None = None
    is_nfc: bool = False


_END = "<|endoftext|>"
_PROMPT_END = "<|endofprompt|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_LLAMA3_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>", "<|reserved_special_token_3|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|reserved_special_token_4|>", "<|eot_id|>", *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)  # fmt: skip
_HARMONY = {
    199998: "<|startoftext|>", 199999: _END, 200002: "<|return|>", 200003: "<|constrain|>", 200005: "<|channel|>",
    200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>",
}  # fmt: skip
_HARMONY_TOKENS = tuple(_HARMONY.get(i, f"<|reserved_{i}|>") for i in range(199998, 201088))

ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        "gpt2": Encoding(GPT2_PATTERN, (_END,), bos=_END, eos=_END),
        "r50k_base": Encoding(GPT2_PATTERN, (_END,), eos=_END),
        "cl100k_base": Encoding(CL100K_PATTERN, (None, _END, *_FIM, *[None] * 15, _PROMPT_END), eos=_END),
        "o200k_base": Encoding(O200K_PATTERN, (None, _END, *[None] * 18, _PROMPT_END), eos=_END),
        "o200k_harmony": Encoding(O200K_PATTERN, _HARMONY_TOKENS, bos="<|startoftext|>", eos="<|return|>"),
        "llama3": Encoding(LLAMA3_PATTERN, _LLAMA3_TOKENS, bos="<|begin_of_text|>", eos="<|end_of_text|>"),
        "qwen": Encoding(
            QWEN_PATTERN,
            (_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
            eos=_END,
            is_nfc=True,
        ),
        "kimi": Encoding(KIMI_PATTERN, num_ids_after=256, bos="[BOS]", eos="[EOS]"),
    }
)


def is_ranks_file(path: Path) -> bool:
    """Whether a tokenizer.model is a ranks file, and not a SentencePiece model."""
    try:
        with path.open("rb") as file:
            return _LINE.fullmatch(file.readline(4096)) is not None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a ranks file, by rank. Every byte must be a token and the ranks 0, 1, 2 and so on."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            encoded, rank = parts
            token = base64.b64decode(encoded, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error):
            raise ModelLoadError(
                f"{path} line {number} is {line[:60]!r}; expected a token in base64, a blank and its rank"
            ) from None
        if not token or token in ranks:
            what = "is empty" if not token else f"is there already, with rank {ranks[token]}"
            raise ModelLoadError(f"{path} line {number}: the token {token!r} {what}; expected each token once")
        ranks[token] = value
    check_ranks(path, ranks)
    return ranks


def check_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Every byte must be a token, and the ranks 0, 1, 2 and so on; else ``ModelLoadError``."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelLoadError(
            f"{path} has {len(ranks)} tokens and none for the byte 0x{missing[0]:02X}; expected one for each byte"
        )
    wrong = next((i for i, rank in enumerate(sorted(ranks.values())) if i != rank), None)
    if wrong is not None:
        raise ModelLoadError(f"{path} has no rank {wrong}, or two; expected the ranks 0 to {len(ranks) - 1}, each once")


def pattern_in_source(path: Path) -> str | None:
    """The split pattern that a folder's own tokenizer code states as a literal (``pat_str``); the code is not run.

    A text, or a list of texts joined by ``|``. ``None`` when there is no such file, not exactly one such literal, or
    one that uses syntax which the ``tokenizers`` library reads otherwise.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    patterns: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id.lower() == "pat_str" for target in targets):
            text = _literal(node.value)
            if text is None:
                return None
            patterns.add(text)
    if len(patterns) != 1:
        return None
    pattern = patterns.pop()
    return pattern if is_portable(pattern) else None


def is_portable(pattern: str) -> bool:
    """Whether a split pattern of tiktoken means the same to the ``tokenizers`` library, as far as known."""
    return _OTHER_SYNTAX.search(pattern) is None


def _literal(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
        ):
            texts = [_literal(part) for part in parts]
            return None if None in texts else separator.join(text for text in texts if text is not None)
        case _:
            return None
