"""Incremental detokenizers: token ids in, text out, a piece at a time; the pieces joined are ``decode`` of them all.

``create_detokenizer`` picks the kind for a tokenizer; one detokenizer serves one sequence, from one thread at a time.
No piece ends inside a character, and U+FFFD comes only for bytes that are no character. Knows no stop words.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from backend_engine.core.protocols import Detokenizer
from backend_engine.text.decoder_steps import DecoderStream
from backend_engine.text.text_steps import text_clean_ups
from backend_engine.text.token_table import ByteTable, StepTable, TextTable
from backend_engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8  # of the prompt, for decoders that must look back
_WINDOW_TOKENS = 32
_REPLACEMENT = "\ufffd"


def create_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer whose pieces, joined, are ``tokenizer.decode(all ids, skip_special_tokens)``.

    With ``prompt_token_ids`` the text is a continuation of theirs: the first piece keeps its leading blank. The
    prompt's own text never comes out. Ids outside the vocabulary give no text.
    """
    table = tokenizer.token_table()
    detokenizer: Detokenizer
    if isinstance(table, ByteTable):
        detokenizer = ByteDetokenizer(table, skip_special_tokens)
    elif isinstance(table, TextTable):
        detokenizer = TextDetokenizer(table, prompt_token_ids, skip_special_tokens)
    elif isinstance(table, StepTable):
        detokenizer = StepDetokenizer(table, prompt_token_ids, skip_special_tokens)
    else:
        detokenizer = WindowedDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    return CleaningDetokenizer(detokenizer) if tokenizer.cleans_up_spaces else detokenizer


class ByteDetokenizer:
    """Byte-level BPE: tokens are bytes; an unfinished character (at most 3 bytes) is held back. O(1) a token."""

    def __init__(self, table: ByteTable, skip_special_tokens: bool) -> None:
        self._pieces = table.visible if skip_special_tokens else table.pieces
        self._num_ids = len(self._pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_ids: Sequence[int]) -> str:
        pieces, num_ids = self._pieces, self._num_ids
        return self._decoder.decode(b"".join([pieces[i] for i in token_ids if 0 <= i < num_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TextDetokenizer:
    """SentencePiece style: tokens are text, or single bytes where the vocabulary lacks a character. O(1) a token.

    A run of byte tokens is text as a whole or U+FFFD as a whole (``tokenizers``' ByteFallback), so it is held back
    until a token of another kind ends it: at most as long as the model goes on spelling bytes, one a token.
    """

    def __init__(self, table: TextTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._table = table
        self._pieces = table.visible if skip_special_tokens else table.pieces
        self._num_ids = len(self._pieces)
        self._run = bytearray()
        self._is_first = self._is_run_first = True
        self._num_to_strip = table.num_stripped
        for token_id in prompt_token_ids:
            if not self._is_first and self._num_to_strip == 0:
                break  # the text's beginning, where blanks are taken out, is over
            self.append((token_id,))
            self.flush()

    def append(self, token_ids: Sequence[int]) -> str:
        pieces, byte_values = self._pieces, self._table.byte_values
        out: list[str] = []
        for token_id in token_ids:
            piece = pieces[token_id] if 0 <= token_id < self._num_ids else None
            if piece is None:
                continue
            if token_id in byte_values:
                if not self._run:
                    self._is_run_first = self._is_first
                self._run.append(byte_values[token_id])
            else:
                if self._run:
                    out.append(self._end_run())
                out.append(self._table.first_pieces.get(token_id, piece) if self._is_first else piece)
            self._is_first = False
        return self._strip("".join(out))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(run)
        for replacement in self._table.run_replacements:
            text = replacement.apply(text, self._is_run_first)
        return text

    def _strip(self, text: str) -> str:
        """Take what is left to take from the whole text's beginning."""
        while self._num_to_strip and text:
            if text[0] != self._table.stripped:
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


class StepDetokenizer:
    """WordPiece, CTC and any other decoder of the ``tokenizers`` library: its steps as streams. O(1) a token."""

    def __init__(self, table: StepTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokens = table.visible if skip_special_tokens else table.tokens
        self._stream = DecoderStream(table.steps)
        context = list(islice(self._known(reversed(prompt_token_ids)), _CONTEXT_TOKENS))
        if context:
            self._stream.append(context[::-1])
            self._stream.flush()

    def append(self, token_ids: Sequence[int]) -> str:
        return self._stream.append(list(self._known(token_ids)))

    def flush(self) -> str:
        return self._stream.flush()

    def _known(self, token_ids: Iterable[int]) -> Iterator[str]:
        tokens, num_ids = self._tokens, len(self._tokens)
        for i in token_ids:
            token = tokens[i] if 0 <= i < num_ids else None
            if token is not None:
                yield token


class WindowedDetokenizer:
    """Decoders in Python: decodes a window of the last tokens again and gives what two decodings agree on.

    One token late. Exact for decoders in which a token changes at most the text of the one before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        hidden = tokenizer.special_ids if skip_special_tokens else ()
        context = islice((i for i in reversed(prompt_token_ids) if i not in hidden), _CONTEXT_TOKENS)
        self._ids = list(context)[::-1]
        self._text = self._decode(self._ids)
        self._num_sent = len(self._text)
        self._window = 2 * _WINDOW_TOKENS

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        piece = self._text[self._num_sent :]
        self._num_sent = len(self._text)
        return piece

    def _append_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, self._text = self._text, self._decode(self._ids)
        num_certain = min(len(before), len(self._text))
        if before[:num_certain] != self._text[:num_certain]:
            pairs = zip(before, self._text, strict=False)
            num_certain = next(i for i, (old, new) in enumerate(pairs) if old != new)
        num_certain = len(self._text[:num_certain].rstrip(_REPLACEMENT))
        piece = self._text[self._num_sent : num_certain]
        self._num_sent = max(self._num_sent, num_certain)
        if len(self._ids) > self._window:
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Forget old tokens when the rest decodes to the same end of the text."""
        ids = self._ids[-_WINDOW_TOKENS:]
        text = self._decode(ids)
        unsent = self._text[self._num_sent :]
        if text.endswith(unsent) and len(text) > len(unsent):
            self._ids, self._text, self._num_sent = ids, text, len(text) - len(unsent)
            self._window = 2 * _WINDOW_TOKENS
        else:
            self._window *= 2

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_raw(ids, self._skip_special_tokens)


class CleaningDetokenizer:
    """Takes out blanks before punctuation as ``decode`` does for tokenizers that ask for it.

    Holds back an end of the text that may begin one of the patterns, three characters at most.
    """

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._steps = text_clean_ups()

    def append(self, token_ids: Sequence[int]) -> str:
        text = self._inner.append(token_ids)
        for step in self._steps:
            text = step.append(text)
        return text

    def flush(self) -> str:
        text = self._inner.flush()
        for step in self._steps:
            text = step.append(text) + step.flush()
        return text
