"""Several prompts in one request, and several answers to one: indices, exact texts, one final flag, clear refusals."""

from typing import Any

import numpy as np
import pytest

from tests.support.client import GrpcStream, Response, Server, grpc_all

pytestmark = pytest.mark.triton
TEXT_MODELS = ["ensemble", "tensorrt_llm_bls"]
ENTRY = [*TEXT_MODELS, "tensorrt_llm"]
TEXTS = {"Count": " 1 2 3 4 5 end", "Emoji": "🦙 café ok", "User": "", "Text": " gamma delta"}


def column(values: list[Any], kind: Any) -> np.ndarray:
    return np.array([[value] for value in values], dtype=kind)


def ask(server: Server, model: str, prompts: list[str], ids: dict[str, int], **more: Any) -> list[Response]:
    """A request with a row for each prompt (of one token each)."""
    lengths = column([16] * len(prompts), np.int32)
    given: dict[str, Any] = {"exclude_input_in_output": column([True] * len(prompts), np.bool_)}
    if model == "tensorrt_llm":
        given |= {"input_ids": column([ids[p] for p in prompts], np.int32), "request_output_len": lengths}
        given["input_lengths"] = column([1] * len(prompts), np.int32)
        given["end_id"] = column([ids["</s>"]] * len(prompts), np.int32)
        more = {("streaming" if name == "stream" else name): value for name, value in more.items()}
    else:
        given |= {"text_input": column([p.encode() for p in prompts], np.object_), "max_tokens": lengths}
    many = {name: column([value] * len(prompts), type(value)) for name, value in more.items()}
    many |= {k: v.astype(np.int32) for k, v in many.items() if v.dtype == np.int64}
    return grpc_all(server.grpc, model, **given | many)


def said(responses: list[Response], ids: dict[str, int]) -> dict[tuple[int, int], str]:
    """Text by row and sequence."""
    words = {number: word for word, number in ids.items()}
    texts: dict[tuple[int, int], str] = {}
    for response in responses:
        assert response.error is None, response
        if not response.outputs:
            continue
        place = tuple(
            int(response.outputs[n][0][0]) if n in response.outputs else 0 for n in ("batch_index", "sequence_index")
        )
        if "output_ids" in response.outputs:
            new = "".join(words[int(i)] for i in response.outputs["output_ids"].reshape(-1))
        else:
            assert response.outputs["text_output"].shape == (1,)
            new = response.text
        texts[place] = texts.get(place, "") + new  # type: ignore[index]
    return texts


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize("stream", [True, False])
def test_each_row_is_answered_for_itself(
    table_server: Server, table_ids: dict[str, int], model: str, stream: bool
) -> None:
    prompts = ["Count", "Text", "User", "Count"]
    responses = ask(table_server, model, prompts, table_ids, stream=stream)
    assert said(responses, table_ids) == {(row, 0): TEXTS[prompt] for row, prompt in enumerate(prompts)}
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    if not stream:
        assert len(responses) == len(prompts) + (model == "tensorrt_llm_bls")


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize("stream", [True, False])
def test_each_sequence_is_answered_for_itself(
    table_server: Server, table_ids: dict[str, int], model: str, stream: bool
) -> None:
    responses = ask(table_server, model, ["Count"], table_ids, stream=stream, num_return_sequences=3)
    assert said(responses, table_ids) == {(0, sequence): TEXTS["Count"] for sequence in range(3)}
    assert not any("batch_index" in r.outputs for r in responses)
    both = ask(table_server, model, ["Text", "User"], table_ids, stream=stream, num_return_sequences=2)
    assert said(both, table_ids) == {(r, s): TEXTS[("Text", "User")[r]] for r in (0, 1) for s in (0, 1)}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_sequences_differ_and_follow_from_the_seed(table_server: Server, table_ids: dict[str, int], model: str) -> None:
    def pick(n: int, **more: Any) -> dict[tuple[int, int], str]:
        seed = {name: np.array([[value]], np.uint64) for name, value in more.items()}
        responses = grpc_all(
            table_server.grpc, model, text_input="Pick", max_tokens=15, temperature=1.0, num_return_sequences=n,
            exclude_input_in_output=True, **seed,
        )  # fmt: skip
        return said(responses, table_ids)

    four = pick(4, seed=7)
    assert len(set(four.values())) >= 3 and pick(4, random_seed=7) == four
    assert pick(1, seed=7)[0, 0] == four[0, 0], "the first sequence has the request's own seed"
    assert pick(4) != pick(4)


@pytest.mark.parametrize("model", ENTRY)
def test_a_bad_row_refuses_the_request_and_is_named(
    table_server: Server, table_ids: dict[str, int], model: str
) -> None:
    length = "request_output_len" if model == "tensorrt_llm" else "max_tokens"
    zero = {length: np.array([[3], [0]], np.int32)}
    given: dict[str, Any] = {"text_input": column([b"Count", b"Count"], np.object_)}
    if model == "tensorrt_llm":
        given = {"input_ids": column([table_ids["Count"]] * 2, np.int32), "input_lengths": column([1, 1], np.int32)}
    (response,) = grpc_all(table_server.grpc, model, **given | zero)
    assert response.error is not None and length in response.error
    assert model == "tensorrt_llm_bls" or "row 1" in response.error
    assert table_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
def test_the_number_of_sequences_is_bounded(table_server: Server, table_ids: dict[str, int], model: str) -> None:
    (response,) = ask(table_server, model, ["Count"], table_ids, num_return_sequences=65)
    assert response.error is not None and "65 sequences" in response.error and "at most 64" in response.error
    (response,) = ask(table_server, model, ["Count"], table_ids, num_return_sequences=0)
    assert response.error is not None and "num_return_sequences 0" in response.error


@pytest.mark.parametrize("model", ENTRY)
def test_one_answer_only_where_responses_are_not_decoupled(
    whole_server: Server, table_ids: dict[str, int], model: str
) -> None:
    error = ask(whole_server, model, ["Count", "Text"], table_ids)[0].error
    assert error is not None and "Batch size > 1 requires" in error and "decoupled" in error
    error = ask(whole_server, model, ["Count"], table_ids, num_return_sequences=2)[0].error
    assert error is not None and "num_return_sequences 2 needs a decoupled model" in error
    assert said(ask(whole_server, model, ["Count"], table_ids), table_ids) == {(0, 0): TEXTS["Count"]}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_several_answers_are_too_many_for_generate(table_server: Server, model: str) -> None:
    """Triton Server itself refuses them there, and streams them elsewhere."""
    _, body = table_server.generate(model, text_input="Count", max_tokens=3, num_return_sequences=2)
    assert "exactly 1 response" in body["error"]
    events = list(table_server.events(model, text_input="Count", max_tokens=3, num_return_sequences=2))
    texts = ["".join(e["text_output"] for e in events if e.get("sequence_index") == i) for i in (0, 1)]
    assert texts == [" 1 2 3"] * 2
    assert table_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize("stream", [True, False])
def test_a_row_that_fails_later_fails_alone_or_ends_the_request(
    narrow_server: Server, table_ids: dict[str, int], model: str, stream: bool
) -> None:
    """One request runs at a time, so the second row waits longer than it may."""
    limits = np.array([[0], [100]], np.int32)
    given: dict[str, Any] = {"queue_timeout_ms": limits, "exclude_input_in_output": column([True, True], np.bool_)}
    lengths = np.array([[40], [3]], np.int32)
    if model == "tensorrt_llm":
        ids = column([table_ids["Long"], table_ids["Count"]], np.int32)
        given |= {"input_ids": ids, "input_lengths": column([1, 1], np.int32), "request_output_len": lengths}
        given["streaming"] = column([stream] * 2, np.bool_)
    else:
        given |= {"text_input": column([b"Long", b"Count"], np.object_), "max_tokens": lengths}
        given["stream"] = column([stream] * 2, np.bool_)
    responses = []
    client = GrpcStream(narrow_server.grpc)
    client.send(model, **given)
    while not responses or not responses[-1].final or (model == "tensorrt_llm" and responses[-1].error):
        responses.append(client.next())
    client.close()
    errors = [response.error for response in responses if response.error]
    assert len(errors) == 1 and "row 1: timed out" in errors[0] and "in the queue" in errors[0]
    if model == "tensorrt_llm":
        tokens = [i for r in responses if r.outputs for i in r.outputs["output_ids"].reshape(-1).tolist()]
        assert len(tokens) == 40 and responses[-1].error is None
    assert narrow_server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"
    narrow_server.wait_for("nv_trt_llm_request_metrics", "active", 0)  # type: ignore[attr-defined]
