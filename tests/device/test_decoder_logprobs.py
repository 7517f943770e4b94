"""Log probabilities: of the model's own distribution, for those who asked, always finite."""

import json
import math
from typing import Any

import pytest
import torch

from backend_engine.core.outputs import LOGPROB_FLOOR, TokenLogprobs
from backend_engine.decoder.decoder import Decoder
from tests.support.decoding import decode, log_probabilities, make_request


def entry_of(logits: torch.Tensor, **params: Any) -> TokenLogprobs:
    output = decode(Decoder(len(logits), "cpu"), logits.unsqueeze(0), [make_request(**params)])
    assert output.logprobs is not None
    entry = output.logprobs[0]
    assert entry is not None
    assert entry.token_id == output.token_ids[0]
    return entry


def test_nobody_asked() -> None:
    assert decode(Decoder(4, "cpu"), torch.zeros(2, 4), [make_request(1), make_request(2)]).logprobs is None


def test_only_rows_that_asked_get_them() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 4
    asked = [None, 0, 3, None, 50]
    requests = [make_request(i, logprobs=k, temperature=1.0, seed=i) for i, k in enumerate(asked)]
    output = decode(Decoder(50, "cpu"), logits, requests)
    expected = logits.log_softmax(-1)
    assert output.logprobs is not None
    assert len(output.logprobs) == 5
    for row, (k, token) in enumerate(zip(asked, output.token_ids, strict=True)):
        entry = output.logprobs[row]
        if k is None:
            assert entry is None
            continue
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-6)
        order = expected[row].sort(descending=True)
        assert order.indices[entry.rank - 1] == token
        assert [i for i, _ in entry.top] == order.indices[:k].tolist()
        assert [p for _, p in entry.top] == pytest.approx(order.values[:k].tolist(), abs=1e-6)


def test_known_values() -> None:
    entry = entry_of(log_probabilities(0.25, 0.5, 0.125, 0.125), logprobs=2)
    assert entry.logprob == pytest.approx(-0.693147, abs=1e-6)
    assert entry.rank == 1
    assert entry.top == ((1, pytest.approx(math.log(0.5))), (0, pytest.approx(math.log(0.25))))


@pytest.mark.parametrize(
    "params",
    [
        {"bad_token_ids": [[1]]},
        {"end_ids": {1}, "min_output_tokens": 1},
        {"repetition_penalty": 1e6, "prompt": [1], "bad_token_ids": [[1]]},
        {"temperature": 1e-6, "bad_token_ids": [[1]]},
        {"top_k": 2, "top_p": 0.01, "bad_token_ids": [[1]]},
    ],
)
def test_masks_penalties_and_truncation_do_not_show(params: dict[str, Any]) -> None:
    entry = entry_of(log_probabilities(0.3, 0.5, 0.2), logprobs=3, **params)
    assert entry.token_id == 0
    assert entry.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert entry.rank == 2
    assert [i for i, _ in entry.top] == [1, 0, 2]


def test_k_beyond_the_vocabulary_is_clamped() -> None:
    assert [i for i, _ in entry_of(log_probabilities(0.2, 0.5, 0.3), logprobs=1000).top] == [1, 2, 0]


def test_equal_logits_share_a_rank_and_come_by_rising_id() -> None:
    entry = entry_of(torch.tensor([1.0, 2.0, 2.0, 2.0]), logprobs=3, bad_token_ids=[[1]])
    assert (entry.token_id, entry.rank) == (2, 1)
    assert [i for i, _ in entry.top] == [1, 2, 3]


def test_floor_and_strict_json() -> None:
    """-inf and NaN never leave the decoder."""
    for line in ([0.0, -1e9, -torch.inf], [torch.nan, 0.0, 1.0], [-torch.inf] * 3, [torch.inf, 0.0, 1.0]):
        entry = entry_of(torch.tensor(line), logprobs=3)
        values = [entry.logprob, *(value for _, value in entry.top)]
        assert json.loads(json.dumps(values, allow_nan=False)) == values
        assert all(LOGPROB_FLOOR <= value <= 0 for value in values)
    assert [p for _, p in entry_of(torch.tensor([0.0, -1e9, -torch.inf]), logprobs=3).top] == [0.0, -100.0, -100.0]


def test_bfloat16_logits_are_taken_in_float32() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)).bfloat16()
    entry = entry_of(logits, logprobs=5)
    expected = logits.float().log_softmax(-1)
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-6)
    assert [p for _, p in entry.top] == pytest.approx(expected.sort(descending=True).values[:5].tolist(), abs=1e-6)
