"""Text through a real server: streaming is exact, stop and bad words work however they are written.

The model is the table model: what it says to each word is known.
"""

import pytest

from tests.support.client import Server, at_once, grpc_all, grpc_text

pytestmark = pytest.mark.triton
ENTRY = ["ensemble", "tensorrt_llm_bls"]
EMOJI = "🦙 café ok"
COUNT = " 1 2 3 4 5 end"


def all_ways(server: Server, model: str, **fields: object) -> set[str]:
    """The same request by HTTP and gRPC, streamed and not."""
    return {
        server.text(model, **fields),
        server.joined(model, **fields),
        grpc_text(server.grpc, model, **fields),
        grpc_text(server.grpc, model, stream=True, **fields),
    }


@pytest.mark.parametrize("model", ENTRY)
def test_characters_of_several_tokens_arrive_whole(table_server: Server, model: str) -> None:
    chunks = table_server.chunks(model, text_input="Emoji", max_tokens=16)
    assert "".join(chunks) == EMOJI and not any("\ufffd" in chunk for chunk in chunks)
    assert all_ways(table_server, model, text_input="Emoji", max_tokens=16) == {EMOJI}


@pytest.mark.parametrize("model", ENTRY)
def test_a_character_cut_by_the_length_limit_is_told_as_such(table_server: Server, model: str) -> None:
    for max_tokens, expected in ((1, "\ufffd"), (3, "\ufffd"), (4, "🦙"), (6, "🦙 caf\ufffd")):
        assert all_ways(table_server, model, text_input="Emoji", max_tokens=max_tokens) == {expected}


@pytest.mark.parametrize("model", ENTRY)
def test_broken_bytes_are_replaced_and_do_not_hold_the_stream_up(table_server: Server, model: str) -> None:
    assert all_ways(table_server, model, text_input="Half", max_tokens=5) == {"\ufffd loop loop loop"}


@pytest.mark.parametrize("model", ENTRY)
def test_words_keep_their_leading_blanks(table_server: Server, model: str) -> None:
    assert all_ways(table_server, model, text_input="Count", max_tokens=16) == {COUNT}


@pytest.mark.parametrize("model", ENTRY)
def test_the_prompt_is_echoed_unless_excluded(table_server: Server, model: str) -> None:
    fields = {"text_input": "Count", "max_tokens": 3}
    assert table_server.text(model, **fields, exclude_input_in_output=False) == "Count 1 2 3"
    status, body = table_server.post(f"/v2/models/{model}/generate", fields)
    assert (status, body["text_output"]) == (200, "Count 1 2 3")
    assert table_server.joined(model, **fields, exclude_input_in_output=False) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_word_over_token_borders_leaks_nothing(table_server: Server, model: str, keep: bool) -> None:
    fields = {"text_input": "Stop", "max_tokens": 16, "stop_words": ["STOP"], "include_stop_words_in_output": keep}
    expected = " alpha beta STOP" if keep else " alpha beta "
    assert all_ways(table_server, model, **fields) == {expected}
    if not keep:
        assert not any("S" in chunk for chunk in table_server.chunks(model, **fields))


@pytest.mark.parametrize("model", ENTRY)
def test_finish_and_stop_reasons_are_told_when_asked_for(table_server: Server, model: str) -> None:
    asked = {"return_finish_reason": True, "return_stop_reason": True, "exclude_input_in_output": True}
    cases = [
        ({"text_input": "Stop", "max_tokens": 16, "stop_words": ["STOP"]}, "stop", "STOP"),
        ({"text_input": "Count", "max_tokens": 16}, "stop", ""),
        ({"text_input": "Long", "max_tokens": 5}, "length", ""),
    ]
    for fields, finish, stop in cases:
        for stream in (False, True):
            responses = grpc_all(table_server.grpc, model, stream=stream, **asked, **fields)
            told = [r.outputs for r in responses if "finish_reason" in r.outputs]
            assert told[-1]["finish_reason"].reshape(-1)[0].decode() == finish, (fields, stream)
            assert told[-1]["stop_reason"].reshape(-1)[0].decode() == stop
    _, body = table_server.generate(model, text_input="Count", max_tokens=3)
    assert "finish_reason" not in body and "stop_reason" not in body


@pytest.mark.parametrize("model", ENTRY)
def test_stop_words_however_they_are_written(table_server: Server, model: str) -> None:
    whole = " alpha beta STOP tail"
    off = {"include_stop_words_in_output": False}
    for words in ("", [""], []):
        assert table_server.text(model, text_input="Stop", max_tokens=16, stop_words=words, **off) == whole
    assert table_server.text(model, text_input="Stop", max_tokens=16, **off) == whole
    for words, prompt, expected in (
        ("STOP", "Stop", " alpha beta "),
        (["STOP"], "Stop", " alpha beta "),
        (["beta", "STOP"], "Stop", " alpha "),
        (["", "STOP"], "Stop", " alpha beta "),
        (["\n"], "Lines", " row"),
        ([","], "List", " x1"),
        (["x1, y1"], "List", " "),
    ):
        assert all_ways(table_server, model, text_input=prompt, max_tokens=16, stop_words=words, **off) == {expected}


@pytest.mark.parametrize("model", ENTRY)
def test_a_bad_word_is_blocked_in_all_its_spellings(table_server: Server, model: str) -> None:
    fields = {"text_input": "Bad", "max_tokens": 4}
    assert table_server.text(model, **fields) == " London"
    assert all_ways(table_server, model, **fields, bad_words=["London"]) == {" one"}
    assert all_ways(table_server, model, **fields, bad_words=[" London"]) == {"London"}
    assert all_ways(table_server, model, **fields, bad_words=["London", "one"]) != {" one"}


@pytest.mark.parametrize("model", ENTRY)
def test_min_length_holds_the_end_back(table_server: Server, model: str) -> None:
    for name in ("min_length", "min_tokens"):
        text = table_server.text(model, text_input="Count", max_tokens=16, **{name: 8})
        assert text == " 1 2 3 4 5 end more more"


@pytest.mark.parametrize("model", ENTRY)
def test_an_end_id_of_the_request_replaces_the_models(
    table_server: Server, model: str, table_ids: dict[str, int]
) -> None:
    fields = {"text_input": "Count", "max_tokens": 16}
    assert table_server.text(model, **fields, end_id=table_ids[" 4"]) == " 1 2 3"
    assert len(table_server.text(model, text_input="User", max_tokens=3, end_id=1_048_576)) == 0
    assert table_server.text(model, text_input="Special", max_tokens=8) == " hi!"


def test_every_end_id_of_the_generation_config_ends_a_text(variant_server: Server) -> None:
    for model in ENTRY:
        assert variant_server.text(model, text_input="Special", max_tokens=8) == " hi"
        texts = at_once([lambda m=model: variant_server.text(m, text_input="Special", max_tokens=8)] * 8)
        assert set(texts) == {" hi"}


@pytest.mark.parametrize("model", ENTRY)
def test_embedding_bias_makes_a_word_vanish(table_server: Server, model: str) -> None:
    fields = {"embedding_bias_words": [" red"], "embedding_bias_weights": [-20.0]}
    assert table_server.text(model, text_input="Pick", max_tokens=1, **fields) == " green"
