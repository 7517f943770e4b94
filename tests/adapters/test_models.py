"""The four adapters together, on the real engine and the table model; only Triton Server is fake."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_pb_utils import InferenceRequest, InferenceResponse, ResponseSender, Tensor, TritonError
from tests.support import waiting

GREEDY = {"Count": " 1 2 3 4 5 end", "Emoji": "🦙 café ok", "Text": " gamma delta", "User": ""}


eventually = functools.partial(waiting.eventually, seconds=30.0)


def request(parameters: dict[str, Any] | None = None, request_id: str = "", **fields: Any) -> InferenceRequest:
    """A request ``[1, n]`` whose tensors have the types that these values have in the contract."""
    tensors = []
    for name, value in fields.items():
        row = value if isinstance(value, list) else [value]
        kind = {str: np.object_, bool: np.bool_, float: np.float32}.get(type(row[0]), np.int32)
        encoded = [element.encode() if isinstance(element, str) else element for element in row]
        tensors.append(Tensor(name, np.array([encoded], dtype=kind)))
    return InferenceRequest(request_id=request_id, inputs=tensors, parameters=parameters)


def tokens(prompt: list[int], max_tokens: int, **fields: Any) -> InferenceRequest:
    return request(input_ids=prompt, input_lengths=len(prompt), request_output_len=max_tokens, **fields)


class Chain:
    """Engine, preprocessing and BLS of one repository, with the BLS's calls led to the other two."""

    def __init__(self, start_model: Callable[..., Any], folder: str, decoupled: bool, **engine: str) -> None:
        settings = {"num_threads": "1", "device": "cpu", "max_seq_len": "256"} | engine
        self.engine = start_model("tensorrt_llm", decoupled, gpt_model_path=folder, **settings)
        self.preprocessing = start_model("preprocessing", tokenizer_dir=folder)
        self.bls = start_model("tensorrt_llm_bls", decoupled)

    def ask_engine(self, one: InferenceRequest) -> ResponseSender:
        assert self.engine.execute([one]) is None
        return one.sender

    def ask(self, prompt: str, max_tokens: int = 16, **fields: Any) -> ResponseSender:
        values = {"text_input": prompt, "max_tokens": max_tokens, "exclude_input_in_output": True} | fields
        one = request(**values)
        self.bls.execute([one])
        assert eventually(lambda: one.sender.is_final)
        return one.sender

    def routes(self) -> dict[str, Callable[[InferenceRequest], Iterator[InferenceResponse]]]:
        return {"preprocessing": lambda inner: iter(self.preprocessing.execute([inner])), "tensorrt_llm": self._stream}

    def _stream(self, inner: InferenceRequest) -> Iterator[InferenceResponse]:
        self.engine.execute([inner])
        taken: list[InferenceResponse | None] = []
        while len(taken) < len(inner.sender.log) or not inner.sender.is_final:
            assert eventually(lambda: len(inner.sender.log) > len(taken))
            response, _ = inner.sender.log[len(taken)]
            taken.append(response)
            if response is not None:
                yield response

    def close(self) -> None:
        self.bls.finalize()
        self.engine.finalize()


@pytest.fixture
def start_chain(
    start_model: Callable[..., Any], table_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Chain]]:
    """Start a chain with these engine parameters; it is finalized at the end."""
    started: list[Chain] = []

    def start(decoupled: bool = True, **engine: str) -> Chain:
        chain = Chain(start_model, str(table_model_dir), decoupled, **engine)
        started.append(chain)
        for name, route in chain.routes().items():
            monkeypatch.setitem(pb_utils.ROUTES, name, route)
        return chain

    yield start
    for chain in started:
        chain.close()


def text(sender: ResponseSender) -> str:
    assert not any(response.has_error() for response in sender.responses), sender.responses[-1].error().message()
    return b"".join(r.arrays()["text_output"].reshape(-1)[0] for r in sender.responses).decode()


def prompt_ids(*words: str) -> list[int]:
    from tests.support.table_model import token_id

    return [token_id(word) for word in words]


def test_texts_are_the_models_streamed_and_not(start_chain: Callable[..., Chain]) -> None:
    chain = start_chain()
    for prompt, expected in GREEDY.items():
        assert text(chain.ask(prompt)) == expected
        sender = chain.ask(prompt, stream=True)
        assert text(sender) == expected and "�" not in "".join(str(r.arrays()) for r in sender.responses)
        assert text(chain.ask(prompt, exclude_input_in_output=False)) == prompt + expected
        assert len(chain.ask(prompt).responses) == 1
    for stream in (True, False):
        stopped = {"stop_words": ["STOP"], "stream": stream, "return_stop_reason": True}
        assert text(chain.ask("Stop", **stopped)) == " alpha beta STOP"
        sender = chain.ask("Stop", include_stop_words_in_output=False, **stopped)
        assert text(sender) == " alpha beta "
        assert sender.responses[-1].arrays()["stop_reason"].tolist() == [[b"STOP"]]
    assert text(chain.ask("Bad", bad_words=["London"])) == " one"
    assert text(chain.ask("Count", end_id=prompt_ids(" 4")[0])) == " 1 2 3"


def test_a_chain_that_is_not_decoupled_answers_once(start_chain: Callable[..., Chain]) -> None:
    chain = start_chain(decoupled=False)
    for prompt, expected in GREEDY.items():
        sender = chain.ask(prompt)
        assert text(sender) == expected and [flags for _, flags in sender.log] == [1]
    error = chain.ask("Count", stream=True).responses[-1].error()
    assert error.message() == "Streaming is only supported if model is deployed using decoupled mode."
    assert error.code() == TritonError.INVALID_ARG
    sender = chain.ask_engine(tokens(prompt_ids("Count"), 3))
    assert eventually(lambda: sender.is_final)
    assert sender.responses[0].arrays()["output_ids"].tolist() == [[prompt_ids("Count", " 1", " 2", " 3")]]


def test_errors_keep_their_class_and_the_next_request_works(start_chain: Callable[..., Chain]) -> None:
    chain = start_chain()
    for fields, word, code in (
        ({"prompt": ""}, "empty", TritonError.INVALID_ARG),
        ({"prompt": "Count", "top_k": -5}, "top_k -5", TritonError.INVALID_ARG),
        ({"prompt": "Count" * 300}, "256", TritonError.INVALID_ARG),
        ({"prompt": "Count", "max_tokens": -1}, "max_tokens", TritonError.INVALID_ARG),
    ):
        for stream in (True, False):
            (response,) = chain.ask(**fields, stream=stream).responses
            assert word in response.error().message() and response.error().code() == code
    assert text(chain.ask("Count", 3)) == " 1 2 3"


def test_a_failing_step_reaches_clients_of_both_models(start_chain: Callable[..., Chain]) -> None:
    long = prompt_ids("Long", " zig", " zag", " zig")
    chain = start_chain(debug_fail_on_tokens=",".join(map(str, long)))
    sender = chain.ask("Long", stream=True)
    *pieces, last = sender.responses
    assert b"".join(r.arrays()["text_output"][0] for r in pieces).decode() == " zig zag zig"
    assert "failed" in last.error().message() and last.error().code() == TritonError.INTERNAL
    assert chain.ask("Long").responses[-1].has_error()
    sender = chain.ask_engine(tokens(long[:1], 9, streaming=True))
    assert eventually(lambda: sender.is_final) and sender.responses[-1].has_error()
    assert text(chain.ask("Count", 3)) == " 1 2 3"


def test_a_stop_request_ends_a_stream_and_is_answered_itself(start_chain: Callable[..., Chain]) -> None:
    chain = start_chain(debug_step_delay_ms="5")
    running = chain.ask_engine(
        tokens(prompt_ids("Long"), 200, streaming=True, request_id="mine", return_finish_reason=True)
    )
    assert eventually(lambda: len(running.log) > 2)
    stop = chain.ask_engine(tokens([1], 0, stop=True, request_id="mine"))
    assert [(r is not None and r.output_tensors(), flags) for r, flags in stop.log] == [([], 1)]
    assert eventually(lambda: running.is_final)
    assert running.responses[-1].arrays()["finish_reason"].tolist() == [[b"cancelled"]]
    (nameless,) = chain.ask_engine(tokens([1], 0, stop=True)).responses
    assert "request ID is not provided" in nameless.error().message()


def test_a_client_of_the_bls_that_leaves_frees_the_engine(start_chain: Callable[..., Chain]) -> None:
    chain = start_chain(debug_step_delay_ms="5")
    one = request(text_input="Long", max_tokens=250, stream=True)
    chain.bls.execute([one])
    assert eventually(lambda: len(one.sender.log) > 2)
    one.sender.client_is_gone = True
    assert eventually(lambda: one.sender.is_final and chain.engine._llm.stats().num_active == 0)
    assert one.sender.responses[-1].error().code() == TritonError.CANCELLED
    assert chain.engine._llm.stats().num_generated_tokens_total < 249
    assert chain.engine._llm.stats().kv_used_blocks == 0


def test_finalize_ends_live_streams(start_chain: Callable[..., Chain]) -> None:
    chain = start_chain(debug_step_delay_ms="5")
    sender = chain.ask_engine(tokens(prompt_ids("Long"), 250, streaming=True, return_finish_reason=True))
    assert eventually(lambda: len(sender.log) > 2)
    chain.engine.finalize()
    assert sender.is_final and sender.responses[-1].arrays()["finish_reason"].tolist() == [[b"cancelled"]]


def test_postprocessing_hands_texts_through_and_decodes_without(
    start_model: Callable[..., Any], table_model_dir: Path
) -> None:
    model = start_model("postprocessing", tokenizer_dir=str(table_model_dir))
    ids = np.array([[prompt_ids(" 1", " 2")]], np.int32)
    plain = [Tensor("TOKENS_BATCH", ids), Tensor("SEQUENCE_LENGTH", np.array([[2]], np.int32))]
    ready = [*plain, Tensor("TEXT", np.array([["é".encode()]], dtype=np.object_))]
    wrong = [Tensor("TOKENS_BATCH", ids), Tensor("SEQUENCE_LENGTH", np.array([[2, 2]], np.int32))]
    good, handed, bad = model.execute([InferenceRequest(inputs=inputs) for inputs in (plain, ready, wrong)])
    assert good.arrays()["OUTPUT"].tolist() == [b" 1 2"] and handed.arrays()["OUTPUT"].tolist() == ["é".encode()]
    assert "SEQUENCE_LENGTH" in bad.error().message() and bad.error().code() == TritonError.INVALID_ARG


def test_preprocessing_takes_all_end_ids_of_the_generation_config(
    start_model: Callable[..., Any], tmp_path: Path
) -> None:
    from tests.support.table_model import EOS, IM_END, build_table_model, token_id

    folder = build_table_model(tmp_path / "model", end_tokens=(EOS, IM_END))
    model = start_model("preprocessing", tokenizer_dir=str(folder))
    (response,) = model.execute([request(QUERY="Count", REQUEST_OUTPUT_LEN=3)])
    assert response.arrays()["STOP_TOKEN_IDS"].tolist() == [[token_id(EOS), token_id(IM_END)]]
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).write_bytes((folder / name).read_bytes())
    model = start_model("preprocessing", tokenizer_dir=str(tmp_path / "tokenizer"))
    (response,) = model.execute([request(QUERY="Count", REQUEST_OUTPUT_LEN=3)])
    assert response.arrays()["STOP_TOKEN_IDS"].tolist() == [[token_id(EOS)]], "the tokenizer's own"


def test_one_bad_request_of_a_batch_answers_itself_alone(
    start_model: Callable[..., Any], table_model_dir: Path
) -> None:
    model = start_model("preprocessing", tokenizer_dir=str(table_model_dir))
    fine = {"QUERY": "Count", "REQUEST_OUTPUT_LEN": 3}
    good, bad, in_band, misspelt = model.execute(
        [
            request(**fine),
            request(QUERY="", REQUEST_OUTPUT_LEN=3),
            request(QUERY="", REQUEST_OUTPUT_LEN=3, RETURN_ERRORS_IN_BAND=True),
            request({"max_token": 5}, **fine),
        ]
    )
    assert good.arrays()["REQUEST_INPUT_LEN"].tolist() == [[1]]
    assert "empty" in bad.error().message() and bad.error().code() == TritonError.INVALID_ARG
    assert not in_band.has_error() and in_band.arrays()["ERROR_CODE"].tolist() == [[b"INVALID_ARG"]]
    assert "did you mean 'max_tokens'" in misspelt.error().message()


@pytest.mark.parametrize(
    ("model", "parameters", "culprit"),
    [
        ("tensorrt_llm", {"gpt_model_path": "/nowhere"}, "/nowhere"),
        ("tensorrt_llm", {}, "gpt_model_path (engine_dir) is not set"),
        ("tensorrt_llm", {"gpt_model_path": "/nowhere", "max_seq_len": "x"}, "max_seq_len 'x'"),
        ("preprocessing", {"tokenizer_dir": "/nowhere"}, "/nowhere"),
        ("preprocessing", {"tokenizer_dir": "${tokenizer_dir}"}, "tokenizer_dir is not set"),
        ("postprocessing", {"tokenizer_dir": "/nowhere"}, "/nowhere"),
        ("tensorrt_llm_bls", {"bls_max_concurrency": "0"}, "bls_max_concurrency '0'"),
    ],
)
def test_a_load_fails_with_one_line(
    start_model: Callable[..., Any], model: str, parameters: dict[str, str], culprit: str
) -> None:
    with pytest.raises(pb_utils.TritonModelException) as caught:
        start_model(model, **parameters)
    assert culprit in str(caught.value) and "\n" not in str(caught.value)
