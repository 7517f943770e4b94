"""GGUF files that hold a tokenizer and no weights, written with the gguf package from small trained tokenizers.

``SPLITS``: how texts are split by the models' own tokenizer.json files, by the names that GGUF files use.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from tests.support.tokenizer_folders import PARTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ bos_token }}"
CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
USERS = ("<think>", "a b")
BPE_IDS = {"bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 3}

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(*patterns: str) -> Any:
    """What tokenizer.json files say: split by each, then bytes."""
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), BYTES])


# As the tokenizer.json files of models state them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+"
    "[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|"
    "\\s+(?!\\S)|\\s+"
)
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CASED = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"  # of Unicode as the library has it
MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
SPLITS: dict[str, Any] = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "smollm": pre_tokenizers.Sequence([DIGITS, GPT2]),
    "starcoder": pre_tokenizers.Sequence([DIGITS, GPT2]),
    "refact": pre_tokenizers.Sequence([DIGITS, GPT2]),
    "command-r": pre_tokenizers.Sequence([DIGITS, GPT2]),
    "llama-bpe": split(LLAMA3),
    "dbrx": split(LLAMA3),
    "chatglm-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "stablelm2": split(QWEN2),
    "qwen35": split(QWEN35),
    "gpt-4o": split(O200K),
    "tekken": split(TEKKEN),
    "deepseek-v3": split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3),
    "deepseek-llm": split("[\r\n]", CASED, MARKS, r"\s+$", HAN, r"\p{N}+"),
    "deepseek-coder": split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    "bailingmoe": split(BAILING),
    "seed-coder": split(SEED),
}


def write_gguf(path: Path, values: Mapping[str, Any]) -> Path:
    """A file with these metadata and no tensor; keys whose value is ``None`` are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def keyed(**values: Any) -> dict[str, Any]:
    """``tokenizer.ggml.NAME`` for each name."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def sentencepiece_values(processor: sentencepiece.SentencePieceProcessor, kind: str, **more: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece model, as converters write them; ``more`` adds and overrides."""
    ids = range(processor.vocab_size())
    types = [
        UNKNOWN if processor.is_unknown(i)
        else CONTROL if processor.is_control(i)
        else BYTE if processor.is_byte(i)
        else UNUSED if processor.is_unused(i)
        else NORMAL
        for i in ids
    ]  # fmt: skip
    values = {
        "model": kind,
        "pre": "default",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [float(processor.get_score(i)) for i in ids],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return keyed(**(values | more))


def train_bpe(pre_tokenizer: Any, is_nfc: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``PARTS`` whose texts are split by ``pre_tokenizer``, with control and user's tokens."""
    rust = Tokenizer(models.BPE())
    if is_nfc:
        rust.normalizer = normalizers.NFC()
    rust.pre_tokenizer = pre_tokenizer
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(["".join(PARTS[i:] + PARTS[:i]) for i in range(len(PARTS))] * 3, trainer)
    rust.add_tokens([AddedToken(token, normalized=False) for token in USERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", additional_special_tokens=list(CONTROLS[2:])
    )


def bpe_values(tokenizer: PreTrainedTokenizerFast, pre: str, /, **more: Any) -> dict[str, Any]:
    """The metadata of a byte-level BPE, as converters write them; ``more`` adds and overrides."""
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    merges = [" ".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.model.__getstate__())["merges"]]
    types = [
        CONTROL if by_id[i] in CONTROLS else USER_DEFINED if by_id[i] in USERS else NORMAL for i in range(len(by_id))
    ]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id[i] for i in range(len(by_id))],
        "token_type": types,
        "merges": merges,
        **BPE_IDS,
    }
    return keyed(**(values | more))


@functools.cache
def trained(name: str) -> PreTrainedTokenizerFast:
    """``train_bpe`` with the split of ``SPLITS``; do not change it."""
    return train_bpe(SPLITS[name], is_nfc=name in ("qwen2", "olmo", "command-r"))


def bpe_with(**more: Any) -> dict[str, Any]:
    """The metadata of ``trained("gpt-2")``; ``more`` adds and overrides."""
    return bpe_values(trained("gpt-2"), "gpt-2", **more)
