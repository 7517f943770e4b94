"""How texts are split before byte-level BPE, by the names that GGUF files give in ``tokenizer.ggml.pre``.

The names are llama.cpp's; the patterns are those of the tokenizers that the models were published with, in the
``tokenizers`` library's syntax. Used by ``gguf_tokenizer``. A name that is not here is refused there, never guessed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from backend_engine.text.tiktoken_ranks import (
    GPT2_PATTERN,
    KIMI_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN_PATTERN,
    TEKKEN_PATTERN,
)


class PreTokenizer(NamedTuple):
    """patterns: regular expressions, each of which splits the parts that the ones before it left, its matches and what
    lies between them alike. takes_wholes: a part that is a token is that token, whatever merges say. adds_bos: whether
    a text begins with the begin token unless the file says otherwise. is_nfc: texts are brought into Unicode's form NFC
    first. merges_by_id: neighbours merge whenever they make a token, those of lower ids first, whatever the file lists.
    """

    patterns: tuple[str, ...]
    takes_wholes: bool = False
    adds_bos: bool = False
    is_nfc: bool = False
    merges_by_id: bool = False


_DIGIT = r"\p{N}"
_LINE_END = r"[\r\n]"
_ASCII_MARKS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_BLANKS = r"\s+(?!\S)|\s+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
# Letters with upper and lower case, as far as Unicode and DeepSeek's first tokenizers had them.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_WORDS = (
    rf"[{_ASCII_MARKS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|"
    rf"\s*[\r\n]+|{_BLANKS}"
)

_GPT2 = PreTokenizer((GPT2_PATTERN,))
_GPT2_NFC = PreTokenizer((GPT2_PATTERN,), is_nfc=True)
_DIGITS_GPT2 = PreTokenizer((_DIGIT, GPT2_PATTERN))
_LLAMA3 = PreTokenizer((LLAMA3_PATTERN,), takes_wholes=True, adds_bos=True)
_DBRX = PreTokenizer((LLAMA3_PATTERN,))
_QWEN = PreTokenizer((QWEN_PATTERN,))
_QWEN_NFC = PreTokenizer((QWEN_PATTERN,), is_nfc=True)
_QWEN35 = PreTokenizer(
    (QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
    is_nfc=True,
)
_GPT4O = PreTokenizer((O200K_PATTERN,))
_DEEPSEEK_LLM = PreTokenizer((_LINE_END, rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+\z", _HAN_AND_HANGUL, r"\p{N}+"))
_DEEPSEEK_CODER = PreTokenizer((_LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
        rf"{_BLANKS}",
    )
)
_SEED_CODER = PreTokenizer((QWEN_PATTERN.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]"))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": _DEFAULT,
        "falcon": _FALCON,
        **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "mellum", "gigachat", "a.x-4.0", "trillion", "jais"), _GPT2),
        **dict.fromkeys(("olmo", "mpt"), _GPT2_NFC),
        **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
        "command-r": _DIGITS_GPT2._replace(is_nfc=True),
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
        ),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _DBRX),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_NFC),
        **dict.fromkeys(("stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"), _QWEN),
        "qwen35": _QWEN35,
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
        "tekken": PreTokenizer((TEKKEN_PATTERN,), takes_wholes=True, adds_bos=True),
        "kimi-k2": PreTokenizer((KIMI_PATTERN,), takes_wholes=True, merges_by_id=True),
        "deepseek-llm": _DEEPSEEK_LLM,
        "deepseek-coder": _DEEPSEEK_CODER,
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
        **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
        "seed-coder": _SEED_CODER,
    }
)
