"""Responses of the engine model: outputs of the executor -> tensors, in the order of the tensor table.

``ResponseBuilder`` belongs to one request; the sender thread alone calls it. It makes the text delta when the
request asked for one. Every number is finite and every text valid UTF-8. Knows nothing of senders and flags.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from backend_engine.core.outputs import LOGPROB_FLOOR, RequestOutput, TokenLogprobs
from backend_engine.core.request import FinishReason
from backend_engine.triton_io.error_codes import one_line
from backend_engine.triton_io.request_parser import EngineRequest
from backend_engine.triton_io.request_view import Array


class TextSource(Protocol):
    """One sequence's text, piece by piece (``backend_engine.text.text_stream.TextStream``)."""

    def append(self, token_ids: Sequence[int]) -> str: ...

    def finish(self, stopped: bool) -> str: ...


class Coalesced(NamedTuple):
    """Several outputs of one request taken together; ``last`` is the final one, if it is among them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    last: RequestOutput | None

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "Coalesced":
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        return cls(token_ids, logprobs, outputs[-1] if outputs and outputs[-1].finished else None)


class ResponseBuilder:
    """Turns one request's outputs into named arrays. ``text`` is ``None`` when no text was asked for."""

    def __init__(self, request: EngineRequest, text: TextSource | None) -> None:
        self._options = request.options
        self._prompt = request.prompt_token_ids
        self._text = text
        self._cum_logprob = 0.0

    def build(self, outputs: Sequence[RequestOutput]) -> dict[str, Array] | None:
        """Tensors for what ``outputs`` add; ``None`` when that is nothing a client could see."""
        new = Coalesced.of(outputs)
        piece = self._text_piece(new)
        if new.last is None and not new.token_ids and not piece:
            return None
        options = self._options
        echo = not options.streaming and not options.exclude_input
        shown = self._prompt + new.token_ids if echo else new.token_ids
        tensors = {
            "output_ids": np.array(shown, np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(shown)]], np.int32),
        }
        if options.return_log_probs:
            tensors |= self._log_probs(new.logprobs)
        if new.last is not None:
            tensors |= self._ending(new.last)
        if options.return_num_input_tokens:
            tensors["num_input_tokens"] = np.array([[len(self._prompt)]], np.int32)
        if options.return_num_output_tokens:
            tensors["num_output_tokens"] = np.array([[len(shown)]], np.int32)
        if piece is not None:
            tensors["text_output"] = string_array(piece)
        return tensors

    def _text_piece(self, new: Coalesced) -> str | None:
        if self._text is None:
            return None
        piece = self._text.append(new.token_ids) if new.token_ids else ""
        if new.last is not None:
            piece += self._text.finish(new.last.finish_reason == FinishReason.STOP)
        return piece

    def _log_probs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Array]:
        values = [max(entry.logprob, LOGPROB_FLOOR) for entry in logprobs]
        self._cum_logprob += sum(values)
        return {
            "cum_log_probs": np.array([[self._cum_logprob]], np.float32),
            "output_log_probs": np.array(values, np.float32).reshape(1, 1, -1),
        }

    def _ending(self, last: RequestOutput) -> dict[str, Array]:
        tensors = {}
        if self._options.return_finish_reason:
            tensors["finish_reason"] = string_array(last.finish_reason.value if last.finish_reason else "")
        if self._options.return_stop_reason:
            tensors["stop_reason"] = string_array(last.stop_reason if isinstance(last.stop_reason, str) else "")
        return tensors


def error_tensors(message: str, code: str, *, with_finish_reason: bool = False) -> dict[str, Array]:
    """Tensors that carry an error of the engine to our own models."""
    tensors = {
        "output_ids": np.zeros((1, 1, 0), np.int32),
        "sequence_length": np.zeros((1, 1), np.int32),
        "error": string_array(one_line(message)),
        "error_code": string_array(code),
    }
    if with_finish_reason:
        tensors["finish_reason"] = string_array(FinishReason.ERROR.value)
    return tensors


def string_array(text: str) -> Array:
    """A STRING tensor ``[1, 1]``."""
    return np.array([[text.encode("utf-8", "replace")]], dtype=np.object_)
