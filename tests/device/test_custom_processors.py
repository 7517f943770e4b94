"""Logits processors of plugins in the decoder: each row is its own request's affair."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backend_engine.core.protocols import NamedProcessor
from backend_engine.core.request import LlmRequest
from backend_engine.decoder.custom_processors import CustomLogitsProcessor
from backend_engine.decoder.decoder import Decoder
from backend_engine.errors import StepFailedError
from tests.support.decoding import append, decode, decode_alone, make_request

VOCAB = 40


class Calling(CustomLogitsProcessor):
    """Does what a function says."""

    def __init__(self, arguments: Mapping[str, Any], vocab_size: int) -> None:
        self._change: Callable[[Tensor, Sequence[int], Sequence[int]], None] = arguments["change"]

    def apply(self, logits: Tensor, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        self._change(logits, prompt_token_ids, output_token_ids)


def request_with(
    *changes: Callable[[Tensor, Sequence[int], Sequence[int]], None], request_id: int = 1, **params: Any
) -> LlmRequest:
    request = make_request(request_id, **params)
    request.logits_processors = tuple(
        NamedProcessor(f"processor {i}", Calling({"change": change}, VOCAB)) for i, change in enumerate(changes)
    )
    return request


def prefer(token_id: int) -> Callable[[Tensor, Sequence[int], Sequence[int]], None]:
    def change(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        logits[token_id] += 100

    return change


def test_a_processor_sees_its_own_row_and_tokens_and_is_called_for_each_token() -> None:
    seen: list[tuple[Any, ...]] = []

    def note(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        seen.append((tuple(logits.shape), logits.dtype, logits[0].item(), prompt, output))
        logits[7] = 50

    request, others = request_with(note, prompt=(3, 4)), [make_request(i) for i in (2, 3)]
    decoder = Decoder(VOCAB, "cpu")
    logits = torch.zeros(3, VOCAB, dtype=torch.bfloat16)
    logits[:, 9], logits[1, 0] = 3, 2
    before = logits.clone()
    for _ in range(2):
        ids = decode(decoder, logits, [others[0], request, others[1]]).token_ids
        assert ids == [9, 7, 9] and torch.equal(logits, before)
        append(request, 7)
    shape = ((VOCAB,), torch.float32, 2.0, (3, 4))
    assert seen == [(*shape, ()), (*shape, (7,))]


def test_processors_run_in_order_and_before_what_the_request_forbids() -> None:
    def double(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        logits.mul_(2)

    logits = torch.zeros(VOCAB)
    logits[1], logits[2] = 60, 0
    assert decode_alone(logits, request_with(prefer(2), double)) == 2
    assert decode_alone(logits, request_with(double, prefer(2))) == 1
    assert decode_alone(logits, request_with(prefer(2), bad_token_ids=[[2]])) == 1
    bias = np.zeros(VOCAB, np.float32)
    bias[5] = 500
    assert decode_alone(logits, request_with(prefer(2), embedding_bias=bias)) == 5
    assert decode_alone(logits, request_with(prefer(2), end_ids=[2], min_output_tokens=1)) == 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_odd_numbers_stay_in_bounds(sampling: dict[str, Any]) -> None:
    def spoil(value: float) -> Callable[[Tensor, Sequence[int], Sequence[int]], None]:
        def change(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
            logits[:] = value

        return change

    def infinite_at_six(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        logits[6], logits[1] = math.inf, math.nan

    logits = torch.zeros(VOCAB)
    logits[1] = 8
    for value in (math.nan, -math.inf):  # nothing is left: the model's own choice
        assert decode_alone(logits, request_with(spoil(value), **sampling)) == 1
    assert decode_alone(logits, request_with(infinite_at_six, **sampling)) == 6


def test_the_other_rows_have_the_same_tokens_with_and_without_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, VOCAB, generator=generator) * 3
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"top_p": 0.7}, {"repetition_penalty": 1.5}]
    plain = [make_request(i, seed=i, **kinds[i % 4]) for i in range(12)]
    alone = [decode_alone(logits[i], request) for i, request in enumerate(plain)]
    mixed = [
        request_with(prefer(30), request_id=100 + i, seed=i, **kinds[i % 4]) if i % 3 == 0 else request
        for i, request in enumerate(plain)
    ]
    ids = decode(Decoder(VOCAB, "cpu"), logits, mixed).token_ids
    assert ids == [30 if i % 3 == 0 else token_id for i, token_id in enumerate(alone)]


def test_a_processor_that_fails_is_told_for_its_own_request_alone_and_for_that_step_alone() -> None:
    def fail(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        if not output:
            raise ValueError("no luck")

    request, other = request_with(prefer(3), fail, request_id=5), make_request(6)
    decoder, logits = Decoder(VOCAB, "cpu"), torch.zeros(2, VOCAB)
    logits[:, 4] = 1
    first = decode(decoder, logits, [request, other])
    assert first.token_ids[1] == 4 and list(first.failures) == [5]
    error = first.failures[5]
    assert isinstance(error, StepFailedError) and str(error) == "processor 1: it failed: ValueError: no luck"
    append(request, 3)
    assert decode(decoder, logits, [request, other]) == dataclasses.replace(first, token_ids=[3, 4], failures={})
