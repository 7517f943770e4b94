"""Many streams at once: order, ids, finality, errors half way, and long prompts beside running streams."""

import json
import time
import uuid
from pathlib import Path

import pytest

from tests.support.client import GrpcStream, Server, at_once, grpc_all, grpc_text

pytestmark = pytest.mark.triton
ENTRY = ["ensemble", "tensorrt_llm_bls"]
COUNT = " 1 2 3 4 5 end"


@pytest.mark.parametrize("model", ENTRY)
def test_pieces_arrive_in_order(table_server: Server, model: str) -> None:
    for _ in range(7):
        texts = at_once([lambda: table_server.joined(model, text_input="Count", max_tokens=16)] * 8)
        assert set(texts) == {COUNT}


@pytest.mark.parametrize("model", ENTRY)
def test_one_answer_without_streaming_and_a_final_mark_with(table_server: Server, model: str) -> None:
    for fields, text in (
        ({"text_input": "Count", "max_tokens": 16}, COUNT),
        ({"text_input": "Count", "max_tokens": 1}, " 1"),
        ({"text_input": "User", "max_tokens": 5}, ""),
    ):
        assert table_server.text(model, **fields) == text
        for stream in (False, True):
            responses = grpc_all(
                table_server.grpc, model, "my_request", stream=stream, exclude_input_in_output=True, **fields
            )
            assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
            assert {r.request_id for r in responses} == {"my_request"}
            assert "".join(r.text for r in responses) == text
            if not stream:
                assert len([r for r in responses if r.outputs]) == 1
    table_server.generate(model, text_input="Count", max_tokens=4, stream=True)
    assert table_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"


def test_token_streams_carry_new_ids_and_a_final_mark(table_server: Server, table_ids: dict[str, int]) -> None:
    prompt = [[table_ids["Count"]]]
    fields = {"input_ids": prompt, "input_lengths": 1, "request_output_len": 4}
    words = [table_ids[w] for w in (" 1", " 2", " 3", " 4")]
    streamed = grpc_all(table_server.grpc, "tensorrt_llm", "x", streaming=True, **fields)
    assert [i for r in streamed if r.outputs for i in r.outputs["output_ids"].reshape(-1)] == words
    assert streamed[-1].final and {r.request_id for r in streamed} == {"x"}
    whole = grpc_all(table_server.grpc, "tensorrt_llm", **fields)[0].outputs
    assert whole["output_ids"].tolist() == [[[*prompt[0], *words]]] and whole["sequence_length"].tolist() == [[5]]
    alone = grpc_all(table_server.grpc, "tensorrt_llm", exclude_input_in_output=True, **fields)[0].outputs
    assert alone["output_ids"].tolist() == [[words]] and alone["sequence_length"].tolist() == [[4]]


def test_a_token_request_without_an_end_id_runs_to_its_length(table_server: Server, table_ids: dict[str, int]) -> None:
    fields = {"input_ids": [[table_ids["Count"]]], "input_lengths": 1, "request_output_len": 9}
    outputs = grpc_all(table_server.grpc, "tensorrt_llm", exclude_input_in_output=True, **fields)[0].outputs
    assert outputs["sequence_length"].tolist() == [[9]]


@pytest.mark.parametrize("model", ENTRY)
def test_equal_and_colliding_request_ids_harm_nobody(table_server: Server, model: str) -> None:
    stream = GrpcStream(table_server.grpc)
    other = GrpcStream(table_server.grpc)
    stream.send(model, "dup", text_input="Long", max_tokens=200, stream=True)
    other.send(model, "dup", text_input="Count", max_tokens=16, stream=True)
    long, count = stream.all(), other.all()
    assert "".join(r.text for r in long) == " zig zag" * 100
    assert "".join(r.text for r in count) == COUNT
    stream.close()
    other.close()

    def ask() -> str:
        responses = grpc_all(
            table_server.grpc, model, str(uuid.uuid4()), text_input="Count", max_tokens=16, exclude_input_in_output=True
        )
        return "".join(r.text for r in responses)

    for _ in range(6):
        assert set(at_once([ask] * 16)) == {COUNT}
    assert not [
        line for line in table_server.metrics() if line.startswith("nv_trt_llm") and line.split()[-1].startswith("-")
    ]


def test_32_streams_at_once_each_equal_to_its_whole_text(table_server: Server) -> None:
    words = ["Emoji", "Count", "Stop", "Text", "Special", "Lines", "List", "Bad"] * 4
    whole = {word: table_server.text("ensemble", text_input=word, max_tokens=16) for word in set(words)}
    for model in ENTRY:
        streamed = at_once(
            [
                lambda w=word, m=model: grpc_text(table_server.grpc, m, text_input=w, max_tokens=16, stream=True)
                for word in words
            ]
        )
        assert streamed == [whole[word] for word in words]


@pytest.mark.parametrize("model", ENTRY)
def test_an_engine_error_half_way_reaches_the_client_and_ends_nothing_else(faulty_server: Server, model: str) -> None:
    """The engine fails at the fourth token of "Long" and at the first of "Text"."""
    events = list(faulty_server.events(model, text_input="Long", max_tokens=50))
    assert "".join(e.get("text_output", "") for e in events[:-1]) == " zig zag zig"
    assert "injected fault" in events[-1]["error"]
    assert faulty_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"
    status, body = faulty_server.generate(model, text_input="Long", max_tokens=50)
    assert "injected fault" in body["error"]
    for _ in range(3):
        assert faulty_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"
    status, body = faulty_server.generate(model, text_input="Text", max_tokens=50)
    assert status >= 400 and "injected fault" in body["error"]
    assert faulty_server.text(model, text_input="Count", max_tokens=16) == COUNT
    status, body = faulty_server.generate(model, text_input="Count", max_tokens=-1)
    assert 400 <= status < 500


def test_bls_still_unloads_after_engine_errors(faulty_server: Server) -> None:
    list(faulty_server.events("tensorrt_llm_bls", text_input="Long", max_tokens=50))
    assert faulty_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"
    faulty_server.unload("tensorrt_llm_bls")
    faulty_server.load("tensorrt_llm_bls")
    assert faulty_server.text("tensorrt_llm_bls", text_input="Count", max_tokens=3) == " 1 2 3"


def test_bls_serves_many_streams_at_once(slow_server: Server) -> None:
    """The order of events shows it: every stream begins before any of them ends."""
    log: list[tuple[int, str]] = []

    def follow(index: int) -> str:
        pieces = []
        for event in slow_server.events("tensorrt_llm_bls", text_input="Long", max_tokens=40):
            if event["text_output"] and not pieces:
                log.append((index, "begin"))
            pieces.append(event["text_output"])
        log.append((index, "end"))
        return "".join(pieces)

    texts = at_once([lambda i=i: follow(i) for i in range(4)])
    assert set(texts) == {" zig zag" * 20}
    assert [kind for _, kind in log] == ["begin"] * 4 + ["end"] * 4


def test_cancelling_one_bls_stream_leaves_the_others_exact(slow_server: Server) -> None:
    doomed = GrpcStream(slow_server.grpc)
    doomed.send("tensorrt_llm_bls", text_input="Long", max_tokens=4000, stream=True)
    doomed.next()

    def cancel() -> None:
        time.sleep(0.2)
        doomed.close(cancel=True)

    rest = [lambda: slow_server.joined("tensorrt_llm_bls", text_input="Long", max_tokens=30)] * 3
    assert set(at_once([*rest, cancel])[:3]) == {" zig zag" * 15}


def test_a_long_prompt_does_not_freeze_a_running_stream(slow_server: Server) -> None:
    """Chunks of at most 64 tokens: between two tokens of the victim there is at most one chunk."""
    victim = GrpcStream(slow_server.grpc)
    victim.send("ensemble", text_input="Long", max_tokens=100, stream=True)
    victim.next()
    dump = Path(slow_server.step_dump)
    lines_before = len(dump.read_text().splitlines())
    prompt = "Count" * 3000
    assert slow_server.text("ensemble", text_input=prompt, max_tokens=3) == " 1 2 3"
    assert "".join(r.text for r in victim.all()) in (" zig zag" * 50, (" zig zag" * 50).removeprefix(" zig"))
    victim.close()
    steps = [json.loads(line) for line in dump.read_text().splitlines()[lines_before:]]
    mixed = [step for step in steps if step["context"]]
    assert sum(row["num_tokens"] for step in mixed for row in step["context"]) >= 3000
    beside = [step for step in mixed if step["generation"]]
    assert len(beside) >= 40, "the victim runs on in the steps that take the long prompt in"
    assert all(sum(row["num_tokens"] for row in step["context"]) <= 64 for step in mixed)
