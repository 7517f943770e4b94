"""The rest of the request contract over a real server: logits, metrics of a request, priorities, spellings, chats,
and a refusal by name for whatever is declared and not built.
"""

import json
import threading
from typing import Any

import numpy as np
import pytest

from backend_engine.triton_io.feature_table import FEATURES
from tests.support.client import GrpcStream, Server, at_once, grpc_all, tensor

pytestmark = pytest.mark.triton
TEXT_MODELS = ["ensemble", "tensorrt_llm_bls"]
ENTRY = [*TEXT_MODELS, "tensorrt_llm"]
KINDS: dict[str, Any] = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_STRING": np.object_,
    "${logits_datatype}": np.float32, "${encoder_input_features_data_type}": np.float16,
}  # fmt: skip


def count(model: str, ids: dict[str, int], max_tokens: int = 3, **more: Any) -> dict[str, Any]:
    """A request of either kind of model for " 1 2 3"."""
    if model != "tensorrt_llm":
        return {"text_input": "Count", "max_tokens": max_tokens, "exclude_input_in_output": True, **more}
    more = {("streaming" if name == "stream" else name): value for name, value in more.items()}
    return {"input_ids": ids["Count"], "input_lengths": 1, "request_output_len": max_tokens, **more}


@pytest.mark.parametrize("model", ENTRY)
def test_logits_have_the_shapes_that_clients_read(table_server: Server, table_ids: dict[str, int], model: str) -> None:
    asked = {"return_context_logits": True, "return_generation_logits": True}
    outputs = grpc_all(table_server.grpc, model, **count(model, table_ids, **asked))[0].outputs
    context, generation = outputs["context_logits"], outputs["generation_logits"]
    vocab = context.shape[-1]
    assert context.shape == (1, 1, vocab) and generation.shape == (1, 1, 3, vocab) and vocab >= len(table_ids)
    assert context.dtype == generation.dtype == np.float32
    expected = [table_ids[word] for word in (" 1", " 2", " 3")]
    assert generation.argmax(-1).reshape(-1).tolist() == expected
    assert context.argmax(-1).reshape(-1).tolist() == expected[:1]
    stream = [r.outputs for r in grpc_all(table_server.grpc, model, **count(model, table_ids, stream=True, **asked))]
    assert sum("context_logits" in o for o in stream) == 1 and "context_logits" in stream[0]
    np.testing.assert_array_equal(np.concatenate([o["generation_logits"] for o in stream if o], axis=2), generation)


def test_logits_go_through_http_as_legal_numbers(table_server: Server) -> None:
    for model in TEXT_MODELS:
        _, body = table_server.generate(model, text_input="Count", max_tokens=2, return_generation_logits=True)
        assert len(body["generation_logits"]) % 2 == 0 and all(abs(x) < 1e9 for x in body["generation_logits"])


@pytest.mark.parametrize("model", ENTRY)
def test_logits_are_bounded_in_size(narrow_server: Server, table_ids: dict[str, int], model: str) -> None:
    request = count(model, table_ids, max_tokens=10**6, return_generation_logits=True)
    (response,) = grpc_all(narrow_server.grpc, model, **request)
    assert response.error is not None and "max_logits_bytes allows" in response.error


def test_perf_metrics_count_blocks_and_times(table_server: Server, table_ids: dict[str, int]) -> None:
    ids = np.array([[table_ids["Count"]] * 100], np.int32)

    def ask() -> dict[str, np.ndarray]:
        (response,) = grpc_all(
            table_server.grpc, "tensorrt_llm", input_ids=ids, input_lengths=100, request_output_len=4,
            return_perf_metrics=True, cache_salt="perf",
        )  # fmt: skip
        assert all(response.outputs[n].shape == (1, 1) for n in response.outputs if n.startswith(("kv_", "total_")))
        return {name: values.reshape(-1)[0] for name, values in response.outputs.items() if name != "output_ids"}

    first, second = ask(), ask()
    names = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
    assert [int(first[n]) for n in names] == [4, 0, 4] and [int(second[n]) for n in names] == [1, 3, 1]
    times = [f"{n}_time_ns" for n in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert 0 < second[times[0]] <= second[times[1]] <= second[times[2]] < second[times[3]]
    assert first[times[3]] < second[times[0]]
    assert [float(first[n]) for n in ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")] == [
        0
    ] * 3


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("spelling", ["return_perf_metrics", "return_kv_cache_reuse_stats"])
@pytest.mark.parametrize("stream", [True, False])
def test_perf_metrics_come_once_with_the_last_words(
    table_server: Server, table_ids: dict[str, int], model: str, spelling: str, stream: bool
) -> None:
    request = count(model, table_ids, stream=stream, return_num_input_tokens=True, return_num_output_tokens=True)
    outputs = [r.outputs for r in grpc_all(table_server.grpc, model, **request | {spelling: True}) if r.outputs]
    assert ["first_token_time_ns" in o for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {int(o["num_input_tokens"].item()) for o in outputs} == {1}
    assert sum(int(o["num_output_tokens"].item()) for o in outputs) == 3


@pytest.mark.parametrize("model", ENTRY)
def test_two_spellings_must_agree(table_server: Server, table_ids: dict[str, int], model: str) -> None:
    seeds = [np.array([[value]], np.uint64) for value in (1, 2)]
    same = count(model, table_ids, random_seed=seeds[0], seed=seeds[0], min_length=2, min_tokens=2)
    assert grpc_all(table_server.grpc, model, **same)[0].error is None
    for one, other in (
        ({"random_seed": seeds[0]}, {"seed": seeds[1]}),
        ({"min_length": 1}, {"min_tokens": 2}),
        ({"return_perf_metrics": True}, {"return_kv_cache_reuse_stats": False}),
    ):
        error = grpc_all(table_server.grpc, model, **count(model, table_ids, **one, **other))[0].error
        assert error is not None and all(name in error for name in (*one, *other)), error


def feature_inputs(model: str) -> list[Any]:
    rows = []
    for feature in FEATURES:
        text = feature.text + (feature.bls_only if model == "tensorrt_llm_bls" else ())
        rows += [(feature, row) for row in (feature.engine if model == "tensorrt_llm" else text)]
    return [(feature, row) for feature, row in rows if row.name != "decoder_input_lengths"]


@pytest.mark.parametrize("model", ENTRY)
def test_what_is_not_built_is_declared_and_refused_by_name(
    table_server: Server, table_ids: dict[str, int], model: str
) -> None:
    for feature, row in feature_inputs(model):
        value = np.full([1, *(2 if size < 0 else size for size in row.dims)], 3).astype(KINDS[row.dtype])
        if row.dtype == "TYPE_STRING":
            value = np.full(value.shape, b"x", dtype=np.object_)
        (response,) = grpc_all(table_server.grpc, model, **count(model, table_ids), **{row.name: value})
        assert response.error is not None and f"asks for {feature.name}, not built yet" in response.error, response
        assert row.name in response.error
    (response,) = grpc_all(table_server.grpc, model, **count(model, table_ids, beam_width=2))
    assert response.error is not None and "larger than configured max beam width 1" in response.error
    parameters = {"request_type": "context_only"}
    (response,) = grpc_all(table_server.grpc, model, parameters=parameters, **count(model, table_ids))
    assert response.error is not None and "disaggregated serving" in response.error
    assert table_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize(
    ("field", "value", "feature"),
    [
        ("guided_decoding_guide_type", "json", "guided decoding"),
        ("image_url_input", "http://example.org/a.png", "images and video"),
        ("decoder_text_input", "x", "encoder-decoder models"),
        ("lora_task_id", 0, "LoRA adapters"),
        ("prompt_vocab_size", 3, "prompt tuning"),
        ("num_draft_tokens", 4, "not"),
        ("retention_decode_priority", 4, "not"),
    ],
)
def test_generate_refuses_what_is_not_built(
    table_server: Server, model: str, field: str, value: Any, feature: str
) -> None:
    status, body = table_server.generate(model, text_input="Count", max_tokens=3, **{field: value})
    assert 400 <= status < 500 and field in body["error"] and feature in body["error"], body
    event = next(iter(table_server.events(model, text_input="Count", max_tokens=3, **{field: value})))
    assert field in event["error"]


@pytest.mark.parametrize("model", ENTRY)
def test_priorities_reach_the_engine(narrow_server: Server, table_ids: dict[str, int], model: str) -> None:
    """One request runs; of those that wait the most urgent one is next, whichever came first."""
    order: list[int] = []
    threads = []

    def ask(priority: int, max_tokens: int) -> None:
        (*_, last) = grpc_all(narrow_server.grpc, model, **count(model, table_ids, max_tokens, priority=priority))
        assert last.error is None
        order.append(priority)

    def start(priority: int, max_tokens: int, num_waiting: int) -> None:
        threads.append(threading.Thread(target=ask, args=(priority, max_tokens)))
        threads[-1].start()
        narrow_server.wait_for("nv_trt_llm_request_metrics", "waiting", num_waiting)  # type: ignore[attr-defined]

    blocker = {"text_input": "Long", "max_tokens": 200}
    threads.append(threading.Thread(target=lambda: narrow_server.text("ensemble", **blocker)))
    threads[-1].start()
    narrow_server.wait_for("nv_trt_llm_request_metrics", "scheduled", 1)  # type: ignore[attr-defined]
    for num_waiting, priority in enumerate((80, 0, 2, 100), 1):
        start(priority, 3, num_waiting)
    for thread in threads:
        thread.join()
    assert order == [2, 0, 80, 100]


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize("priority", [-1, 101])
def test_priorities_out_of_range_are_refused(
    table_server: Server, table_ids: dict[str, int], model: str, priority: int
) -> None:
    (response,) = grpc_all(table_server.grpc, model, **count(model, table_ids, priority=priority))
    assert response.error is not None and f"priority {priority}" in response.error


@pytest.mark.parametrize("model", ENTRY)
def test_queue_timeouts_reach_the_engine(narrow_server: Server, table_ids: dict[str, int], model: str) -> None:
    blocker = threading.Thread(target=lambda: narrow_server.text("ensemble", text_input="Long", max_tokens=150))
    blocker.start()
    narrow_server.wait_for("nv_trt_llm_request_metrics", "scheduled", 1)  # type: ignore[attr-defined]
    for request in (count(model, table_ids, queue_timeout_ms=50), count(model, table_ids)):
        parameters = None if "queue_timeout_ms" in request else {"queue_timeout_ms": 50}
        (*_, last) = grpc_all(narrow_server.grpc, model, parameters=parameters, **request)
        assert last.error is not None and "in the queue" in last.error
    blocker.join()


@pytest.mark.parametrize("model", ENTRY)
def test_a_full_queue_refuses_clearly_and_serves_the_rest(
    narrow_server: Server, table_ids: dict[str, int], model: str
) -> None:
    """Either the engine's queue refuses or, before it, Triton Server's own of the same size."""
    request = count(model, table_ids, max_tokens=6)
    results = at_once([lambda: grpc_all(narrow_server.grpc, model, **request)] * 40)
    errors = [responses[-1].error for responses in results if responses[-1].error]
    assert 0 < len(errors) < 40
    assert all("Maximum queue size of 6" in e or "Exceeds maximum queue size" in e for e in errors), set(errors)
    narrow_server.wait_for("nv_trt_llm_request_metrics", "active", 0)  # type: ignore[attr-defined]
    assert narrow_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


def test_the_engines_full_queue_refuses_by_its_own_name(narrow_server: Server, table_ids: dict[str, int]) -> None:
    """One after another, so that Triton Server's queue stays empty: it hands each request on before the next comes."""

    blocker = GrpcStream(narrow_server.grpc)
    endless = {"input_ids": [[table_ids["Long"]]], "input_lengths": 1, "request_output_len": 8000, "streaming": True}
    blocker.send("tensorrt_llm", **endless)
    narrow_server.wait_for("nv_trt_llm_request_metrics", "scheduled", 1)  # type: ignore[attr-defined]
    threads = []
    for num_waiting in range(1, 7):
        threads.append(threading.Thread(target=lambda: narrow_server.text("ensemble", text_input="Long", max_tokens=2)))
        threads[-1].start()
        narrow_server.wait_for("nv_trt_llm_request_metrics", "waiting", num_waiting)  # type: ignore[attr-defined]
    (response,) = grpc_all(narrow_server.grpc, "tensorrt_llm", **count("tensorrt_llm", table_ids))
    blocker.close(cancel=True)
    assert response.error is not None and "Maximum queue size of 6 has been reached" in response.error
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_messages_are_answered_in_place_of_a_text(table_server: Server, model: str) -> None:
    chat = [{"role": "user", "content": "Count"}]
    plain = table_server.text(model, text_input="", messages=json.dumps(chat), max_tokens=3)
    assert plain and table_server.joined(model, text_input="", messages=json.dumps(chat), max_tokens=3) == plain
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with_tools = {"messages": chat, "tools": tools}
    assert table_server.generate(model, text_input="", messages=json.dumps(with_tools), max_tokens=3)[0] == 200
    for bad, words in (("{bad", "JSON"), ("3", "list"), ('[{"content": "x"}]', "role"), ("[]", "messages")):
        status, body = table_server.generate(model, text_input="", messages=bad, max_tokens=3)
        assert status == 400 and "messages" in body["error"] and words in body["error"], body
    status, body = table_server.generate(model, text_input="x", messages=json.dumps(chat), max_tokens=3)
    assert status == 400 and "text_input" in body["error"] and "messages" in body["error"]


def test_a_client_that_names_its_outputs_gets_these(table_server: Server, table_ids: dict[str, int]) -> None:
    import tritonclient.grpc as grpcclient

    with grpcclient.InferenceServerClient(table_server.grpc) as client:
        names = ["output_ids", "sequence_length", "cum_log_probs"]
        answers: list[Any] = []
        done = threading.Event()
        client.start_stream(lambda result, error: (answers.append(error or result.get_response()), done.set()))
        request = count("tensorrt_llm", table_ids, return_log_probs=True, return_perf_metrics=True)
        client.async_stream_infer(
            "tensorrt_llm",
            [tensor(name, value) for name, value in request.items()],
            outputs=[grpcclient.InferRequestedOutput(name) for name in names],
        )
        assert done.wait(30)
        client.stop_stream()
    assert [output.name for output in answers[0].outputs] == names


def test_static_batching_contiguous_cache_and_half_logits(odd_server: Server, table_ids: dict[str, int]) -> None:
    """A server with the other value of each choice answers the same."""
    for model in TEXT_MODELS:
        for word, text in (("Count", " 1 2 3 4 5 end"), ("Emoji", "🦙 café ok")):
            assert odd_server.text(model, text_input=word, max_tokens=16) == text
            assert odd_server.joined(model, text_input=word, max_tokens=16) == text
    outputs = grpc_all(
        odd_server.grpc, "ensemble", text_input="Count", max_tokens=2, return_context_logits=True,
        return_generation_logits=True,
    )[0].outputs  # fmt: skip
    assert outputs["context_logits"].dtype == outputs["generation_logits"].dtype == np.float16
    lines = odd_server.metrics()  # type: ignore[attr-defined]
    assert any(line.startswith("nv_trt_llm_v1_metrics") for line in lines)
    assert not any(line.startswith("nv_trt_llm_inflight_batcher_metrics") for line in lines)


def test_a_static_batch_runs_to_its_end_before_the_next_begins(odd_server: Server) -> None:
    order: list[str] = []

    def ask(word: str, max_tokens: int) -> None:
        odd_server.text("ensemble", text_input=word, max_tokens=max_tokens)
        order.append(word)

    long = threading.Thread(target=ask, args=("Long", 100))
    long.start()
    odd_server.wait_for("nv_trt_llm_request_metrics", "scheduled", 1)  # type: ignore[attr-defined]
    ask("Count", 3)
    long.join()
    assert order == ["Long", "Count"]
