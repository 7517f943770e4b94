"""The BLS: one request through injected models, and many at once through the service."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io import tensor_table
from backend_engine.triton_io.bls_flow import BlsFlow, ModelResponse
from backend_engine.triton_io.bls_service import BlsService
from backend_engine.triton_io.error_codes import ModelCallError
from backend_engine.triton_io.model_caller import ModelCaller
from backend_engine.triton_io.parameters import BlsParameters
from backend_engine.triton_io.piece_text import entry, to_text
from backend_engine.triton_io.request_view import RequestView
from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_pb_utils import InferenceRequest, Tensor, TritonError
from tests.support.waiting import eventually

Arrays = Mapping[str, np.ndarray]
PREPROCESSED = {
    "INPUT_ID": np.array([[3, 4]], np.int32), "REQUEST_INPUT_LEN": np.array([[2]], np.int32),
    "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32), "OUT_END_ID": np.array([[9]], np.int32),
    "OUT_PAD_ID": np.array([[8]], np.int32), "EMBEDDING_BIAS": np.zeros((1, 0), np.float32),
    "STOP_WORDS_IDS": np.zeros((1, 2, 0), np.int32), "DETOKENIZE": np.array([[True]]),
    "ERRORS_IN_BAND": np.array([[True]]), "STOP_TOKEN_IDS": np.array([[9, 10]], np.int32),
}  # fmt: skip


def text(value: str) -> np.ndarray:
    return np.array([[value.encode()]], dtype=np.object_)


def piece(value: str, **others: np.ndarray) -> ModelResponse:
    return ModelResponse({"text_output": text(value), **others})


class Models:
    """Preprocessing and engine, scripted: ``answers`` are the engine's, ``calls`` what was asked.

    Asked for the pieces of a group it gives one of each request that has some left.
    """

    def __init__(self, *answers: ModelResponse, preprocessing: ModelResponse | None = None) -> None:
        self.answers = answers
        self.preprocessing = preprocessing or ModelResponse(PREPROCESSED)
        self.calls: list[tuple[str, Arrays, str]] = []
        self.taken: dict[str, int] = {}
        self.stopped: list[str] = []
        self.groups: set[str] = set()
        self.during: Callable[[str, int], None] = lambda request_id, index: None

    def __call__(
        self, model: str, inputs: Arrays, outputs: Sequence[str], request_id: str, *, decoupled: bool = True
    ) -> Iterator[ModelResponse]:
        assert decoupled == (model != "preprocessing")
        self.calls.append((model, inputs, request_id))
        self.names = list(outputs)
        if model == "preprocessing":
            yield self.preprocessing
        elif "stop" in inputs:
            self.stopped.append(request_id)
            yield ModelResponse({})
        elif "next_piece" in inputs and request_id in self.groups:
            left = [one for one, num_taken in self.taken.items() if num_taken < len(self.answers)]
            pieces = [entry(one, self.next_piece(one).outputs) for one in left]
            yield ModelResponse({"pieces": np.array([[to_text(pieces)]], np.object_)})
        else:
            assert ("next_piece" in inputs) == (request_id in self.taken), "the first piece, then the next ones"
            if "piece_group" in inputs:
                self.groups.add(inputs["piece_group"].reshape(-1)[0].decode())
            self.taken.setdefault(request_id, 0)
            yield self.next_piece(request_id)

    def next_piece(self, request_id: str) -> ModelResponse:
        index = self.taken[request_id]
        self.taken[request_id] += 1
        self.during(request_id, index)
        answer = self.answers[index]
        more = np.array([[index + 1 < len(self.answers)]])
        return answer if answer.error else ModelResponse({**answer.outputs, "more": more})


def parameters(**values: Any) -> BlsParameters:
    defaults: dict[str, Any] = {
        "engine_model": "tensorrt_llm", "accumulate_tokens": False, "max_concurrency": 4,
        "reject_unknown_parameters": False, "cancellation_check_period_ms": 5,
    }  # fmt: skip
    return BlsParameters(**defaults | values)


def view(parameters: dict[str, Any] | None = None, timeout_us: int = 0, **inputs: Any) -> RequestView:
    values = {"text_input": text("Count"), "max_tokens": np.array([[5]], np.int32)} | inputs
    arrays = {name: value for name, value in values.items() if value is not None}
    return RequestView(arrays, parameters or {}, "outer", timeout_us)


def run(models: Models, request: RequestView | None = None, **settings: Any) -> list[dict[str, np.ndarray]]:
    responses: list[dict[str, np.ndarray]] = []
    flow = BlsFlow(models, parameters(**settings))
    try:
        flow.run(request or view(), "inner", lambda: False, responses.append)
    finally:
        flow.close()
    return responses


def test_rows_go_through_together_and_come_back_with_their_indices() -> None:
    three = np.array([[b"a"], [b"b"], [b"c"]], dtype=np.object_)
    answers = [
        piece(text, batch_index=np.array([[row]]), sequence_index=np.array([[sequence]]))
        for text, row, sequence in ((" x", 0, 0), (" y", 2, 1), (" z", 0, 0), (" u", 2, 0))
    ]
    rows = view(
        {"priority": 7}, text_input=three, max_tokens=np.array([[5], [6], [7]], np.int32),
        temperature=np.array([[0.0], [0.5], [1.0]], np.float32), stop_words=np.array([[b"s", b"t"]] * 3, np.object_),
        num_return_sequences=np.array([[1], [1], [2]], np.int32),
    )  # fmt: skip
    models = Models(*answers)
    responses = run(models, rows, accumulate_tokens=True)
    assert texts(responses) == [" x", " y", " x z", " u"], "each sequence has a text of its own"
    assert [r["batch_index"].item() for r in responses] == [0, 2, 0, 2]
    (_, first, _), (_, second, _), *_ = models.calls
    assert first["QUERY"].tolist() == three.tolist() and first["STOP_WORDS_DICT"].shape == (3, 2)
    assert first["RETURN_ERRORS_IN_BAND"].shape == (3, 1)
    assert second["temperature"].tolist() == [[0.0], [0.5], [1.0]] and second["priority"].tolist() == [[7]] * 3
    assert second["num_return_sequences"].tolist() == [[1], [1], [2]] and second["piecewise"].shape == (3, 1)


@pytest.mark.parametrize(
    ("message", "code"), [("Model 'tensorrt_llm' is not ready", "UNAVAILABLE"), ("something broke", "INTERNAL")]
)
def test_a_model_that_is_not_loaded_is_unavailable(message: str, code: str) -> None:
    with pytest.raises(ModelCallError, match=message) as caught:
        run(Models(ModelResponse({}, message)))
    assert caught.value.code == code


def test_only_outputs_that_the_request_asks_for_are_asked_of_the_engine() -> None:
    models = Models(piece(" x"))
    run(models)
    assert models.names == ["text_output", "error", "error_code", "more"]
    known = {row.name for row in tensor_table.MODELS[tensor_table.BLS].outputs} | set(models.names)
    flags = [row.name for row in tensor_table.MODELS[tensor_table.BLS].inputs if row.name.startswith("return_")]
    models = Models(piece(" x"))
    two = {"text_input": np.array([[b"a"], [b"b"]], dtype=np.object_), "max_tokens": np.array([[5], [6]], np.int32)}
    sequences = np.array([[2], [2]], np.int32)
    run(models, view(**two, num_return_sequences=sequences, **{flag: np.array([[True]] * 2) for flag in flags}))
    assert set(models.names) == known and len(models.names) == len(known)


def test_an_error_of_one_row_stops_the_others() -> None:
    error = ModelResponse({"error": text("row 1: no"), "error_code": text("UNAVAILABLE"), "text_output": text("")})
    models = Models(piece(" x"), error, piece(" never"))
    two = np.array([[b"a"], [b"b"]], dtype=np.object_)
    with pytest.raises(ModelCallError, match="row 1: no"):
        run(models, view(text_input=two, max_tokens=np.array([[5], [6]], np.int32)))
    assert models.stopped == ["inner"]


def texts(responses: list[dict[str, np.ndarray]]) -> list[str]:
    assert all(response["text_output"].shape == (1,) for response in responses), "clients iterate a flat array"
    return [response["text_output"][0].decode() for response in responses]


def test_one_request_is_a_call_of_preprocessing_and_one_of_the_engine_a_piece() -> None:
    models = Models(piece(" 1"), piece(" 2"), piece(""))
    request = view(
        top_k=np.array([[4]], np.int32), stream=np.array([[True]]), random_seed=np.array([[7]], np.uint64),
        stop_words=text("STOP"), bad_words=np.zeros((1, 0), dtype=np.object_), end_id=np.array([[3]], np.int32),
    )  # fmt: skip
    assert texts(run(models, request)) == [" 1", " 2", ""]
    (pre_model, pre, _), (engine_model, engine, inner_id), *others = models.calls
    assert [sorted(values) for _, values, _ in others] == [
        ["input_ids", "input_lengths", "next_piece", "request_output_len", "return_errors_in_band"]
    ] * 2
    assert {request_id for _, _, request_id in others} == models.groups != {inner_id}
    assert (pre_model, engine_model, inner_id) == ("preprocessing", "tensorrt_llm", "inner")
    assert {name: values.tolist() for name, values in pre.items()} == {
        "RETURN_ERRORS_IN_BAND": [[True]], "QUERY": [[b"Count"]], "REQUEST_OUTPUT_LEN": [[5]],
        "STOP_WORDS_DICT": [[b"STOP"]], "END_ID": [[3]],
    }  # fmt: skip
    assert {name: values.tolist() for name, values in engine.items() if name != "piece_group"} == {
        "return_errors_in_band": [[True]], "runtime_top_k": [[4]], "streaming": [[True]], "random_seed": [[7]],
        "input_ids": [[3, 4]], "input_lengths": [[2]], "request_output_len": [[5]], "end_id": [[9]], "pad_id": [[8]],
        "detokenize": [[True]], "stop_token_ids": [[9, 10]], "piecewise": [[True]],
    }  # fmt: skip


def test_request_parameters_and_timeouts_become_inputs_of_the_engine() -> None:
    sent = {"return_finish_reason": True, "cache_salt": "a", "queue_timeout_ms": 4, "min_p": 0.5, "my_own_tag": 1}
    models = Models(piece(""))
    run(models, view(sent, timeout_us=1_500))
    engine = models.calls[1][1]
    assert engine["return_finish_reason"].tolist() == [[True]] and engine["cache_salt"].tolist() == [[b"a"]]
    assert engine["queue_timeout_ms"].tolist() == [[4]] and engine["min_p"].tolist() == [[0.5]]
    assert engine["deadline_ms"].tolist() == [[2]]
    for deadline, expected in ((1, 1), (90, 2), (0, 2)):
        models = Models(piece(""))
        run(models, view(timeout_us=1_500, deadline_ms=np.array([[deadline]], np.int32)))
        assert models.calls[1][1]["deadline_ms"].tolist() == [[expected]]


def test_accumulated_text_and_what_else_was_asked_for() -> None:
    reason = text("stop")
    models = Models(piece(" 1"), piece(" 2", finish_reason=reason, cum_log_probs=np.zeros((1, 1), np.float32)))
    responses = run(models, accumulate_tokens=True, engine_model="other")
    assert texts(responses) == [" 1", " 1 2"] and models.calls[1][0] == "other"
    assert set(responses[1]) == {"text_output", "cum_log_probs", "finish_reason"}
    assert texts(run(Models(piece(" 1"), piece(" 2")))) == [" 1", " 2"]


def in_band(code: str, *, upper: bool = False) -> ModelResponse:
    names = ("ERROR", "ERROR_CODE") if upper else ("error", "error_code")
    return ModelResponse(dict(zip(names, (text("no such thing"), text(code)), strict=True)))


@pytest.mark.parametrize("code", ["INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED"])
@pytest.mark.parametrize(
    "models",
    [
        lambda code: Models(preprocessing=in_band(code, upper=True)),
        lambda code: Models(in_band(code)),
        lambda code: Models(piece(" 1"), in_band(code)),
    ],
)
def test_an_error_of_another_model_keeps_its_class(code: str, models: Callable[[str], Models]) -> None:
    with pytest.raises(ModelCallError, match=r"^no such thing$") as caught:
        run(models(code))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("request_view", "message"),
    [
        (view(text_input=None), "text_input is required"),
        (view(max_tokens=None), "max_tokens must be a single value > 0"),
        (view(max_tokens=np.array([[0]], np.int32)), r"max_tokens must be a single value > 0, got \[0\]"),
        (view(max_tokens=np.array([[3, 4]], np.int32)), "max_tokens must be a single value > 0"),
        (view(top_k=np.array([[3, 4]], np.int32)), "top_k must be a single value"),
        (view(text_input=np.array([[b"a"], [b"b"]], dtype=np.object_)), "max_tokens has 1 rows and text_input 2"),
        (view({"temprature": 1}), "did you mean 'temperature'"),
        (view({"deadline_ms": 2**40}), "deadline_ms .* out of range"),
        (view({"deadline_ms": "x"}), "deadline_ms must be an integer"),
    ],
)
def test_what_is_not_allowed_is_refused_before_any_call(request_view: RequestView, message: str) -> None:
    models = Models()
    with pytest.raises(InvalidRequestError, match=message):
        run(models, request_view)
    assert not models.calls


def test_a_request_cancelled_in_preprocessing_never_reaches_the_engine() -> None:
    models = Models(piece(" 1"))
    with pytest.raises(ModelCallError) as caught:
        BlsFlow(models, parameters()).run(view(), "inner", lambda: True, lambda _: None)
    assert caught.value.code == "CANCELLED" and [model for model, _, _ in models.calls] == ["preprocessing"]


def request(stream: bool = True) -> InferenceRequest:
    return InferenceRequest(
        inputs=[
            Tensor("text_input", text("Count")),
            Tensor("max_tokens", np.array([[5]], np.int32)),
            Tensor("stream", np.array([[stream]])),
        ]
    )


def service(models: Models, decoupled: bool = True, **settings: Any) -> BlsService:
    settings_made = parameters(**settings)
    return BlsService(BlsFlow(models, settings_made), pb_utils, settings_made, decoupled=decoupled)


def test_decoupled_answers_end_with_an_empty_final_response() -> None:
    made = service(Models(piece(" 1"), piece(" 2")))
    one = request()
    made.submit(one)
    assert eventually(lambda: one.sender.is_final)
    made.close()
    assert [(r is None, flags) for r, flags in one.sender.log] == [(False, 0), (False, 0), (True, 1)]


def test_a_model_that_is_not_decoupled_gives_one_final_response() -> None:
    made = service(Models(piece(" 1 2")), decoupled=False)
    one = request(stream=False)
    made.submit(one)
    assert eventually(lambda: one.sender.is_final)
    made.close()
    ((response, flags),) = one.sender.log
    assert response is not None and flags == 1 and response.arrays()["text_output"].tolist() == [b" 1 2"]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    ("models", "code"),
    [
        (Models(piece(" 1"), in_band("INTERNAL")), TritonError.INTERNAL),
        (Models(preprocessing=in_band("INVALID_ARG", upper=True)), TritonError.INVALID_ARG),
        (Models(piece(" 1"), ModelResponse({"text_output": np.array([3])})), TritonError.INTERNAL),
    ],
)
def test_an_error_is_the_final_response_and_the_next_request_works(models: Models, code: int, decoupled: bool) -> None:
    made = service(models, decoupled, accumulate_tokens=True)
    for _ in range(2):
        one = request()
        made.submit(one)
        assert eventually(lambda one=one: one.sender.is_final)
        last, flags = one.sender.log[-1]
        assert last is not None and last.error().code() == code and flags == 1
        assert "Traceback" not in last.error().message()
    made.close()


def test_many_requests_run_at_once_and_the_rest_is_refused() -> None:
    gate, models = threading.Event(), Models(piece(" 1"), piece(" 2"))
    models.during = lambda request_id, index: index == 1 and gate.wait(10) and None  # type: ignore[func-returns-value]
    made = service(models, max_concurrency=3)
    requests = [request() for _ in range(7)]
    for one in requests:
        made.submit(one)
    assert eventually(lambda: all(len(one.sender.log) == 1 for one in requests[:3])), "three have begun, none has ended"
    assert requests[6].sender.responses[0].error().code() == TritonError.UNAVAILABLE
    assert "bls_max_concurrency" in requests[6].sender.responses[0].error().message()
    gate.set()
    assert eventually(lambda: all(one.sender.is_final for one in requests))
    made.close()
    assert all(len(one.sender.responses) == 2 for one in requests[:6])


def test_a_client_that_leaves_gets_its_engine_request_stopped_and_no_other() -> None:
    models = Models(piece(" 1"), piece(" 2"))
    victim: list[str] = []

    def during(request_id: str, index: int) -> None:
        """The first request's stream goes on until a stop request names it."""
        if not victim:
            victim.append(request_id)
        if index == 1 and request_id == victim[0]:
            assert eventually(lambda: request_id in models.stopped)

    models.during = during
    made = service(models)
    gone, other = request(), request()
    made.submit(gone)
    assert eventually(lambda: len(gone.sender.log) == 1)
    gone.sender.client_is_gone = True
    made.submit(other)
    assert eventually(lambda: gone.sender.is_final and other.sender.is_final)
    made.close()
    assert set(models.stopped) == {victim[0]}
    assert gone.sender.responses[-1].error().code() == TritonError.CANCELLED
    assert len(other.sender.responses) == 2


def test_a_response_that_cannot_be_sent_stops_the_engines_request() -> None:
    models = Models(piece(" 1"), piece(" 2"))
    models.during = lambda request_id, index: index == 1 and eventually(lambda: bool(models.stopped)) and None  # type: ignore[func-returns-value]
    made = service(models)
    one = request()
    one.sender.fail_next = 1
    made.submit(one)
    assert eventually(lambda: one.sender.is_final)
    made.close()
    assert models.stopped and [flags for _, flags in one.sender.log] == [1]


def test_finished_calls_are_let_go_later_and_by_python() -> None:
    caller = ModelCaller(pb_utils)
    caller.KEEP_S = 0.05  # type: ignore[misc]
    gone: list[int] = []

    class Responses(list[pb_utils.InferenceResponse]):
        """What the Python backend's iterator is to its owner."""

        def __del__(self) -> None:
            gone.append(threading.get_ident())

    pb_utils.ROUTES["engine"] = lambda inner: Responses(
        [pb_utils.InferenceResponse([Tensor("text_output", text("x"))])]
    )  # type: ignore[assignment,return-value]
    try:
        call: dict[str, Any] = {"model": "engine", "inputs": {}, "outputs": (), "request_id": ""}
        assert [r.outputs["text_output"].tolist() for r in caller(**call)] == [[[b"x"]]]
        assert not gone, "kept while the Python backend may still know it"
        time.sleep(0.1)
        list(caller(**call))
        assert gone == [threading.get_ident()]
        caller.close()
        assert len(gone) == 2, "nothing outlives the model"
    finally:
        del pb_utils.ROUTES["engine"]


def test_errors_of_a_call_are_answers() -> None:
    def refuse(inner: InferenceRequest) -> Iterator[pb_utils.InferenceResponse]:
        raise pb_utils.TritonModelException("model 'x' is not ready")

    pb_utils.ROUTES["engine"] = refuse
    try:
        for decoupled in (True, False):
            (answer,) = ModelCaller(pb_utils)("engine", {}, (), "", decoupled=decoupled)
            assert answer.error == "model 'x' is not ready"
    finally:
        del pb_utils.ROUTES["engine"]


def test_closing_ends_what_runs() -> None:
    models, stopped = Models(piece(" 1"), piece(" 2")), threading.Event()
    models.during = lambda request_id, index: index == 1 and stopped.wait(10) and None  # type: ignore[func-returns-value]
    made = service(models)
    one = request()
    made.submit(one)
    assert eventually(lambda: len(one.sender.log) == 1)
    closer = threading.Thread(target=made.close)
    closer.start()
    assert eventually(lambda: bool(models.stopped))
    stopped.set()
    closer.join(10)
    assert not closer.is_alive() and one.sender.is_final
