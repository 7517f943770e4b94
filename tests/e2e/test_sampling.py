"""Sampling, seeds and log probabilities through a real server."""

import math

import pytest

from tests.support.client import Server, at_once, grpc_all

pytestmark = pytest.mark.triton
ENTRY = ["ensemble", "tensorrt_llm_bls"]
PICKS = {"text_input": "Pick", "max_tokens": 15, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.mark.parametrize("model", ENTRY)
def test_log_probabilities_are_the_models(table_server: Server, model: str) -> None:
    status, body = table_server.generate(model, text_input="Pick", max_tokens=1, return_log_probs=True)
    assert status == 200
    assert body["output_log_probs"] == pytest.approx(math.log(0.5), abs=1e-4)
    assert body["cum_log_probs"] == pytest.approx(math.log(0.5), abs=1e-4)
    _, body = table_server.generate(model, text_input="Pick", max_tokens=5, return_log_probs=True)
    assert body["cum_log_probs"] == pytest.approx(3 * math.log(0.5), abs=1e-4)
    assert len(body["output_log_probs"]) == 5
    response = grpc_all(table_server.grpc, model, text_input="Pick", max_tokens=5, return_log_probs=True)[0]
    assert response.outputs["output_log_probs"].shape == (1, 1, 5)
    assert response.outputs["cum_log_probs"].shape == (1, 1)


@pytest.mark.parametrize("model", ENTRY)
def test_log_probabilities_of_blocked_tokens_are_finite(table_server: Server, model: str) -> None:
    _, body = table_server.generate(
        model, text_input="Bad", max_tokens=3, bad_words=["London", "one"], return_log_probs=True
    )
    values = body["output_log_probs"]
    assert all(-100 <= value <= 0 for value in (values if isinstance(values, list) else [values]))


@pytest.mark.parametrize("model", ENTRY)
def test_streamed_log_probabilities_add_up(table_server: Server, model: str) -> None:
    responses = grpc_all(table_server.grpc, model, text_input="Pick", max_tokens=6, stream=True, return_log_probs=True)
    pieces = [r.outputs["output_log_probs"].reshape(-1) for r in responses if "output_log_probs" in r.outputs]
    values = [float(v) for piece in pieces for v in piece]
    assert len(values) == 6 and sum(values) == pytest.approx(3 * math.log(0.5), abs=1e-4)


@pytest.mark.parametrize("model", ENTRY)
def test_a_seed_gives_the_same_text_whatever_else_runs(table_server: Server, model: str) -> None:
    alone = table_server.text(model, **PICKS, random_seed=7)
    assert table_server.text(model, **PICKS, seed=7) == alone
    calls = [lambda: table_server.text(model, **PICKS)] * 7 + [lambda: table_server.text(model, **PICKS, random_seed=7)]
    assert at_once(calls)[-1] == alone


@pytest.mark.parametrize("model", ENTRY)
def test_seeds_differ_and_do_not_depend_on_neighbours(table_server: Server, model: str) -> None:
    one_by_one = [table_server.text(model, **PICKS, random_seed=seed) for seed in range(1, 21)]
    together = at_once([lambda s=seed: table_server.text(model, **PICKS, random_seed=s) for seed in range(1, 21)])
    assert together == one_by_one and len(set(one_by_one)) >= 15
    assert len({table_server.text(model, **PICKS) for _ in range(10)}) >= 2


@pytest.mark.parametrize("model", ENTRY)
def test_both_spellings_of_a_seed_must_agree(table_server: Server, model: str) -> None:
    status, body = table_server.generate(model, **PICKS, random_seed=7, seed=8)
    assert status != 200 and "seed" in body["error"]


@pytest.mark.parametrize("model", ENTRY)
def test_temperature_zero_and_top_k_one_are_greedy(table_server: Server, model: str) -> None:
    greedy = " redPick redPick red"
    fields = {"text_input": "Pick", "max_tokens": 5}
    for sampling in (
        {}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 40, "top_p": 0.9, "random_seed": 3},
        {"temperature": 100.0, "top_k": 1}, {"top_k": 0, "top_p": 0.0},
    ):  # fmt: skip
        assert table_server.text(model, **fields, **sampling) == greedy, sampling


BAD = [
    ("temperature", -1.0), ("top_p", 1.5), ("top_k", -5), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
    ("min_length", -1), ("beam_width", 5),
]  # fmt: skip


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize(("field", "value"), BAD)
def test_what_is_out_of_range_is_refused_by_name(table_server: Server, model: str, field: str, value: float) -> None:
    request = {"text_input": "Pick", "max_tokens": 5, field: value}
    status, body = table_server.generate(model, **request)
    named = "beam width" if field == "beam_width" else field
    assert 400 <= status < 500 and named in body["error"] and "Traceback" not in body["error"]
    first = next(iter(table_server.events(model, **request)))
    assert named in first["error"]
    assert named in (grpc_all(table_server.grpc, model, **request)[0].error or "")
    assert table_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(table_server: Server, model: str, field: str, value: float) -> None:
    request = {"text_input": "Pick", "max_tokens": 5, field: value}
    assert field in (grpc_all(table_server.grpc, model, **request)[0].error or "")
    assert table_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"


@pytest.mark.parametrize("model", ENTRY)
def test_penalties_reach_the_engine(table_server: Server, model: str) -> None:
    fields = {"text_input": "Pick", "max_tokens": 5}
    assert table_server.text(model, **fields, presence_penalty=1.0) == " redPick greenPick blue"
