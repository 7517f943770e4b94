"""The decoders of the ``tokenizers`` library as streams: the same text, as far as no further token can change it.

``DecoderStream`` chains one tokenizer's decoders for ``detokenizer``; the steps follow the library's rules one by one.
A step holds back what a further token may still rewrite and nothing else. Never sees token ids.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Regex, decoders

from backend_engine.text.text_steps import TextStep, WholeText, clean_up, library_decoder, text_steps
from backend_engine.text.token_table import BYTE_TOKEN, DecoderSettings, byte_level_alphabet, to_bytes

_REPLACEMENT = "\ufffd"


class TokenStep(Protocol):
    """Tokens in, tokens out. After ``flush`` what follows is a continuation."""

    def append(self, tokens: Sequence[str]) -> list[str]: ...

    def flush(self) -> list[str]: ...


class DecoderStream:
    """All decoders of a tokenizer in a row: ``append``s and a ``flush``, joined, are ``decoder.decode(all tokens)``.

    What cannot be streamed (a regular expression over the whole text, decoders not known here) comes out at the end.
    """

    def __init__(self, settings: Sequence[DecoderSettings]) -> None:
        self._token_steps: list[TokenStep] = []
        self._fuse = _Fuse()
        self._text_steps: list[TextStep] = []
        is_fused = False
        for at, step in enumerate(settings):
            if is_fused:
                steps = text_steps(step)
                if steps is None:
                    self._text_steps.append(WholeText(settings[at:]))
                    return
                self._text_steps += steps
            elif step["type"] == "Fuse":
                is_fused = True
            elif step["type"] == "ByteLevel":
                self._fuse, is_fused = _FuseBytes(), True
            else:
                token_step = _token_step(step)
                # Word ends come in parts, which only joining may follow.
                is_split = (
                    isinstance(token_step, _WordEnds) and settings[at + 1 :] and settings[at + 1]["type"] != "Fuse"
                )
                if token_step is None or is_split:
                    self._token_steps.append(_WholeTokens(settings[at:]))
                    return
                self._token_steps.append(token_step)

    def append(self, tokens: Sequence[str]) -> str:
        """The text that is certain now that ``tokens`` follow."""
        for step in self._token_steps:
            tokens = step.append(tokens)
        text = self._fuse.append(tokens)
        for text_step in self._text_steps:
            text = text_step.append(text)
        return text

    def flush(self) -> str:
        """The rest of the text. Tokens appended afterwards continue it."""
        tokens: list[str] = []
        for step in self._token_steps:
            tokens = [*step.append(tokens), *step.flush()]
        text = self._fuse.append(tokens) + self._fuse.flush()
        for text_step in self._text_steps:
            text = text_step.append(text) + text_step.flush()
        return text


class _Fuse:
    """Fuse: all tokens are one from here on."""

    def append(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def flush(self) -> str:
        return ""


class _FuseBytes(_Fuse):
    """ByteLevel: the bytes that all tokens spell, as UTF-8."""

    def __init__(self) -> None:
        self._alphabet = byte_level_alphabet()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, tokens: Sequence[str]) -> str:
        return self._decoder.decode(b"".join([to_bytes(token, self._alphabet) for token in tokens]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _EachToken:
    """A decoder that looks at one token alone, at the first one perhaps otherwise."""

    def __init__(self, rest: Callable[[str], str], first: Callable[[str], str] | None = None) -> None:
        self._rest = rest
        self._first = first

    def append(self, tokens: Sequence[str]) -> list[str]:
        if self._first is None or not tokens:
            return [self._rest(token) for token in tokens]
        first, self._first = self._first, None
        return [first(tokens[0]), *map(self._rest, tokens[1:])]

    def flush(self) -> list[str]:
        return []


class _WordEnds:
    """BPEDecoder: a suffix that ends words is a blank, and nothing in the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held = ""  # the end of the last token, from its first suffix on

    def append(self, tokens: Sequence[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            out.append(self._held.replace(self._suffix, " "))
            at = token.find(self._suffix)
            out.append(token if at < 0 else token[:at])
            self._held = "" if at < 0 else token[at:]
        return out

    def flush(self) -> list[str]:
        rest = self._held.replace(self._suffix, "")
        if rest:
            self._held = ""
        return [rest]


class _Collapse:
    """CTC: of equal tokens in a row the first one; the pad token is nothing, the delimiter a blank."""

    def __init__(self, settings: DecoderSettings) -> None:
        self._settings = settings
        self._last: str | None = None

    def append(self, tokens: Sequence[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            if token != self._last:
                self._last = token
                out.append(_ctc_text(token, self._settings))
        return [text for text in out if text]

    def flush(self) -> list[str]:
        return []


class _ByteFallback:
    """ByteFallback: a run of byte tokens is one token of text, or one U+FFFD each."""

    def __init__(self) -> None:
        self._run = bytearray()

    def append(self, tokens: Sequence[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            match = BYTE_TOKEN.fullmatch(token)
            if match:
                self._run.append(int(match[1], 16))
            else:
                out += self.flush()
                out.append(token)
        return out

    def flush(self) -> list[str]:
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)


class _WholeTokens:
    """The library's own decoders, once all tokens are there."""

    def __init__(self, settings: Sequence[DecoderSettings]) -> None:
        self._decoder = library_decoder({"type": "Sequence", "decoders": list(settings)})
        self._tokens: list[str] = []

    def append(self, tokens: Sequence[str]) -> list[str]:
        self._tokens += tokens
        return []

    def flush(self) -> list[str]:
        tokens, self._tokens = self._tokens, []
        return [self._decoder.decode(tokens)]


def _token_step(step: DecoderSettings) -> TokenStep | None:
    """The streaming decoder over separate tokens; ``None`` when it is not known here."""
    match step:
        case {"type": "Join"}:
            return _EachToken(lambda token: f" {token}", str)
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return _EachToken(lambda token: token.replace(pattern, content))
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)}:
            decoder = decoders.Replace(Regex(pattern), content)
            return _EachToken(lambda token: str(decoder.decode([token])))
        case {"type": "Metaspace", "replacement": str(sign), "prepend_scheme": scheme}:
            first = " " if scheme == "never" else ""
            return _EachToken(lambda token: token.replace(sign, " "), lambda token: token.replace(sign, first))
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            clean = clean_up if cleanup else str
            return _EachToken(
                lambda token: clean(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"), clean
            )
        case {"type": "BPEDecoder", "suffix": str(suffix)} if suffix:
            return _WordEnds(suffix)
        case {"type": "CTC", "pad_token": str(pad), "word_delimiter_token": str(delimiter)} if pad and delimiter:
            return _Collapse(step)
        case {"type": "ByteFallback"}:
            return _ByteFallback()
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0}:
            return _EachToken(lambda token: token[_num_leading(token, content, start) :])
        case _:
            return None


def _ctc_text(token: str, settings: DecoderSettings) -> str:
    text = token.replace(settings["pad_token"], "")
    return clean_up(text).replace(settings["word_delimiter_token"], " ") if settings["cleanup"] else text


def _num_leading(text: str, character: str, most: int) -> int:
    return min(len(text) - len(text.lstrip(character)), most)
