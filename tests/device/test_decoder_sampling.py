"""Draws: frequencies, exact sets, seeds, and every row against a plain-Python reference."""

import dataclasses
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from backend_engine.decoder.decoder import Decoder
from backend_engine.decoder.ranking import greedy, ranked
from backend_engine.decoder.sampling import SamplingGroup, sample
from backend_engine.decoder.uniform import stream_keys, uniforms
from tests.support.decoding import (
    append,
    decode,
    decode_alone,
    log_probabilities,
    make_request,
    reference_kept,
    reference_token,
)

PROBABILITIES = (0.02, 0.35, 0.08, 0.25, 0.05, 0.15, 0.1, 0.0)


def draws(logits: torch.Tensor, num_draws: int, **params: Any) -> Counter[int]:
    """Tokens of ``num_draws`` requests with seeds 0, 1, ... at one and the same row."""
    requests = [make_request(i, seed=i, **params) for i in range(num_draws)]
    return Counter(decode(Decoder(len(logits), "cpu"), logits.expand(num_draws, -1), requests).token_ids)


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    num_draws = sum(counts.values())
    return sum((counts[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in expected.items())


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 1.0}, {1, 3, 5, 6, 2, 4, 0}),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, {1, 3, 5, 6, 2, 4, 0}),
        ({"temperature": 0.5}, {1, 3, 5, 6, 2, 4, 0}),
        ({"temperature": 3.0}, {1, 3, 5, 6, 2, 4, 0}),
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_p": 0.75}, {1, 3, 5}),  # exactly their mass
        ({"top_p": 0.76}, {1, 3, 5, 6}),
        ({"top_p": 0.35}, {1}),
        ({"temperature": 1.0, "min_p": 0.25 / 0.35}, {1, 3}),  # exactly the ratio
        ({"temperature": 1.0, "min_p": 0.2}, {1, 3, 5, 6, 2}),
        ({"temperature": 1.0, "min_p": 1.0}, {1}),
        ({"top_k": 4, "top_p": 0.7}, {1, 3}),  # a share of the top-k's mass, 0.6 / 0.85
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.5}, {1, 3}),
        ({"temperature": 2.0, "top_k": 100}, {1, 3, 5, 6, 2, 4, 0}),
        ({"temperature": 100.0}, {1, 3, 5, 6, 2, 4, 0}),
    ],
)
def test_frequencies(params: dict[str, Any], kept: set[int]) -> None:
    """Every kept token is drawn as often as its share says, and no other ever."""
    logits = log_probabilities(*PROBABILITIES)
    counts = draws(logits, 6000, **params)
    expected = reference_kept(logits.tolist(), make_request(**params).sampling_params)
    assert set(expected) == kept
    assert set(counts) <= kept
    # 40 is beyond the 0.9999 quantile for 7 degrees of freedom (29.9); a wrong distribution gives hundreds.
    assert chi_square(counts, expected) < 40


def test_one_request_draws_independently_over_its_tokens() -> None:
    logits = log_probabilities(*PROBABILITIES)
    decoder, request = Decoder(8, "cpu"), make_request(seed=7, temperature=1.0)
    counts: Counter[int] = Counter()
    pairs: Counter[int] = Counter()
    previous = None
    for _ in range(4000):
        token = decode(decoder, logits.unsqueeze(0), [request]).token_ids[0]
        append(request, token)
        counts[token] += 1
        if previous is not None:
            pairs[8 * previous + token] += 1
        previous = token
    single = {i: p for i, p in enumerate(PROBABILITIES) if p}
    assert chi_square(counts, single) < 40
    joint = {8 * i + j: p * q for i, p in single.items() for j, q in single.items()}
    assert chi_square(pairs, joint) < 110  # 48 degrees of freedom; 0.9999 quantile 93


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.6}, {0, 1}),
        ({"temperature": 1.0, "min_p": 0.4}, {0, 1, 2, 4}),
        ({"temperature": 1.0, "min_p": 0.6}, {0}),
    ],
)
def test_equal_logits_are_kept_by_rising_id(params: dict[str, Any], expected: set[int]) -> None:
    counts = draws(log_probabilities(0.4, 0.2, 0.2, 0.0, 0.2), 400, **params)
    assert set(counts) == expected


def test_uniform_logits_keep_exactly_k() -> None:
    assert set(draws(torch.zeros(50), 400, top_k=5)) == {0, 1, 2, 3, 4}
    assert set(draws(torch.zeros(10), 2000, temperature=1.0)) == set(range(10))


@pytest.mark.parametrize("vocab_size", [1, 5, 300, 5000])
@pytest.mark.parametrize("step", [0.0, 0.25, 8.0])
def test_ranked_is_a_total_order(vocab_size: int, step: float) -> None:
    """Against a sort by (-logit, id), with many equal logits, at any width; -0.0 equals 0.0."""
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits *= 3
    if step:
        logits = (logits / step).round() * step
    logits[3, vocab_size // 2 :] = -torch.inf
    for width in sorted({1, min(7, vocab_size), min(256, vocab_size), vocab_size // 2 + 1, vocab_size}):
        values, ids = ranked(logits, width)
        for row in range(4):
            line = logits[row].tolist()
            assert ids[row].tolist() == sorted(range(vocab_size), key=lambda i: (-line[i], i))[:width]
        assert torch.equal(values, logits.gather(1, ids))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -9.0, -1.0, -1.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert greedy(logits.to(dtype)).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.9}, True),
        ({"top_k": 1}, True),
        ({"top_k": 1, "temperature": 100.0, "top_p": 0.9}, True),
        ({"top_k": 0}, True),
        ({"top_p": 0.0}, True),
        ({"top_p": -1.0, "top_k": 0}, True),
        ({"temperature": 1.0}, False),
        ({"top_k": 2}, False),
        ({"top_p": 1.0}, False),
        ({"top_p": 0.99}, False),
    ],
)
def test_greedy_rules(params: dict[str, Any], is_greedy: bool) -> None:
    seen = set(draws(log_probabilities(0.3, 0.4, 0.3), 200, **params))
    assert seen == {1} if is_greedy else len(seen) >= 2


def test_tiny_temperature_is_the_likeliest() -> None:
    logits = torch.tensor([80.0, 85.0, -1000.0, 84.999])
    for temperature in (1e-6, 1e-30, 5e-324):
        for params in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
            assert set(draws(logits, 50, temperature=temperature, **params)) == {1}


def test_huge_temperature_is_uniform() -> None:
    for params in ({}, {"top_k": 4}, {"top_p": 0.9999}):
        counts = draws(torch.tensor([50.0, 0.0, -50.0, 7.0]), 2000, temperature=1e300, **params)
        assert chi_square(counts, dict.fromkeys(range(4), 0.25)) < 25


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.999}, {"top_k": 300, "top_p": 0.95}]
)
def test_extreme_numbers_pick_tokens_with_probability(params: dict[str, Any]) -> None:
    """A number of 0 and the largest below 1 stay within the tokens that have a probability."""
    vocab_size = 600
    logits = torch.full((2, vocab_size), -torch.inf)
    logits[:, 100:103] = log_probabilities(0.7, 0.2, 0.1)
    request = make_request(**params).sampling_params
    has_top_k = request.top_k is not None
    group = SamplingGroup(
        temperature=torch.ones((2, 1), dtype=torch.float64),
        top_k=torch.full((2, 1), request.top_k or vocab_size),
        top_p=torch.full((2, 1), request.top_p or math.inf, dtype=torch.float64),
        min_p=torch.zeros((2, 1), dtype=torch.float64),
        is_whole=not has_top_k and request.top_p is None,
        width=3 if request.top_k == 3 else 0,
        has_min_p=False,
    )
    numbers = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(logits, group, numbers).tolist() == [100, 102]


@pytest.mark.parametrize("case", range(60))
def test_bounds_that_are_met_exactly_are_met(case: int) -> None:
    """top_p equal to the mass of the first n tokens keeps n, min_p equal to a ratio keeps it, despite rounding.

    With falling probabilities and a number just below 1 the last kept token is drawn.
    """
    rng = random.Random(case)
    shares = sorted((rng.uniform(0.1, 1.0) for _ in range(8)), reverse=True)
    probabilities = [share / sum(shares) for share in shares]
    num_kept = rng.randint(1, 7)
    logits = log_probabilities(*probabilities).unsqueeze(0)
    mass, ratio = sum(probabilities[:num_kept]), probabilities[num_kept - 1] / probabilities[0]
    number = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for top_k, top_p, min_p in ((8, mass, 0.0), (8, math.inf, ratio), (num_kept, math.inf, 0.0)):
        group = SamplingGroup(
            temperature=torch.ones((1, 1), dtype=torch.float64),
            top_k=torch.tensor([[top_k]]),
            top_p=torch.tensor([[top_p]], dtype=torch.float64),
            min_p=torch.tensor([[min_p]], dtype=torch.float64),
            is_whole=min_p > 0,
            width=top_k if top_k < 8 else 0,
            has_min_p=min_p > 0,
        )
        assert sample(logits, group, number).item() == num_kept - 1
        ranked_group = dataclasses.replace(group, is_whole=False, width=8)
        assert sample(logits, ranked_group, number).item() == num_kept - 1


def test_numbers_are_a_fixed_function_of_seed_and_index() -> None:
    """These values are the product's promise that a seed gives the same text after an upgrade."""
    keys = stream_keys([0, 7, 2**64 - 1])
    numbers = [uniforms(keys, [index] * 3).tolist() for index in (0, 1, 1000)]
    assert uniforms(keys[1:2], [1000])[0] == numbers[2][1]
    assert all(0 <= number < 1 for row in numbers for number in row)
    assert len({number for row in numbers for number in row}) == 9
    assert numbers[0] == [0.6524484863740322, 0.7215081806049702, 0.3662420901697574]


def test_numbers_are_uniform_over_seeds_and_indices() -> None:
    by_seed = uniforms(stream_keys(range(20_000)), [0] * 20_000)
    by_index = uniforms(np.repeat(stream_keys([3]), 20_000), range(20_000))
    diagonal = uniforms(stream_keys(range(20_000)), range(20_000, 0, -1))
    for numbers in (by_seed, by_index, diagonal):
        counts = Counter((numbers * 50).astype(int).tolist())
        assert chi_square(counts, dict.fromkeys(range(50), 0.02)) < 110
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_seeds_make_different_texts_and_equal_seeds_equal_ones() -> None:
    logits = log_probabilities(0.5, 0.5)
    texts = []
    for seed in (*range(1, 21), 5):
        request, decoder = make_request(seed=seed, temperature=1.0), Decoder(2, "cpu")
        for _ in range(15):
            append(request, decode(decoder, logits.unsqueeze(0), [request]).token_ids[0])
        texts.append(tuple(request.output_token_ids))
    assert len(set(texts[:20])) >= 15
    assert texts[20] == texts[4]


def random_request(rng: random.Random, request_id: int, vocab_size: int) -> Any:
    """A request that uses a random few of all features."""

    def maybe(value: Any, otherwise: Any = None, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else otherwise

    def token() -> int:
        return rng.randrange(vocab_size + 3)  # now and then outside the vocabulary

    bias = np.zeros(vocab_size, np.float32)
    bias[[rng.randrange(vocab_size) for _ in range(3)]] = rng.choice([-20.0, 4.0])
    words = [[token() for _ in range(rng.choice([1, 1, 2, 3]))] for _ in range(4)]
    return make_request(
        request_id,
        prompt=[token() for _ in range(rng.randint(1, 30))],
        output=[token() for _ in range(rng.choice([0, 1, 25]))],
        seed=rng.randrange(2**64),
        end_ids={token(), token(), 1048576},
        min_output_tokens=rng.choice([0, 0, 2, 26]),
        temperature=maybe(rng.choice([0.0, 1e-6, 0.3, 1.0, 2.5])),
        top_k=maybe(rng.choice([0, 1, 2, 5, 50, 257, 100_000])),
        top_p=maybe(rng.choice([0.0, 1e-9, 0.3, 0.9, 0.999, 1.0])),
        top_p_decay=maybe(rng.choice([0.5, 0.9, 1.0]), None, 0.3),
        top_p_min=maybe(rng.choice([0.0, 0.2, 1.0])),
        top_p_reset_ids=maybe(rng.choice([-1, token()])),
        min_p=maybe(rng.choice([0.01, 0.3, 1.0]), 0.0, 0.2),
        repetition_penalty=maybe(rng.choice([0.5, 1.3]), 1.0),
        presence_penalty=maybe(rng.choice([-0.7, 1.5]), 0.0),
        frequency_penalty=maybe(rng.choice([-0.2, 0.9]), 0.0),
        bad_token_ids=maybe(words),
        embedding_bias=maybe(bias),
    )


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(rng.randrange(2**32)))
    logits *= rng.choice([0.5, 3.0])
    if rng.random() < 0.3:
        logits = (logits * 4).round() / 4  # many equal logits
    return logits.bfloat16() if rng.random() < 0.3 else logits


@pytest.mark.parametrize("case", range(40))
def test_rows_match_the_reference(case: int) -> None:
    """Random batches of random requests over several steps with changing composition, each row checked by itself."""
    rng = random.Random(case)
    vocab_size = rng.choice([2, 17, 300, 300, 6000])
    decoder = Decoder(vocab_size, "cpu")
    requests = [random_request(rng, i, vocab_size) for i in range(rng.randint(1, 8))]
    for step in range(4):
        logits = random_logits(rng, len(requests), vocab_size)
        kept = logits.clone()
        tokens = decode(decoder, logits, requests).token_ids
        assert torch.equal(logits, kept), "the decoder changed its input"
        raw = logits.float().tolist()
        assert tokens == [reference_token(row, request) for row, request in zip(raw, requests, strict=True)]
        for request, token in zip(requests, tokens, strict=True):
            append(request, token)
        if step == 1:
            rng.shuffle(requests)
        if step == 2 and len(requests) > 1:
            decoder.remove(requests.pop().request_id)
            requests.append(random_request(rng, 99, vocab_size))


def test_wide_nuclei_and_large_top_k() -> None:
    """Sets beyond each of the widths that are tried in turn, in one batch."""
    vocab_size = 9000
    choices: list[dict[str, Any]] = [
        {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 300}, {"top_k": 5000},
        {"top_k": 8999, "top_p": 0.99}, {"top_k": 300, "top_p": 0.5}, {"top_k": 5000, "top_p": 0.2, "min_p": 0.01},
        {"top_p": 0.95, "temperature": 0.1},
    ]  # fmt: skip
    requests = [make_request(i, seed=i, **choices[i % len(choices)]) for i in range(3 * len(choices))]
    logits = torch.randn(len(requests), vocab_size, generator=torch.Generator().manual_seed(1))
    tokens = decode(Decoder(vocab_size, "cpu"), logits, requests).token_ids
    raw = logits.tolist()
    assert tokens == [reference_token(row, request) for row, request in zip(raw, requests, strict=True)]


def test_rows_do_not_depend_on_the_batch() -> None:
    """A row alone, among others, in any order, and without Python's own randomness: the same token."""
    rng = random.Random(5)
    vocab_size = 3000
    requests = [random_request(rng, i, vocab_size) for i in range(24)]
    logits = (torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(2)) * 8).round() / 4
    together = decode(Decoder(vocab_size, "cpu"), logits, requests).token_ids
    assert together == [decode_alone(row, request) for row, request in zip(logits, requests, strict=True)]
    order = list(range(24))
    for _ in range(5):
        rng.shuffle(order)
        part = order[: rng.randint(2, 24)]
        tokens = decode(Decoder(vocab_size, "cpu"), logits[part], [requests[i] for i in part]).token_ids
        assert tokens == [together[i] for i in part]


def test_broken_rows_still_give_an_id_and_leave_the_others_alone() -> None:
    good = log_probabilities(0.1, 0.5, 0.3, 0.1)
    infinite = torch.tensor([0.0, torch.inf, torch.inf, 0.0])
    broken = [torch.full((4,), torch.nan), torch.full((4,), -torch.inf), infinite]
    for params in ({}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5, "temperature": 2.0}):
        requests = [make_request(i, seed=i, logprobs=2, **params) for i in range(4)]
        output = decode(Decoder(4, "cpu"), torch.stack([*broken, good]), requests)
        assert all(0 <= token < 4 for token in output.token_ids)
        assert output.token_ids[2] in (1, 2)
        assert output.token_ids[3] == decode_alone(good, requests[3])
        assert output.logprobs is not None
        for entry in output.logprobs:
            assert entry is not None
            assert all(-100 <= value <= 0 for value in (entry.logprob, *(value for _, value in entry.top)))


def test_top_p_decays_to_its_least_and_is_reset_by_a_token() -> None:
    """Eight equally likely tokens: a top_p of p keeps the first ceil(8 p) of them."""
    logits = torch.zeros(2000, 8)
    asked = {"temperature": 1.0, "top_p": 1.0, "top_p_decay": 0.5, "top_p_min": 0.2, "top_p_reset_ids": 7}
    for output, num_kept in (([], 8), ([0], 4), ([0, 0], 2), ([0, 0, 0], 2), ([0, 0, 0, 7], 8), ([7, 1], 4)):
        requests = [make_request(i, output=output, seed=i, **asked) for i in range(2000)]
        tokens = decode(Decoder(8, "cpu"), logits, requests).token_ids
        assert set(tokens) == set(range(num_kept)), output


def test_a_batch_that_stays_together_decays_step_by_step() -> None:
    logits = torch.zeros(300, 8)
    requests = [make_request(i, seed=i, temperature=1.0, top_p_decay=0.5) for i in range(300)]
    decoder = Decoder(8, "cpu")
    for num_kept in (8, 4, 2, 1):
        tokens = decode(decoder, logits, requests).token_ids
        assert set(tokens) == set(range(num_kept))
        for request in requests:
            append(request, 0)
