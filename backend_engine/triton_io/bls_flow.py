"""``BlsFlow``: one BLS request from text to text, by way of preprocessing and the engine model.

Used by ``BlsService``, one call a request, in any thread. Other models are reached through an injected
``CallModel``; nothing here knows Triton Server. The engine makes the text; postprocessing is not called.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from backend_engine.errors import InvalidRequestError
from backend_engine.logger import get_logger
from backend_engine.triton_io import tensor_table
from backend_engine.triton_io.error_codes import CANCELLED, CANCELLED_TEXT, INTERNAL, UNAVAILABLE, ModelCallError
from backend_engine.triton_io.parameter_guard import ParameterGuard
from backend_engine.triton_io.parameters import BlsParameters
from backend_engine.triton_io.piece_inbox import PieceInbox, PiecesLostError
from backend_engine.triton_io.request_fields import request_timeout_ms
from backend_engine.triton_io.request_view import Array, OptionReader, RequestView, first_text
from backend_engine.triton_io.response_builder import string_array
from backend_engine.triton_io.unbuilt import refuse_features

_log = get_logger(__name__)

INT32_MAX = 2**31 - 1
_ALWAYS = ("text_output", "error", "error_code", "more")
# Outputs of the engine model by the input that asks for them. Asking for no others spares each piece their names.
_ASKED_BY: dict[str, tuple[str, ...]] = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": tuple(row.name for row in tensor_table.PERF_ROWS),
    "return_kv_cache_reuse_stats": tuple(row.name for row in tensor_table.PERF_ROWS),
    "return_finish_reason": ("finish_reason",),
    "return_stop_reason": ("stop_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "num_return_sequences": ("sequence_index",),
}
_LOGITS = ("return_context_logits", "return_generation_logits")
_NOT_READY = "is not ready"
_TRUE = np.ones((1, 1), np.bool_)
_ABOUT_ANOTHER: dict[str, Array] = {
    "input_ids": np.zeros((1, 1), np.int32),
    "input_lengths": np.zeros((1, 1), np.int32),
    "request_output_len": np.zeros((1, 1), np.int32),
}
_NEXT = _ABOUT_ANOTHER | {"next_piece": _TRUE, "return_errors_in_band": _TRUE}
_GROUP_OUTPUTS = ("pieces", "error", "error_code")


class ModelResponse(NamedTuple):
    """One response of another model: its tensors, or the message of its error."""

    outputs: Mapping[str, Array]
    error: str | None = None


Respond = Callable[[dict[str, Array]], None]


class CallModel(Protocol):
    """Calls a model of this server and yields its responses as they come; all of them must be taken."""

    def __call__(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        request_id: str,
        *,
        decoupled: bool = True,
    ) -> Iterator[ModelResponse]: ...


class BlsFlow:
    """The flow and its settings; keeps nothing of a request but the inbox of its pieces. ``close`` it at the end."""

    def __init__(self, call_model: CallModel, parameters: BlsParameters) -> None:
        self._call_model = call_model
        self._parameters = parameters
        self._inbox = PieceInbox(self._fetch_pieces)
        self._guard = ParameterGuard(
            tensor_table.input_names(tensor_table.BLS), parameters.reject_unknown_parameters, _log
        )

    def run(self, view: RequestView, inner_id: str, is_cancelled: Callable[[], bool], respond: Respond) -> None:
        """Hand the responses to ``respond``: one for each sequence, or many of them when it streams.

        ``inner_id``: request id of the engine's request, fresh. ``respond`` is called by one thread at a time, not
        always this one, and never after the end. ``InvalidRequestError`` and ``ModelCallError`` end it: the error of
        one row ends them all.
        """
        self._guard.check(view)
        num_rows = _check(view)
        engine_inputs = _engine_options(view, num_rows)
        engine_inputs |= self._preprocess(view, num_rows, inner_id)
        if is_cancelled():
            raise ModelCallError(CANCELLED, CANCELLED_TEXT)
        texts: dict[tuple[int, int], str] = defaultdict(str)

        def take(outputs: Mapping[str, Array]) -> None:
            piece = outputs["text_output"].reshape(-1)
            if self._parameters.accumulate_tokens:
                place = (_index(outputs, "batch_index"), _index(outputs, "sequence_index"))
                texts[place] += piece[0].decode("utf-8") if len(piece) else ""
                piece = string_array(texts[place]).reshape(-1)
            respond({"text_output": piece} | {n: values for n, values in outputs.items() if n not in _ALWAYS})

        try:
            self._take_pieces(engine_inputs, num_rows, inner_id, take)
        except ModelCallError as error:
            is_running = isinstance(error, PiecesLostError) or num_rows > 1
            if is_running or np.any(engine_inputs.get("num_return_sequences", 1) != 1):
                self.stop(inner_id)
            raise

    def stop(self, inner_id: str) -> None:
        """End the engine's request ``inner_id``; harmless when it has ended."""
        inputs = _ABOUT_ANOTHER | {"stop": _TRUE}
        for response in self._call_model(self._parameters.engine_model, inputs, (), inner_id):
            if response.error is not None:
                _log.warning("a stop request was refused: %s", response.error)

    def close(self) -> None:
        """Stop the thread that fetches pieces. Call when all requests have ended."""
        self._inbox.close()

    def _take_pieces(
        self,
        inputs: Mapping[str, Array],
        num_rows: int,
        inner_id: str,
        take: Callable[[Mapping[str, Array]], None],
    ) -> None:
        """What the engine says: the first piece answers the call, the next ones come with those of other requests.

        Logits are too much to travel as text, so a request for them makes a call a piece. See ``ResponseStream`` for
        why not one call for all pieces.
        """
        engine, names = self._parameters.engine_model, _wanted_outputs(inputs, num_rows)
        inputs = {**inputs, "piecewise": np.tile(_TRUE, (num_rows, 1))}
        is_grouped = not any(name in inputs and inputs[name].any() for name in _LOGITS)
        if is_grouped:
            inputs["piece_group"] = np.tile(string_array(self._inbox.group_id), (num_rows, 1))

        def ask(inputs: Mapping[str, Array]) -> bool:
            more = False
            for outputs in _good(self._call_model(engine, inputs, names, inner_id)):
                more = bool(outputs["more"].any())
                take(outputs)
            return more

        with self._inbox.box(inner_id, lambda outputs: take(_no_error(outputs))) as box:
            more = ask(inputs)
            if more and is_grouped:
                self._inbox.wait(inner_id, box)
                return
        while more:
            more = ask(_NEXT)

    def _fetch_pieces(self, group_id: str) -> Iterator[Mapping[str, Array]]:
        return _good(self._call_model(self._parameters.engine_model, _NEXT, _GROUP_OUTPUTS, group_id))

    def _preprocess(self, view: RequestView, num_rows: int, inner_id: str) -> dict[str, Array]:
        inputs: dict[str, Array] = {"RETURN_ERRORS_IN_BAND": np.tile(_TRUE, (num_rows, 1))}
        for text_name, name in tensor_table.PREPROCESSING_FROM_TEXT.items():
            values = view.inputs.get(text_name)
            if values is not None and values.size:
                inputs[name] = values.reshape(num_rows, -1)
        names = [*tensor_table.ENGINE_FROM_PREPROCESSING, "ERROR", "ERROR_CODE"]
        result: dict[str, Array] = {}
        for outputs in _good(self._call_model(tensor_table.PREPROCESSING, inputs, names, inner_id, decoupled=False)):
            for name, engine_name in tensor_table.ENGINE_FROM_PREPROCESSING.items():
                if name in outputs and outputs[name].size:
                    result[engine_name] = outputs[name]
        return result


def _good(responses: Iterable[ModelResponse]) -> Iterator[Mapping[str, Array]]:
    """The good responses of a model; its error is raised once the model has nothing more to say."""
    failure: ModelCallError | None = None
    for response in responses:
        if failure is not None:
            continue
        if response.error is not None:
            # Triton Server's own words, and no class, when the model is not loaded (or its engine is dead).
            failure = ModelCallError(UNAVAILABLE if _NOT_READY in response.error else INTERNAL, response.error)
            continue
        try:
            outputs = _no_error(response.outputs)
        except ModelCallError as error:
            failure = error
        else:
            yield outputs
    if failure is not None:
        raise failure


def _no_error(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """``outputs``, unless they carry an error of the model, which is raised as ``ModelCallError``."""
    message = first_text(outputs, "error") or first_text(outputs, "ERROR")
    if message:
        raise ModelCallError(first_text(outputs, "error_code") or first_text(outputs, "ERROR_CODE"), message)
    return outputs


def _wanted_outputs(inputs: Mapping[str, Array], num_rows: int) -> tuple[str, ...]:
    """The outputs that a request to the engine model can get, each once."""
    asked = [names for field, names in _ASKED_BY.items() if field in inputs and inputs[field].any()]
    rows = ("batch_index",) if num_rows > 1 else ()
    return tuple(dict.fromkeys((*_ALWAYS, *rows, *(name for names in asked for name in names))))


def _index(outputs: Mapping[str, Array], name: str) -> int:
    return int(outputs[name].reshape(-1)[0]) if name in outputs else 0


def _check(view: RequestView) -> int:
    """Refuse what only the BLS can name well; the number of rows."""
    refuse_features(tensor_table.BLS, view.inputs)
    if "text_input" not in view.inputs:
        raise InvalidRequestError("text_input is required")
    num_rows = view.num_rows("text_input")
    max_tokens = view.inputs.get("max_tokens")
    if max_tokens is None or max_tokens.size != num_rows or int(max_tokens.min()) < 1:
        got = "nothing" if max_tokens is None else max_tokens.reshape(-1)[:4].tolist()
        raise InvalidRequestError(f"max_tokens must be a single value > 0, got {got}")
    return num_rows


def _engine_options(view: RequestView, num_rows: int) -> dict[str, Array]:
    """Inputs of the engine model that need no preprocessing ``[num_rows, 1]``, from inputs and request parameters."""
    inputs: dict[str, Array] = {}
    for text_name, engine_name in tensor_table.engine_from_text().items():
        values = view.inputs.get(text_name)
        if values is None or values.size == 0:
            continue
        if values.size != num_rows:
            raise InvalidRequestError(f"{text_name} must be a single value, got {values.size // num_rows} values")
        inputs[engine_name] = values.reshape(num_rows, 1)
    reader = OptionReader(view, text_names=True)
    for option in tensor_table.OPTIONS:
        if option.as_parameter and option.field in view.parameters and option.token_name is not None:
            inputs[option.token_name] = np.tile(_as_tensor(reader, option), (num_rows, 1))
    timeout_ms = request_timeout_ms(view)
    if timeout_ms is not None:
        limit = min(INT32_MAX, max(1, math.ceil(timeout_ms)))
        sent = inputs.get("deadline_ms", np.zeros((num_rows, 1), np.int32))
        inputs["deadline_ms"] = np.where(sent > 0, np.minimum(sent, limit), limit).astype(np.int32)
    return inputs


def _as_tensor(reader: OptionReader, option: tensor_table.Option) -> Array:
    """A request parameter as the engine's input ``[1, 1]``."""
    if option.dtype == tensor_table.BOOL:
        return np.array([[reader.boolean(option.field)]], np.bool_)
    if option.dtype == tensor_table.FP32:
        return np.array([[reader.real(option.field)]], np.float32)
    if option.dtype == tensor_table.STRING:
        return string_array(reader.text(option.field, INT32_MAX) or "")
    value = reader.integer(option.field) or 0
    if not -INT32_MAX <= value <= INT32_MAX:
        raise InvalidRequestError(f"{option.field} {value} is out of range; it must be at most {INT32_MAX}")
    return np.array([[value]], np.int32)
