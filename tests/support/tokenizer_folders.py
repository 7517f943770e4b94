"""Tokenizer folders without tokenizer.json, written to disk: tiktoken ranks files and SentencePiece models; no network.

The ranks come from a few words, the SentencePiece models from a few sentences; both are small and always the same.
"""

import base64
import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from backend_engine.text.tiktoken_ranks import KIMI_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN

WORDS = (
    "Hello", " Hello", " world", " the", "the", "'s", "'ll", "中文", "文字", " caf", "é", "é ", "123", "12", "  ",
    "    ", "\n\n", " \n", "!!", "...", "aa", "aaa", "aaaa", "abab", "ababab", "語", "🦙", " 🦙", "Ab", "AB", "/usr",
    "://", "\u0301",
)  # fmt: skip
# Texts are made of these: words and what splits or merges them.
PARTS = (
    *WORDS, "zqz", "a", "b", "x", " ", "\t", "\r\n", "\n", "I'LL", "'ſ", "1", "4567", "٣", "!", "?", "\u00a0", "\u3000",
    "ǅ", "Ж", "e\u0301", "한", "\U0001f1e9\U0001f1ea", "[", "]",
)  # fmt: skip
KIMI_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "[EOT]")
# How a ranks file is stored and what it must be split by: file name, tokenizer_config.json, pattern.
RANKS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "kimi": (
        "tiktoken.model",
        {
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        },
        KIMI_PATTERN,
    ),
    "qwen": (
        "qwen.tiktoken",
        {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}},
        QWEN_PATTERN,
    ),
    "llama3": ("tokenizer.model", {}, LLAMA3_PATTERN),
    "o200k": ("o200k_harmony.tiktoken", {}, O200K_PATTERN),
}


def small_ranks() -> dict[bytes, int]:
    """Every byte, every beginning of ``WORDS``, and some tokens that join others, so that merges compete."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in WORDS:
        encoded = word.encode()
        for end in range(2, len(encoded) + 1):
            ranks.setdefault(encoded[:end], len(ranks))
    ranks[b"zqz"] = len(ranks)  # which no two tokens make: only a whole piece is it
    rng = random.Random(7)
    tokens = sorted(ranks)
    while len(ranks) < 700:
        joined = rng.choice(tokens) + rng.choice(tokens)
        if len(joined) <= 8:
            ranks.setdefault(joined, len(ranks))
    return ranks


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """A tiktoken ranks file."""
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


def added(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    """An entry of ``added_tokens_decoder``."""
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **plain, **flags}


def ranks_folder(folder: Path, kind: str, **settings: Any) -> Path:
    """A folder of kind ``RANKS``; ``settings`` override its tokenizer_config.json."""
    name, config, _ = RANKS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    ranks = small_ranks()
    write_ranks(folder / name, ranks)
    if kind == "kimi":
        tokens = {str(len(ranks) + i): added(text) for i, text in enumerate(KIMI_TOKENS)}
        config = config | {"added_tokens_decoder": tokens | {str(len(ranks) + 22): added("<think>", special=False)}}
    if config | settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder


TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_TEKKEN_SPECIAL = 30


def tekken_folder(folder: Path, **state: Any) -> Path:
    """A folder with a tekken.json of ``small_ranks``, the last 10 of which its size leaves out; ``state`` overrides."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = small_ranks()
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    config = {
        "pattern": TEKKEN_PATTERN,
        "default_vocab_size": len(ranks) - 10 + NUM_TEKKEN_SPECIAL,
        "default_num_special_tokens": NUM_TEKKEN_SPECIAL,
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab} | state))
    return folder


SENTENCE_PARTS = (
    "ab", "abc", "hello", "world", "né", "中文", "x.", "don't", "1 2", "<0x4", "1>", "the", "them", "then", "  two",
    "UP",
)  # fmt: skip
SENTENCEPIECE_PARTS = (*SENTENCE_PARTS, " ", "  ", "▁", "a", "z", "!", "\n", "\t", "🦙", "ﬁ", "<0x41>", "</s>x", "語")


def sentencepiece_folder(
    folder: Path, algorithm: str, config: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[Path, sentencepiece.SentencePieceProcessor]:
    """A folder with a tokenizer.model of ``algorithm`` (``unigram``, ``bpe``, ``word``, ``char``), and its processor.

    ``settings``: the trainer's. ``config``: tokenizer_config.json, if any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(3)
    sentences = [
        "".join(rng.choice((" ", "", "  ")) + rng.choice(SENTENCE_PARTS) for _ in range(9)) for _ in range(300)
    ]
    written = io.BytesIO()
    usual = {"vocab_size": 360, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=written, model_type=algorithm, **(usual | settings)
    )
    path = folder / "tokenizer.model"
    path.write_bytes(written.getvalue())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, sentencepiece.SentencePieceProcessor(model_file=str(path))
