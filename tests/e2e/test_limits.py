"""Lengths at their edges, empty and over-long prompts: refused clearly, and nobody else suffers."""

import numpy as np
import pytest

from tests.support.client import Server, at_once, grpc_all, tensor

pytestmark = pytest.mark.triton
ENTRY = ["ensemble", "tensorrt_llm_bls"]


def fine(server: Server) -> None:
    """The server answers as ever."""
    assert server.text("ensemble", text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
def test_max_tokens_at_its_edges(table_server: Server, model: str) -> None:
    assert table_server.text(model, text_input="Count", max_tokens=1) == " 1"
    events = [e for e in table_server.events(model, text_input="Count", max_tokens=1) if e["text_output"]]
    assert [e["text_output"] for e in events] == [" 1"]
    for bad in (0, -1, 3_000_000_000):
        status, body = table_server.generate(model, text_input="Count", max_tokens=bad)
        assert 400 <= status < 500 and "max_tokens" in body["error"], (bad, status, body)
        assert "max_tokens" in next(iter(table_server.events(model, text_input="Count", max_tokens=bad)))["error"]
    # Two values look like a batch of two to Triton Server, which finds one text only and refuses by itself.
    assert table_server.generate(model, text_input="Count", max_tokens=[3, 4])[0] == 400
    # Triton Server answers for an ensemble that lacks a required input, with an error and status 200.
    status, body = table_server.generate(model, text_input="Count")
    assert "error" in body if model == "ensemble" else status == 400 and "max_tokens" in body["error"]
    fine(table_server)


@pytest.mark.parametrize("model", ENTRY)
def test_an_empty_prompt_is_refused(table_server: Server, model: str) -> None:
    status, body = table_server.generate(model, text_input="", max_tokens=3)
    assert 400 <= status < 500 and "empty" in body["error"], (status, body)
    assert "empty" in next(iter(table_server.events(model, text_input="", max_tokens=3)))["error"]
    assert "empty" in (grpc_all(table_server.grpc, model, text_input="", max_tokens=3)[0].error or "")
    # A list of no texts is a batch of none, which Triton Server refuses before any model sees it.
    status, body = table_server.generate(model, text_input=[], max_tokens=3)
    assert status == 400 and "text_input" in body["error"]
    assert table_server.generate(model, text_input="   ", max_tokens=3)[0] == 200
    fine(table_server)


def test_token_ids_of_no_length_are_refused(table_server: Server) -> None:
    ids = np.zeros((1, 0), np.int32)
    error = grpc_all(table_server.grpc, "tensorrt_llm", input_ids=ids, input_lengths=0, request_output_len=3)[0].error
    assert error is not None and "empty" in error
    fine(table_server)


def test_an_empty_prompt_is_fine_where_a_begin_token_is_added(variant_server: Server) -> None:
    for model in ENTRY:
        assert variant_server.generate(model, text_input="", max_tokens=3)[0] == 200


def test_an_over_long_prompt_is_refused_with_both_lengths(variant_server: Server) -> None:
    """max_seq_len is 256; ten streams run meanwhile and finish exactly."""

    def refused(model: str) -> None:
        prompt = "Count" * 299
        for error in (
            variant_server.generate(model, text_input=prompt, max_tokens=3)[1]["error"],
            next(iter(variant_server.events(model, text_input=prompt, max_tokens=3)))["error"],
        ):
            assert "300" in error and "256" in error

    streams = [lambda: variant_server.joined("ensemble", text_input="Long", max_tokens=40)] * 10
    results = at_once([*streams, *[lambda m=model: refused(m) for model in ENTRY]])
    assert set(results[:10]) == {" zig zag" * 20}
    fine(variant_server)


def test_a_request_longer_than_the_engine_ends_with_length(variant_server: Server) -> None:
    response = grpc_all(
        variant_server.grpc, "ensemble", text_input="Long", max_tokens=4000, exclude_input_in_output=True,
        return_finish_reason=True,
    )[0]  # fmt: skip
    assert response.outputs["finish_reason"].reshape(-1)[0] == b"length"
    assert response.text == " zig zag" * 127


def test_wrong_types_and_shapes_are_refused(table_server: Server) -> None:
    for fields in ({"max_tokens": "many"}, {"max_tokens": 3, "temperature": [0.1, 0.2]}, {"max_tokens": None}):
        status, body = table_server.generate("ensemble", text_input="Count", **fields)
        assert status >= 400 and "error" in body
    two_rows = tensor("text_input", np.array([["Count"], ["Text"]], dtype=object))
    assert two_rows.shape() == [2, 1]
    fine(table_server)


def test_misspelt_fields_are_refused_with_the_right_name(table_server: Server) -> None:
    for model in ENTRY:
        status, body = table_server.generate(model, text_input="Count", max_tokens=3, temprature=0.5)
        assert status >= 400 and "temperature" in body["error"]
        assert table_server.text(model, text_input="Count", max_tokens=3, my_own_tag="x") == " 1 2 3"
