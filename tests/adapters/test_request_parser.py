"""Requests of the engine model: what is read, what is refused, and under which name."""

from typing import Any

import numpy as np
import pytest

from backend_engine.errors import InvalidRequestError
from backend_engine.triton_io.engine_request import EngineRequest, EngineRow, RequestDefaults, StopRequest
from backend_engine.triton_io.parameter_guard import edit_distance
from backend_engine.triton_io.request_parser import RequestParser
from backend_engine.triton_io.request_view import RequestView
from backend_engine.triton_io.word_lists import WordLimits

VOCAB, MAX_SEQ_LEN = 50, 100
_KINDS: dict[str, Any] = {
    "random_seed": np.uint64, "seed": np.uint64, "stop_words_text": np.object_, "cache_salt": np.object_,
    "logits_processors": np.object_,
    **dict.fromkeys(
        ("temperature", "runtime_top_p", "runtime_top_p_decay", "runtime_top_p_min", "min_p", "repetition_penalty",
         "len_penalty", "presence_penalty", "frequency_penalty", "embedding_bias"), np.float32,
    ),
}  # fmt: skip
_BOOLS = ("stop", "streaming", "detokenize", "exclude_input_in_output", "include_stop_words_in_output")


def view(
    *, parameters: dict[str, Any] | None = None, request_id: str = "", timeout_us: int = 0, **inputs: Any
) -> RequestView:
    """A request with a good prompt and length, unless they are given; a value of ``None`` leaves the input out."""
    values: dict[str, Any] = {"input_ids": [[3, 4]], "input_lengths": 2, "request_output_len": 5} | inputs
    arrays = {}
    for name, value in values.items():
        kind = np.bool_ if name in _BOOLS or name.startswith("return_") else _KINDS.get(name, np.int32)
        if value is not None:
            arrays[name] = np.array(value if isinstance(value, list) else [value], dtype=kind)
    return RequestView(arrays, parameters or {}, request_id, timeout_us)


def parser(decoupled: bool = True, reject_unknown: bool = False, **defaults: Any) -> RequestParser:
    return RequestParser(
        RequestDefaults(**defaults), VOCAB, MAX_SEQ_LEN, decoupled=decoupled, reject_unknown=reject_unknown
    )


def only_row(parsed: object) -> EngineRow:
    assert isinstance(parsed, EngineRequest)
    (row,) = parsed.rows
    return row


def parse(**fields: Any) -> EngineRow:
    return only_row(parser().parse(view(**fields)))


def refusal(request: RequestView, **settings: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        parser(**settings).parse(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_bare_request_gets_the_defaults() -> None:
    request = parse()
    params, options = request.sampling_params, request.options
    assert request.prompt_token_ids == [3, 4]
    assert (params.max_tokens, params.end_id, params.seed, params.logprobs) == (5, -1, None, None)
    assert params.is_greedy and params.include_stop_str_in_output and not params.stop
    assert (options.streaming, options.exclude_input, options.detokenize) == (False, False, False)
    assert (options.deadline_s, options.queue_timeout_s) == (600.0, None)


def test_every_field_reaches_sampling_params() -> None:
    params = parse(
        temperature=0.7, runtime_top_k=4, runtime_top_p=0.9, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-0.5, min_length=2, random_seed=2**64 - 1, end_id=7, pad_id=8, beam_width=1,
        stop_words_list=[[[1, 2, 3], [2, 3, -1]]], bad_words_list=[[[9], [1]]], return_log_probs=True,
        stop_token_ids=[[7, 11]], include_stop_words_in_output=False,
    ).sampling_params  # fmt: skip
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 4, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.25, -0.5)
    assert (params.min_tokens, params.seed, params.end_id, params.pad_id) == (2, 2**64 - 1, 7, 8)
    assert (params.stop_sequences, params.bad_token_ids, params.stop_token_ids) == ([[1, 2], [3]], [[9]], [7, 11])
    assert params.logprobs == 0 and not params.include_stop_str_in_output


def test_stop_words_as_text_replace_the_list() -> None:
    params = parse(stop_words_text=[[b"STOP", b""]], stop_words_list=[[[1], [1]]]).sampling_params
    assert (params.stop, params.stop_sequences) == (("STOP",), [])


def test_unset_values_as_clients_send_them_are_harmless() -> None:
    params = parse(runtime_top_p=0.0, runtime_top_k=0, temperature=0.0, len_penalty=1.0, end_id=1048576, pad_id=50256)
    assert params.sampling_params.is_greedy
    assert parse(runtime_top_p=-1.0).sampling_params.is_greedy


def test_rows_are_trimmed_to_their_length_and_ids_to_the_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    one = parser()
    assert only_row(one.parse(view(input_ids=[[3, 4, 0, 0]]))).prompt_token_ids == [3, 4]
    assert only_row(one.parse(view(input_ids=[[3, 2**31 - 1]]))).prompt_token_ids == [3, VOCAB - 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [[]], "input_lengths": 0}, ["empty"]),
        ({"input_ids": [[]], "input_lengths": 2}, ["input_lengths 2", "0 ids"]),
        ({"input_lengths": 0}, ["empty"]),
        ({"input_lengths": 3}, ["input_lengths 3", "2 ids"]),
        ({"input_lengths": -1}, ["input_lengths -1"]),
        ({"input_lengths": [2, 2]}, ["input_lengths", "single value"]),
        ({"input_ids": [[3, -4]]}, ["input_ids", "-4"]),
        ({"input_ids": None}, ["input_ids", "not present"]),
        ({"input_ids": [[1], [2]]}, ["input_lengths has 1 rows and input_ids 2"]),
        ({"request_output_len": None}, ["request_output_len is not present"]),
        ({"request_output_len": 0}, ["request_output_len 0"]),
        ({"request_output_len": -1294967296}, ["request_output_len -1294967296"]),
        ({"request_output_len": [3, 4]}, ["request_output_len", "single value"]),
        ({"min_length": 9}, ["min_length 9", "request_output_len 5"]),
        ({"min_tokens": 9}, ["min_tokens 9"]),
        ({"min_length": -1}, ["min_length -1"]),
        ({"runtime_top_k": -5}, ["runtime_top_k -5"]),
        ({"runtime_top_p": 1.5}, ["runtime_top_p 1.5"]),
        ({"temperature": -1.0}, ["temperature -1"]),
        ({"temperature": float("nan")}, ["temperature nan"]),
        ({"presence_penalty": float("inf")}, ["presence_penalty inf"]),
        ({"len_penalty": float("inf")}, ["len_penalty inf"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty 0"]),
        ({"min_p": 2.0}, ["min_p 2"]),
        ({"runtime_top_p_decay": 0.0}, ["runtime_top_p_decay 0"]),
        ({"runtime_top_p_decay": 1.5}, ["runtime_top_p_decay 1.5"]),
        ({"runtime_top_p_min": -0.5}, ["runtime_top_p_min -0.5"]),
        ({"runtime_top_p_reset_ids": -2}, ["runtime_top_p_reset_ids -2"]),
        ({"end_id": -5}, ["end_id -5"]),
        ({"random_seed": 1, "seed": 2}, ["random_seed 1", "seed 2"]),
        ({"beam_width": 2}, ["Requested beam width 2 is larger than configured max beam width 1"]),
        ({"beam_width": 0}, ["beam_width 0"]),
        ({"num_return_sequences": 0}, ["num_return_sequences 0"]),
        ({"num_return_sequences": 65}, ["65 sequences", "at most 64", "max_sequences"]),
        ({"return_perf_metrics": True, "return_kv_cache_reuse_stats": False}, ["return_perf_metrics True", "differ"]),
        ({"priority": 101}, ["priority 101", "1 (most urgent) to 100"]),
        ({"priority": -1}, ["priority -1"]),
        ({"stop_words_list": [[[1, 2], [5, -1]]]}, ["stop_words_list", "Invalid format for word list"]),
        ({"bad_words_list": [[1, 2]]}, ["bad_words_list"]),
        ({"embedding_bias": [[0.0] * (VOCAB + 1)]}, ["embedding_bias", str(VOCAB + 1), str(VOCAB)]),
        ({"deadline_ms": -1}, ["deadline_ms -1"]),
        ({"queue_timeout_ms": -7}, ["queue_timeout_ms -7"]),
        ({"cache_salt": b"\xff"}, ["cache_salt", "UTF-8"]),
        ({"stop": True}, ["request ID is not provided"]),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_refused_by_its_name(fields: dict[str, Any], words: list[str]) -> None:
    message = refusal(view(**fields))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"request_output_len": 0}, "max_tokens 0"),
        ({"runtime_top_k": -5}, "top_k -5"),
        ({"runtime_top_p": 1.5}, "top_p 1.5"),
        ({"min_length": 9}, "min_length 9 is more than max_tokens 5"),
        ({"len_penalty": float("nan")}, "length_penalty nan"),
    ],
)
def test_a_request_from_preprocessing_is_refused_in_the_words_of_its_client(fields: dict[str, Any], name: str) -> None:
    assert refusal(view(detokenize=True, **fields)).startswith(name)


def test_rows_become_prompts_each_with_its_own_settings() -> None:
    parsed = parser().parse(
        view(
            input_ids=[[3, 4, 9], [5, 9, 9], [6, 7, 8]], input_lengths=[2, 1, 3], request_output_len=[5, 6, 7],
            temperature=[0.0, 0.5, 1.0], num_return_sequences=[1, 2, 1], priority=[0, 1, 100],
            stop_words_text=[[b"a", b""], [b"", b""], [b"b", b"c"]],
            bad_words_list=[[[1, 0], [1, -1]], [[0, 0], [-1, -1]], [[1, 2], [1, 2]]],
        )
    )  # fmt: skip
    assert isinstance(parsed, EngineRequest)
    rows = parsed.rows
    assert [row.prompt_token_ids for row in rows] == [[3, 4], [5], [6, 7, 8]]
    assert [row.sampling_params.max_tokens for row in rows] == [5, 6, 7]
    assert [row.sampling_params.temperature for row in rows] == [0.0, 0.5, 1.0]
    assert [row.sampling_params.n for row in rows] == [1, 2, 1]
    assert [row.sampling_params.stop for row in rows] == [("a",), (), ("b", "c")]
    assert [row.sampling_params.bad_token_ids for row in rows] == [[[1]], [], [[1], [2]]]
    assert [row.options.priority for row in rows] == [50, 1, 100]


def test_an_error_of_a_row_names_the_row() -> None:
    rows = {"input_ids": [[1], [2]], "input_lengths": [1, 1], "request_output_len": [5, 5]}
    assert refusal(view(**rows | {"request_output_len": [5, 0]})).startswith("row 1: request_output_len 0")
    assert "row 0: temperature -1" in refusal(view(**rows, temperature=[-1.0, 1.0]))
    assert "the same for all rows" in refusal(view(**rows, streaming=[True, False]))
    assert "4 sequences" in refusal(view(**rows, num_return_sequences=[2, 2]), max_sequences=3)


def test_several_answers_need_a_decoupled_model() -> None:
    rows = {"input_ids": [[1], [2]], "input_lengths": [1, 1], "request_output_len": [5, 5]}
    assert "Batch size > 1 requires" in refusal(view(**rows), decoupled=False)
    assert "num_return_sequences 2 needs a decoupled model" in refusal(view(num_return_sequences=2), decoupled=False)


@pytest.mark.parametrize(
    ("fields", "num_rows"),
    [
        ({"return_context_logits": True}, 2),
        ({"return_generation_logits": True}, 5),
        ({"return_context_logits": True, "return_generation_logits": True, "num_return_sequences": 3}, 21),
        ({"return_generation_logits": True, "request_output_len": 1000}, MAX_SEQ_LEN - 2),
    ],
)
@pytest.mark.parametrize(("kind", "size"), [("TYPE_FP32", 4), ("TYPE_FP16", 2)])
def test_logits_are_bounded_in_bytes(fields: dict[str, Any], num_rows: int, kind: str, size: int) -> None:
    needed = num_rows * VOCAB * size
    assert parser(max_logits_bytes=needed, logits_dtype=kind).parse(view(**fields))
    message = refusal(view(**fields), max_logits_bytes=needed - 1, logits_dtype=kind)
    assert f"{needed} bytes" in message and f"max_logits_bytes allows {needed - 1}" in message


def test_beams_are_refused_as_too_wide_or_as_not_built() -> None:
    wide = "Requested beam width 3 is larger than configured max beam width 2"
    assert refusal(view(beam_width=3), max_beam_width=2) == wide
    assert (
        refusal(view(beam_width=2), max_beam_width=2)
        == "beam_width 2 asks for beam search, not built yet: it must be 1"
    )


def test_streaming_needs_a_decoupled_model() -> None:
    message = refusal(view(streaming=True), decoupled=False)
    assert message == "Streaming is only supported if model is deployed using decoupled mode."
    assert parse(streaming=True).options.streaming


def test_words_have_bounds() -> None:
    limits = WordLimits(max_words=1, max_word_bytes=3)
    assert "stop_words has 2 words" in refusal(view(stop_words_text=[[b"a", b"b"]]), word_limits=limits)
    assert "cache_salt has 4 bytes" in refusal(view(cache_salt=b"abcd"), word_limits=limits)


def test_a_short_embedding_bias_is_filled_up() -> None:
    bias = parse(embedding_bias=[[0.0, -20.0]]).sampling_params.embedding_bias
    assert bias is not None and len(bias) == VOCAB and bias[1] == -20 and bias.sum() == -20
    assert parse(embedding_bias=[[]]).sampling_params.embedding_bias is None


def test_logits_processors_come_as_json() -> None:
    text = '{"b": {"ids": [1, 2.5, null]}, "a": {}}'
    for request in ({"logits_processors": text.encode()}, {"parameters": {"logits_processors": text}}):
        processors = parse(**request).sampling_params.logits_processors
        assert list(processors.items()) == [("b", {"ids": [1, 2.5, None]}), ("a", {})]
    assert parse(logits_processors=b"").sampling_params.logits_processors == {}
    for wrong, told in (
        (b"[]", "no object"), (b"{", "not JSON"), (b'{"a": {"x": Infinity}}', "Infinity is not JSON"),
        (b'{"a": [1]}', "an object of arguments for each name, got 'a'"), (b" " * 70_000, "bytes"),
        (b"[" * 9_999, "JSON"),
    ):  # fmt: skip
        message = refusal(view(logits_processors=wrong))
        assert "logits_processors" in message and told in message and "\n" not in message


def test_our_inputs_are_accepted_as_parameters_too() -> None:
    options = parse(
        parameters={"deadline_ms": 1500, "queue_timeout_ms": 20, "cache_salt": "a", "return_finish_reason": True}
    ).options
    assert (options.deadline_s, options.queue_timeout_s, options.cache_salt) == (1.5, 0.02, "a")
    assert options.return_finish_reason
    assert not parse(parameters={"include_stop_words_in_output": False}).sampling_params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"deadline_ms": "soon"}, ["deadline_ms", "integer", "soon"]),
        ({"deadline_ms": True}, ["deadline_ms", "integer"]),
        ({"min_p": "much"}, ["min_p", "number"]),
        ({"return_finish_reason": 1}, ["return_finish_reason", "true or false"]),
        ({"temprature": 1}, ["temprature", "did you mean 'temperature'"]),
        ({"request_type": "context_only"}, ["request_type 'context_only'", "disaggregated", "context_and_generation"]),
        ({"runtime_topk": 1}, ["runtime_topk", "runtime_top_k"]),
        ({"temperature": 1}, ["temperature", "cannot be sent as a request parameter"]),
    ],
)
def test_bad_parameters_are_refused(parameters: dict[str, Any], words: list[str]) -> None:
    message = refusal(view(parameters=parameters))
    assert all(word in message for word in words), message


def test_an_input_and_a_parameter_must_agree() -> None:
    assert parse(deadline_ms=5, parameters={"deadline_ms": 5}).options.deadline_s == 0.005
    assert "deadline_ms" in refusal(view(deadline_ms=5, parameters={"deadline_ms": 6}))


def test_unknown_parameters_are_ignored_unless_told_otherwise() -> None:
    known = {"Streaming": True, "triton_enable_empty_final_response": True, "accumulate_tokens": True, "id": "x"}
    parser(reject_unknown=True).parse(view(parameters=known))
    parse(parameters={"my_own_tag": "x", "priority": 1, "request_type": "context_and_generation"})
    assert "my_own_tag" in refusal(view(parameters={"my_own_tag": "x"}), reject_unknown=True)


def test_parameters_that_come_through_the_ensemble_were_judged_before() -> None:
    parse(detokenize=True, parameters={"stop": "x", "temprature": 1})


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"timeout_us": 2_000_000}, 2.0),
        ({"parameters": {"timeout": 2_000_000}}, 2.0),
        ({"parameters": {"timeout": "never"}}, 600.0),
        ({"timeout_us": 2_000_000, "deadline_ms": 500}, 0.5),
        ({"timeout_us": 1_000, "deadline_ms": 500}, 0.001),
        ({"deadline_ms": 0}, 600.0),
        ({"deadline_ms": 900_000}, 900.0),
    ],
)
def test_the_nearest_deadline_counts(fields: dict[str, Any], seconds: float) -> None:
    assert parse(**fields).options.deadline_s == seconds


def test_a_stop_request_needs_nothing_but_its_id() -> None:
    request = view(
        stop=True, request_id="my_request", input_lengths=0, request_output_len=0, parameters={"Streaming": True}
    )
    assert parser().parse(request) == StopRequest("my_request")


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("abc", "abc", 0), ("abc", "abd", 1), ("ab", "ba", 2), ("a", "abcd", 3), ("kitten", "sitting", 3)],
)
def test_edit_distance(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == distance == edit_distance(second, first)
