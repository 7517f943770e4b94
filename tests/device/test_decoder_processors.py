"""Embedding bias, bad words, min tokens and penalties, each with its effect on the chosen token or the logits."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from backend_engine.core.request import LlmRequest
from backend_engine.decoder.decoder import Decoder
from backend_engine.decoder.penalties import Penalties, TokenCounts
from tests.support.decoding import append, decode, decode_alone, make_request, reference_logits

CPU = torch.device("cpu")
FALLING = torch.tensor([5.0, 4.0, 3.0, 2.0])


def next_token(request: LlmRequest, logits: torch.Tensor = FALLING) -> int:
    """The token of one row, alone and as the last of a batch with plain, biased and sampled rows."""
    alone = decode_alone(logits, request)
    others = [
        make_request(1001),
        make_request(1002, embedding_bias=np.ones(len(logits), np.float32)),
        make_request(1003, temperature=2.0, repetition_penalty=1.5),
        request,
    ]
    assert decode(Decoder(len(logits), "cpu"), logits.expand(4, -1), others).token_ids[3] == alone
    return alone


def bias(values: dict[int, float], vocab_size: int = 4) -> np.ndarray:
    vector = np.zeros(vocab_size, np.float32)
    vector[list(values)] = list(values.values())
    return vector


@pytest.mark.parametrize(
    ("values", "expected"), [({}, 0), ({0: -1.5}, 1), ({3: 2.9}, 0), ({3: 3.1}, 3), ({0: -20, 1: -20}, 2)]
)
def test_embedding_bias(values: dict[int, float], expected: int) -> None:
    assert next_token(make_request(embedding_bias=bias(values))) == expected


def test_huge_bias_stays_finite() -> None:
    vector = np.array([-1e300, 0, 1e300, 1e300])
    for params in ({}, {"temperature": 1.0}, {"repetition_penalty": 1e-30}):
        assert next_token(make_request(embedding_bias=vector, prompt=[3], **params)) in (2, 3)


def test_bias_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(3, 4\)"):
        decode_alone(FALLING, make_request(embedding_bias=bias({}, 3)))


@pytest.mark.parametrize(
    ("words", "prompt", "output", "expected"),
    [
        ([[0]], [9], [], 1),
        ([[0], [1], [0]], [9], [], 2),
        ([[7, 0]], [9, 7], [], 1),  # begins in the prompt
        ([[7, 0]], [7], [9], 0),
        ([[7, 8, 0]], [7], [8], 1),  # begins in the prompt, goes on in the output
        ([[7, 8, 0]], [8], [7], 0),
        ([[6, 7, 8, 0]], [5], [6, 7, 8], 1),
        ([[6, 7, 8, 0]], [7], [8], 0),  # longer than the text
        ([[7, 8, 0], [8, 1], [9, 2]], [7], [8], 2),  # two words end alike
        ([[0, 0]], [0], [], 1),
        ([[4], [1048576], [0, 50256]], [0], [], 0),  # outside the vocabulary
        ([[1048576, 0]], [1048576], [], 1),  # only its beginning is
    ],
)
def test_bad_words(words: list[list[int]], prompt: list[int], output: list[int], expected: int) -> None:
    request = make_request(bad_token_ids=words, prompt=prompt, output=output)
    assert next_token(request) == expected


def test_bad_words_follow_the_text_step_by_step() -> None:
    decoder, request = Decoder(4, "cpu"), make_request(prompt=[3], bad_token_ids=[[0, 0], [1, 2]])
    for _ in range(4):
        append(request, decode(decoder, FALLING.unsqueeze(0), [request]).token_ids[0])
    assert request.output_token_ids == [0, 1, 0, 1]


def test_min_tokens_mask_end_ids_until_reached() -> None:
    """In a batch that does not change, so the mask must go by itself."""
    decoder = Decoder(4, "cpu")
    short = make_request(1, end_ids={0, 1, 1048576}, min_output_tokens=2)
    long = make_request(2, end_ids={0}, min_output_tokens=4, temperature=1e-6)
    free = make_request(3, end_ids={0})
    rows = [short, long, free]
    for _ in range(6):
        for request, token in zip(rows, decode(decoder, FALLING.expand(3, -1), rows).token_ids, strict=True):
            append(request, token)
    assert short.output_token_ids == [2, 2, 0, 0, 0, 0]
    assert long.output_token_ids == [1, 1, 1, 1, 0, 0]
    assert free.output_token_ids == [0] * 6


@pytest.mark.parametrize("end_id", [-1, 4, 50256, 1048576])
def test_end_ids_outside_the_vocabulary_mask_nothing(end_id: int) -> None:
    assert next_token(make_request(end_ids={end_id}, min_output_tokens=8)) == 0


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 1.0, "min_p": 0.5}]
)
def test_fully_masked_row_takes_the_likeliest_raw_logit(params: dict[str, Any]) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    by_words = make_request(bad_token_ids=[[0], [1], [2], [3]], logprobs=4, **params)
    by_both = make_request(bad_token_ids=[[0], [2], [3]], end_ids={1}, min_output_tokens=1, seed=3, **params)
    assert next_token(by_words, logits) == next_token(by_both, logits) == 1


@pytest.mark.parametrize("params", [{}, {"temperature": 9.0}, {"top_k": 2}, {"top_p": 0.99}])
def test_masked_tokens_are_never_chosen(params: dict[str, Any]) -> None:
    logits = torch.tensor([90.0, 1.0, 80.0, 0.5])
    requests = [make_request(i, seed=i, bad_token_ids=[[0], [2]], **params) for i in range(300)]
    assert set(decode(Decoder(4, "cpu"), logits.expand(300, -1), requests).token_ids) <= {1, 3}


@pytest.mark.parametrize(
    ("params", "prompt", "output", "logits", "expected"),
    [
        ({"repetition_penalty": 1.2}, [0], [], [5.0, 4.5, 0.0], 1),  # 5 / 1.2 < 4.5
        ({"repetition_penalty": 1.1}, [0], [], [5.0, 4.5, 0.0], 0),
        ({"repetition_penalty": 2.0}, [2], [0], [-1.0, -1.5, -9.0], 1),  # -1 * 2 < -1.5
        ({"repetition_penalty": 0.5}, [2], [1], [5.0, 3.0, 0.0], 1),  # 3 / 0.5 > 5
        ({"presence_penalty": 0.6}, [0], [], [5.0, 4.5, 0.0], 0),  # the prompt does not count
        ({"presence_penalty": 0.6}, [2], [0], [5.0, 4.5, 0.0], 1),
        ({"presence_penalty": 0.4}, [2], [0, 0, 0], [5.0, 4.5, 0.0], 0),  # once, however often
        ({"presence_penalty": -0.6}, [2], [1], [5.0, 4.5, 0.0], 1),
        ({"frequency_penalty": 0.2}, [0, 0, 0], [0, 0], [5.0, 4.5, 0.0], 0),
        ({"frequency_penalty": 0.2}, [2], [0, 0, 0], [5.0, 4.5, 0.0], 1),
    ],
)
def test_penalties(
    params: dict[str, Any], prompt: list[int], output: list[int], logits: list[float], expected: int
) -> None:
    request = make_request(prompt=prompt, output=output, **params)
    assert next_token(request, torch.tensor(logits)) == expected


@pytest.mark.parametrize("case", range(12))
def test_penalties_match_the_reference_logit_by_logit(case: int) -> None:
    """Random rows whose text grows by zero to three tokens a step, also past the room made at the start."""
    rng = random.Random(case)
    vocab_size = rng.choice([3, 40, 400])
    requests = [
        make_request(
            i,
            prompt=[rng.randrange(-1, vocab_size + 2) for _ in range(rng.randint(1, 40))],
            output=[rng.randrange(vocab_size) for _ in range(rng.choice([0, 20]))],
            repetition_penalty=rng.choice([1.0, 0.4, 1.7]),
            presence_penalty=rng.choice([0.0, 1.0, -2.0]),
            frequency_penalty=rng.choice([0.0, 0.3, -0.1]),
        )
        for i in range(4)
    ]
    counts = [TokenCounts(request, vocab_size) for request in requests]
    rows = list(zip((4, 0, 2, 1), requests, counts, strict=True))
    penalties = Penalties(rows, vocab_size, CPU)
    generator = torch.Generator().manual_seed(case)
    for _ in range(120):
        raw = torch.randn(5, vocab_size, generator=generator) * 5
        raw[:, 0] = -torch.inf
        logits = raw.clone()
        penalties.apply(logits)
        assert torch.equal(logits[3], raw[3])
        for row, request, _ in rows:
            expected = torch.tensor(reference_logits(raw[row].tolist(), request))
            torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)
            for _ in range(rng.randint(0, 3)):
                append(request, rng.randrange(-1, vocab_size + 1))
    rebuilt = torch.randn(5, vocab_size, generator=generator)
    grown = rebuilt.clone()
    penalties.apply(grown)
    Penalties(rows, vocab_size, CPU).apply(rebuilt)
    assert torch.equal(grown, rebuilt), "the result depends on when the batch was built"


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 1e300, "frequency_penalty": -1e300},
        {"presence_penalty": -1e300, "frequency_penalty": -1e300, "repetition_penalty": 1e-300},
    ],
)
def test_absurd_penalties_stay_finite(params: dict[str, Any]) -> None:
    request = make_request(prompt=[0, 1, 2], output=[1, 1, 2], **params)
    logits = torch.tensor([[3e38, -3e38, 0.0, -torch.inf]])
    Penalties([(0, request, TokenCounts(request, 4))], 4, CPU).apply(logits)
    assert logits[0, :3].isfinite().all()
    assert logits[0, 3] == -torch.inf


def test_order_masks_stay_masked_under_penalties() -> None:
    """A presence penalty below zero cannot bring a bad word back, nor can a bias."""
    request = make_request(
        output=[0, 1], bad_token_ids=[[0]], presence_penalty=-50.0, embedding_bias=bias({0: 100.0}), prompt=[3]
    )
    assert next_token(request) == 1
