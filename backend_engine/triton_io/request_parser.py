"""Requests of the engine model: input tensors -> token ids, ``SamplingParams`` and ``RequestOptions``.

Called by the engine adapter, once a request. Everything that is out of range is refused here or by
``SamplingParams``, and always under the name that the client used. Never imports Triton Server's module.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.errors import InvalidRequestError
from backend_engine.logger import get_logger
from backend_engine.triton_io import tensor_table
from backend_engine.triton_io.request_view import (
    Array,
    OptionReader,
    ParameterGuard,
    RequestView,
    check_single_row,
    scalar,
)
from backend_engine.triton_io.word_lists import WordLimits, from_word_ids, read_words

_log = get_logger(__name__)

STREAMING_NEEDS_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."
# Fields of SamplingParams whose refusals are reworded to the client's name, longest first.
_REWORDED = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "max_tokens", "min_tokens",
    "end_id", "top_k", "top_p", "min_p", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class RequestDefaults:
    """What the model's parameters say for requests that do not. Times in milliseconds, ``None`` = no limit."""

    exclude_input_in_output: bool = False
    include_stop_words_in_output: bool = True
    deadline_ms: int | None = 600_000
    queue_timeout_ms: int | None = None
    skip_special_tokens: bool = True
    word_limits: WordLimits = field(default_factory=WordLimits)


@dataclass(frozen=True)
class RequestOptions:
    """How a request is to be run and answered. Times in seconds from now, ``None`` = no limit."""

    streaming: bool = False
    exclude_input: bool = False
    detokenize: bool = False
    return_log_probs: bool = False
    return_finish_reason: bool = False
    return_stop_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    errors_in_band: bool = False
    piecewise: bool = False
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str = ""
    client_id: str = ""


@dataclass(frozen=True)
class EngineRequest:
    """A request ready for ``LLM.submit``."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    options: RequestOptions


@dataclass(frozen=True)
class StopRequest:
    """A request to end the running ones with this client id."""

    client_id: str


@dataclass(frozen=True)
class NextPieceRequest:
    """A request for what the piecewise request with this client id has to say next."""

    client_id: str


class RequestParser:
    """Parses the engine model's requests. ``vocab_size``: ids beyond it are taken as the last one, logged once.

    Safe for calls from several threads.
    """

    def __init__(self, defaults: RequestDefaults, vocab_size: int, *, decoupled: bool, reject_unknown: bool) -> None:
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._decoupled = decoupled
        self._guard = ParameterGuard(tensor_table.input_names(tensor_table.ENGINE), reject_unknown, _log)
        self._lock = threading.Lock()
        self._has_logged_clamp = False

    def parse(self, view: RequestView) -> EngineRequest | StopRequest | NextPieceRequest:
        """The request, or ``InvalidRequestError``."""
        reader = OptionReader(view, text_names=False)
        if reader.boolean("stop"):
            if not view.request_id:
                raise InvalidRequestError("Trying to stop a request but request ID is not provided")
            return StopRequest(view.request_id)
        if reader.boolean("next_piece"):
            return NextPieceRequest(view.request_id)
        detokenize = reader.boolean("detokenize")
        if detokenize:
            # Preprocessing wrote this request: its client knows the text models' names, and its request
            # parameters have been judged already.
            reader = OptionReader(view, text_names=False, reported_text_names=True)
        else:
            self._guard.check(view)
        prompt_token_ids = self._prompt(view)
        _refuse_unsupported(reader)
        options = self._options(view, reader, detokenize)
        return EngineRequest(prompt_token_ids, self._sampling_params(view, reader, options), options)

    def _prompt(self, view: RequestView) -> list[int]:
        if "input_ids" not in view.inputs:
            raise InvalidRequestError("input_ids (or encoder_input_features) is not present in the request.")
        check_single_row(view, "input_ids")
        ids = view.inputs["input_ids"].reshape(-1)
        length = len(ids)
        if "input_lengths" in view.inputs:
            length = int(scalar(view.inputs["input_lengths"], "input_lengths"))
        if length < 0 or length > len(ids):
            raise InvalidRequestError(f"input_lengths {length} is out of range; input_ids has {len(ids)} ids")
        if length == 0:
            raise InvalidRequestError("the prompt is empty: input_ids must have at least one token id")
        ids = ids[:length]
        if int(ids.min()) < 0:
            raise InvalidRequestError(f"input_ids has the negative token id {int(ids.min())}; ids must be 0 or more")
        if int(ids.max()) >= self._vocab_size:
            self._log_clamp(int(ids.max()))
            ids = np.minimum(ids, self._vocab_size - 1)
        tokens: list[int] = ids.tolist()
        return tokens

    def _log_clamp(self, token_id: int) -> None:
        with self._lock:
            first, self._has_logged_clamp = not self._has_logged_clamp, True
        if first:
            last = self._vocab_size - 1
            _log.warning("input_ids has ids beyond the vocabulary (%d); each is taken as %d, told once", token_id, last)

    def _options(self, view: RequestView, reader: OptionReader, detokenize: bool) -> RequestOptions:
        streaming = reader.boolean("streaming")
        if streaming and not self._decoupled:
            raise InvalidRequestError(STREAMING_NEEDS_DECOUPLED)
        deadline_ms = read_milliseconds(reader, "deadline_ms", self._defaults.deadline_ms)
        queue_timeout_ms = read_milliseconds(reader, "queue_timeout_ms", self._defaults.queue_timeout_ms)
        limits = [deadline_ms, request_timeout_ms(view)]
        known = [limit for limit in limits if limit is not None]
        return RequestOptions(
            streaming=streaming,
            exclude_input=reader.boolean("exclude_input_in_output", self._defaults.exclude_input_in_output),
            detokenize=detokenize,
            return_log_probs=reader.boolean("return_log_probs"),
            return_finish_reason=reader.boolean("return_finish_reason"),
            return_stop_reason=reader.boolean("return_stop_reason"),
            return_num_input_tokens=reader.boolean("return_num_input_tokens"),
            return_num_output_tokens=reader.boolean("return_num_output_tokens"),
            errors_in_band=reader.boolean("return_errors_in_band"),
            piecewise=reader.boolean("piecewise"),
            deadline_s=min(known) / 1000 if known else None,
            queue_timeout_s=None if queue_timeout_ms is None else queue_timeout_ms / 1000,
            cache_salt=reader.text("cache_salt", self._defaults.word_limits.max_word_bytes) or "",
            client_id=view.request_id,
        )

    def _sampling_params(self, view: RequestView, reader: OptionReader, options: RequestOptions) -> SamplingParams:
        max_tokens = reader.integer("max_tokens")
        if max_tokens is None:
            raise InvalidRequestError(f"{reader.name('max_tokens')} is not present in the request")
        limits = self._defaults.word_limits
        stop_words = read_words(view.inputs.get("stop_words_text"), "stop_words", limits)
        stop_ids = [] if stop_words else from_word_ids(view.inputs.get("stop_words_list"), "stop_words_list", limits)
        end_id = reader.integer("end_id")
        values: dict[str, Any] = {
            name: value
            for name, value in (
                ("min_tokens", reader.integer("min_tokens")),
                ("temperature", reader.real("temperature")),
                ("top_k", reader.integer("top_k")),
                ("top_p", reader.real("top_p")),
                ("min_p", reader.real("min_p")),
                ("repetition_penalty", reader.real("repetition_penalty")),
                ("presence_penalty", reader.real("presence_penalty")),
                ("frequency_penalty", reader.real("frequency_penalty")),
                ("seed", reader.integer("seed")),
                ("pad_id", reader.integer("pad_id")),
            )
            if value is not None
        }
        values |= {
            "max_tokens": max_tokens,
            "end_id": -1 if end_id is None else end_id,
            "stop": stop_words,
            "stop_sequences": stop_ids,
            "stop_token_ids": _id_list(view, "stop_token_ids"),
            "include_stop_str_in_output": reader.boolean(
                "include_stop_words_in_output", self._defaults.include_stop_words_in_output
            ),
            "bad_token_ids": from_word_ids(view.inputs.get("bad_words_list"), "bad_words_list", limits),
            "embedding_bias": self._embedding_bias(view),
            "logprobs": 0 if options.return_log_probs else None,
            "detokenize": options.detokenize,
            "skip_special_tokens": self._defaults.skip_special_tokens,
        }
        return build_sampling_params(values, reader)

    def _embedding_bias(self, view: RequestView) -> Array | None:
        bias = view.inputs.get("embedding_bias")
        if bias is None or bias.size == 0:
            return None
        if bias.size > self._vocab_size:
            raise InvalidRequestError(f"embedding_bias has {bias.size} values; the vocabulary has {self._vocab_size}")
        full = np.zeros(self._vocab_size, np.float32)
        full[: bias.size] = bias.reshape(-1)
        return full


def _id_list(view: RequestView, name: str) -> list[int]:
    values = view.inputs.get(name)
    return [] if values is None else [int(token_id) for token_id in values.reshape(-1)]


def _refuse_unsupported(reader: OptionReader) -> None:
    """Refuse what is declared for old clients but not built: beams, several answers, logits, metrics."""
    beam_width = reader.integer("beam_width")
    if beam_width is not None and beam_width > 1:
        raise InvalidRequestError(f"Requested beam width {beam_width} is larger than configured max beam width 1")
    for name, value in (("beam_width", beam_width), ("num_return_sequences", reader.integer("num_return_sequences"))):
        if value is not None and value < 1:
            raise InvalidRequestError(f"{reader.name(name)} {value} is out of range; it must be 1")
        if value is not None and value > 1:
            raise InvalidRequestError(f"{reader.name(name)} {value} is not supported yet; it must be 1")
    for name in ("return_context_logits", "return_generation_logits", "return_perf_metrics"):
        if reader.boolean(name):
            raise InvalidRequestError(f"{reader.name(name)} is not supported yet; leave it out or send false")
    length_penalty = reader.real("length_penalty")
    if length_penalty is not None and not np.isfinite(length_penalty):
        raise InvalidRequestError(f"{reader.name('length_penalty')} {length_penalty} is not allowed; it must be finite")


def read_milliseconds(reader: OptionReader, name: str, default: int | None) -> int | None:
    """A time limit; 0 and absent mean the model's default."""
    value = reader.integer(name)
    if value is not None and value < 0:
        raise InvalidRequestError(f"{reader.name(name)} {value} is out of range; it must be 0 or more")
    return value or default


def request_timeout_ms(view: RequestView) -> float | None:
    """Triton's own request timeout (microseconds; a request parameter over /generate) in milliseconds, if set."""
    sent = view.parameters.get("timeout", 0)
    timeout_us = view.timeout_us or (sent if isinstance(sent, int) and not isinstance(sent, bool) else 0)
    return timeout_us / 1000 if timeout_us > 0 else None


def build_sampling_params(values: dict[str, Any], reader: OptionReader) -> SamplingParams:
    """``SamplingParams(**values)``; a refusal is reworded to the names that the client used."""
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise InvalidRequestError(_reword(str(error), _REWORDED, reader)) from None


def _reword(message: str, fields: Sequence[str], reader: OptionReader) -> str:
    pattern = r"\b(" + "|".join(fields) + r")\b"
    return re.sub(pattern, lambda match: reader.name(match.group(1)), message)
