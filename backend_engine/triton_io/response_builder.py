"""Responses of the engine model: outputs of the executor -> tensors, in the order of the tensor table.

``ResponseBuilder`` belongs to one sequence; the sender thread alone calls it. It makes the text delta when the
request asked for one. Every number is finite and every text valid UTF-8. Knows nothing of senders and flags.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from backend_engine.core.outputs import LOGPROB_FLOOR, KvUsage, LogitsArray, RequestOutput, TokenLogprobs
from backend_engine.core.request import FinishReason
from backend_engine.triton_io.engine_request import EngineRow
from backend_engine.triton_io.error_codes import one_line
from backend_engine.triton_io.request_view import Array
from backend_engine.triton_io.tensor_table import PERF_ROWS

HALF_MAX = 65504.0


class TextSource(Protocol):
    """One sequence's text, piece by piece (``backend_engine.text.text_stream.TextStream``)."""

    def append(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Coalesced(NamedTuple):
    """Several outputs of one sequence taken together; ``last`` is the final one, if it is among them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    last: RequestOutput | None

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "Coalesced":
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        return cls(token_ids, logprobs, outputs[-1] if outputs and outputs[-1].finished else None)


class Place(NamedTuple):
    """Where a sequence stands in its request: its row of ``num_rows``, and which of the row's ``num_sequences``."""

    row: int = 0
    num_rows: int = 1
    sequence: int = 0
    num_sequences: int = 1

    def tensors(self) -> dict[str, Array]:
        """``batch_index`` and ``sequence_index`` ``[1, 1]``, each only when there are several."""
        tensors = {}
        if self.num_rows > 1:
            tensors["batch_index"] = np.array([[self.row]], np.int32)
        if self.num_sequences > 1:
            tensors["sequence_index"] = np.array([[self.sequence]], np.int32)
        return tensors

    def __str__(self) -> str:
        """For messages; empty when the request has one sequence."""
        row = f"row {self.row}: " if self.num_rows > 1 else ""
        return row + (f"sequence {self.sequence}: " if self.num_sequences > 1 else "")


class ResponseBuilder:
    """Turns one sequence's outputs into named arrays. ``text`` is ``None`` when no text was asked for."""

    def __init__(self, row: EngineRow, text: TextSource | None, place: Place = Place()) -> None:
        self.options = row.options
        self.place = place
        self._params = row.sampling_params
        self._prompt = row.prompt_token_ids
        self._text = text
        self._cum_logprob = 0.0
        self._context_logits: list[LogitsArray] = []

    def build(self, outputs: Sequence[RequestOutput]) -> dict[str, Array] | None:
        """Tensors for what ``outputs`` add; ``None`` when that is nothing a client could see."""
        new = Coalesced.of(outputs)
        self._context_logits += [output.context_logits for output in outputs if output.context_logits is not None]
        piece = self._text_piece(new)
        if new.last is None and not new.token_ids and not piece:
            return None
        options = self.options
        echo = not options.streaming and not options.exclude_input
        shown = self._prompt + new.token_ids if echo else new.token_ids
        tensors = {
            "output_ids": np.array(shown, np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(shown)]], np.int32),
        }
        if options.return_log_probs:
            tensors |= self._log_probs(new.logprobs)
        tensors |= self._logits(outputs)
        tensors |= self.place.tensors()
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
            piece += self._text.finish()
        return piece

    def _log_probs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Array]:
        values = [max(entry.logprob, LOGPROB_FLOOR) for entry in logprobs]
        self._cum_logprob += sum(values)
        return {
            "cum_log_probs": np.array([[self._cum_logprob]], np.float32),
            "output_log_probs": np.array(values, np.float32).reshape(1, 1, -1),
        }

    def _logits(self, outputs: Sequence[RequestOutput]) -> dict[str, Array]:
        """``context_logits`` ``[1, prompt, vocab]`` once, with the first response, ``generation_logits``
        ``[1, 1, new, vocab]`` with each.
        """
        tensors = {}
        if self._params.return_context_logits and self._context_logits:
            tensors["context_logits"] = self._as_declared(self._context_logits)[None]
            self._context_logits = []
        if self._params.return_generation_logits:
            new = [output.generation_logits for output in outputs if output.generation_logits is not None]
            if new:
                tensors["generation_logits"] = self._as_declared(new)[None, None]
        return tensors

    def _as_declared(self, parts: Sequence[LogitsArray]) -> Array:
        """The parts as one array of the declared type; every number is finite and fits it."""
        values: Array = np.concatenate(parts)
        bound = HALF_MAX if self.options.half_logits else float(np.finfo(np.float32).max)
        values = np.clip(np.nan_to_num(values, nan=0.0), -bound, bound)
        return values.astype(np.float16 if self.options.half_logits else np.float32)

    def _ending(self, last: RequestOutput) -> dict[str, Array]:
        tensors = {}
        if self.options.return_finish_reason:
            tensors["finish_reason"] = string_array(last.finish_reason.value if last.finish_reason else "")
        if self.options.return_stop_reason:
            tensors["stop_reason"] = string_array(last.stop_reason if isinstance(last.stop_reason, str) else "")
        if self._params.return_perf_metrics:
            tensors |= _perf_metrics(last)
        return tensors


def _perf_metrics(last: RequestOutput) -> dict[str, Array]:
    """The tensors of ``return_perf_metrics``, ``[1, 1]`` each; a time that never came is 0."""
    kv, times = last.kv_usage or KvUsage(0, 0), last.times
    seconds = (times.arrival, times.first_scheduled, times.first_token, times.last_token) if times else (None,) * 4
    counts = (kv.num_allocated_blocks, kv.num_reused_blocks, kv.num_allocated_blocks)
    values = (*counts, *(int((s or 0.0) * 1e9) for s in seconds), 0.0, 0, 0)
    kinds = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_FP32": np.float32}
    return {row.name: np.array([[v]], kinds[row.dtype]) for row, v in zip(PERF_ROWS, values, strict=True)}


def error_tensors(
    message: str, code: str, *, with_finish_reason: bool = False, place: Place = Place()
) -> dict[str, Array]:
    """Tensors that carry an error of the engine to our own models."""
    tensors = {
        "output_ids": np.zeros((1, 1, 0), np.int32),
        "sequence_length": np.zeros((1, 1), np.int32),
        "error": string_array(one_line(message)),
        "error_code": string_array(code),
        **place.tensors(),
    }
    if with_finish_reason:
        tensors["finish_reason"] = string_array(FinishReason.ERROR.value)
    return tensors


def string_array(text: str) -> Array:
    """A STRING tensor ``[1, 1]``."""
    return np.array([[text.encode("utf-8", "replace")]], dtype=np.object_)
