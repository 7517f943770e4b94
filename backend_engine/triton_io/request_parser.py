"""Requests of the engine model: input tensors -> token ids, ``SamplingParams`` and ``RequestOptions``, row by row.

Called by the engine adapter, once a request. Everything that is out of range is refused here or by
``SamplingParams``, and always under the name that the client used. Never imports Triton Server's module.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.errors import InvalidRequestError
from backend_engine.logger import get_logger
from backend_engine.triton_io import tensor_table
from backend_engine.triton_io.engine_request import (
    EngineRequest,
    EngineRow,
    NextPieceRequest,
    RequestDefaults,
    RequestOptions,
    StopRequest,
)
from backend_engine.triton_io.parameter_guard import ParameterGuard
from backend_engine.triton_io.request_fields import (
    build_sampling_params,
    read_logits_processors,
    read_milliseconds,
    read_priority,
    request_timeout_ms,
)
from backend_engine.triton_io.request_view import Array, OptionReader, RequestView, scalar
from backend_engine.triton_io.tensor_rows import ENGINE, FP32
from backend_engine.triton_io.unbuilt import refuse_beams, refuse_features
from backend_engine.triton_io.word_lists import from_word_ids, read_words

_log = get_logger(__name__)

STREAMING_NEEDS_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."
ROWS_NEED_DECOUPLED = (
    "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy: "
    "the request has {} rows and decoupled_mode is false"
)


class RequestParser:
    """Parses the engine model's requests. ``vocab_size``: ids beyond it are taken as the last one, logged once.

    ``max_seq_len``: most tokens of a sequence, prompt and output together. Safe for calls from several threads.
    """

    def __init__(
        self,
        defaults: RequestDefaults,
        vocab_size: int,
        max_seq_len: int,
        *,
        decoupled: bool,
        reject_unknown: bool,
    ) -> None:
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._decoupled = decoupled
        self._guard = ParameterGuard(tensor_table.input_names(tensor_table.ENGINE), reject_unknown, _log)
        self._lock = threading.Lock()
        self._has_logged_clamp = False

    def parse(self, view: RequestView) -> EngineRequest | StopRequest | NextPieceRequest:
        """The request, or ``InvalidRequestError``."""
        views = view.rows("input_ids") if "input_ids" in view.inputs else [view]
        reader = OptionReader(views[0], text_names=False)
        if reader.boolean("stop"):
            if not view.request_id:
                raise InvalidRequestError("Trying to stop a request but request ID is not provided")
            return StopRequest(view.request_id)
        if reader.boolean("next_piece"):
            return NextPieceRequest(view.request_id)
        # Preprocessing wrote a request that asks for text: its client knows the text models' names, and its request
        # parameters have been judged already.
        from_text = reader.boolean("detokenize")
        if not from_text:
            self._guard.check(view)
        if "input_ids" not in view.inputs:
            raise InvalidRequestError("input_ids (or encoder_input_features) is not present in the request.")
        num_rows = len(views)
        if num_rows > 1 and not self._decoupled:
            raise InvalidRequestError(ROWS_NEED_DECOUPLED.format(num_rows))
        self._check_num_sequences(num_rows, num_rows)
        rows = []
        for index, row in enumerate(views):
            try:
                rows.append(self._row(row, from_text))
            except InvalidRequestError as error:
                if num_rows == 1:
                    raise
                raise InvalidRequestError(f"row {index}: {error}") from None
        self._check_rows(rows)
        return EngineRequest(tuple(rows))

    def _row(self, view: RequestView, from_text: bool) -> EngineRow:
        reader = OptionReader(view, text_names=False, reported_text_names=from_text)
        refuse_features(ENGINE, view.inputs)
        refuse_beams(reader, self._defaults.max_beam_width)
        prompt_token_ids = self._prompt(view)
        options = self._options(view, reader, from_text)
        params = self._sampling_params(view, reader, options)
        if params.n > 1 and not self._decoupled:
            name = reader.name("num_return_sequences")
            raise InvalidRequestError(f"{name} {params.n} needs a decoupled model; decoupled_mode is false, so send 1")
        return EngineRow(prompt_token_ids, params, options)

    def _check_rows(self, rows: Sequence[EngineRow]) -> None:
        """Bounds on the request as a whole."""
        self._check_num_sequences(sum(row.sampling_params.n for row in rows), len(rows))
        if len({row.options.streaming for row in rows}) > 1:
            raise InvalidRequestError("streaming must be the same for all rows of a request")
        num_logits = sum(map(self._num_logit_rows, rows))
        num_bytes = num_logits * self._vocab_size * self._defaults.logits_itemsize
        if num_bytes > self._defaults.max_logits_bytes:
            raise InvalidRequestError(
                f"return_context_logits and return_generation_logits would give {num_logits} rows of logits, "
                f"{num_bytes} bytes; max_logits_bytes allows {self._defaults.max_logits_bytes}"
            )

    def _check_num_sequences(self, num_sequences: int, num_rows: int) -> None:
        limit = self._defaults.max_sequences
        if num_sequences > limit:
            raise InvalidRequestError(
                f"the request asks for {num_sequences} sequences ({num_rows} rows, each num_return_sequences times); "
                f"at most {limit} are allowed (max_sequences)"
            )

    def _num_logit_rows(self, row: EngineRow) -> int:
        """Most rows of logits that the request of ``row`` can give back."""
        params, num_prompt = row.sampling_params, len(row.prompt_token_ids)
        num_new = min(params.max_tokens, max(1, self._max_seq_len - num_prompt))
        num_each = num_prompt * params.return_context_logits + num_new * params.return_generation_logits
        return params.n * num_each

    def _prompt(self, view: RequestView) -> list[int]:
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
            piece_group=reader.text("piece_group", self._defaults.word_limits.max_word_bytes) or "",
            priority=read_priority(reader),
            half_logits=self._defaults.logits_dtype != FP32,
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
                ("top_p_min", reader.real("top_p_min")),
                ("top_p_decay", reader.real("top_p_decay")),
                ("top_p_reset_ids", reader.integer("top_p_reset_ids")),
                ("min_p", reader.real("min_p")),
                ("repetition_penalty", reader.real("repetition_penalty")),
                ("presence_penalty", reader.real("presence_penalty")),
                ("frequency_penalty", reader.real("frequency_penalty")),
                ("seed", reader.integer("seed")),
                ("pad_id", reader.integer("pad_id")),
                ("n", reader.integer("num_return_sequences")),
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
            "logits_processors": read_logits_processors(reader),
            "logprobs": 0 if options.return_log_probs else None,
            "return_context_logits": reader.boolean("return_context_logits"),
            "return_generation_logits": reader.boolean("return_generation_logits"),
            "return_perf_metrics": reader.boolean("return_perf_metrics"),
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
