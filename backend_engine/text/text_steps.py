"""Decoders of the ``tokenizers`` library over a text that grows: what stays to be done once all tokens are one.

``decoder_steps`` chains these steps behind those over separate tokens; ``detokenizer`` cleans texts up with them. A
step holds back what further text may still rewrite and nothing else. Never sees tokens.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import decoders

from backend_engine.text.token_table import DecoderSettings

# (pattern, replacement) pairs in their order: what transformers' ``clean_up_tokenization`` replaces, ...
CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
# ... and what the decoders WordPiece and CTC do, in each token by itself.
_DECODER_CLEAN_UPS = (*CLEAN_UPS[:7], (" do not", " don't"), *CLEAN_UPS[7:])


class TextStep(Protocol):
    """Text in, text out, of the one token that all tokens were fused into."""

    def append(self, text: str) -> str: ...

    def flush(self) -> str: ...


class ReplaceText:
    """``text.replace(pattern, content)`` of a growing text; holds back an end that may begin the pattern."""

    def __init__(self, pattern: str, content: str) -> None:
        assert pattern, "an empty pattern has no place in a text"
        self._pattern = pattern
        self._content = content
        self._held = ""

    def append(self, text: str) -> str:
        if not self._held and self._pattern[0] not in text:
            return text
        parts = (self._held + text).split(self._pattern)
        rest, pattern = parts[-1], self._pattern
        num_held = min(len(rest), len(pattern) - 1)
        while num_held and not rest.endswith(pattern[:num_held]):
            num_held -= 1
        parts[-1] = rest[: len(rest) - num_held]
        self._held = rest[len(rest) - num_held :]
        return self._content.join(parts)

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def text_clean_ups() -> list[TextStep]:
    """The steps of transformers' ``clean_up_tokenization``."""
    return [ReplaceText(pattern, content) for pattern, content in CLEAN_UPS]


class StripText:
    """Strip over the whole text: up to ``start`` characters at its beginning and ``stop`` at its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def append(self, text: str) -> str:
        while self._start and text:
            if text[0] != self._content:
                self._start = 0
                break
            text = text[1:]
            self._start -= 1
        text = self._held + text
        num_held = min(len(text) - len(text.rstrip(self._content)), self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        self._held = ""
        return ""


class WholeText:
    """Decoders that cannot be streamed: the library runs them once the whole text is there."""

    def __init__(self, settings: Sequence[DecoderSettings]) -> None:
        self._decoder = library_decoder({"type": "Sequence", "decoders": list(settings)})
        self._parts: list[str] = []

    def append(self, text: str) -> str:
        self._parts.append(text)
        return ""

    def flush(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return str(self._decoder.decode([text]))


def text_steps(step: DecoderSettings) -> list[TextStep] | None:
    """The streaming decoder over one fused token, which is the first and the last one; ``None`` for none."""
    match step:
        case {"type": "Fuse"}:
            return []
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return [ReplaceText(pattern, content)]
        case {"type": "Metaspace", "replacement": str(sign), "prepend_scheme": scheme}:
            return [ReplaceText(sign, " " if scheme == "never" else "")]
        case {"type": "WordPiece", "cleanup": bool(cleanup)}:
            return [ReplaceText(*rule) for rule in _DECODER_CLEAN_UPS] if cleanup else []
        case {"type": "BPEDecoder", "suffix": str(suffix)} if suffix:
            return [ReplaceText(suffix, "")]
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
            return [StripText(content, start, stop)]
        case _:
            return None


def clean_up(text: str) -> str:
    """What the decoders WordPiece and CTC do with one token's text."""
    for pattern, content in _DECODER_CLEAN_UPS:
        text = text.replace(pattern, content)
    return text


def library_decoder(settings: DecoderSettings) -> Any:
    """The ``tokenizers`` decoder of these settings."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(settings).encode())
    return decoder
