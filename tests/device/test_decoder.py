"""The decoder as the executor sees it: handles, state per request, changing batches, pauses."""

import random
from typing import Any

import pytest
import torch

from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.core.request import LlmRequest
from backend_engine.decoder import decoder as decoder_module
from backend_engine.decoder.decoder import Decoder
from backend_engine.decoder.sampling_batch import SamplingBatch
from backend_engine.ops.step_logits import StepLogits
from tests.support.decoding import append, decode, make_request, step_of

MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"top_k": 5, "repetition_penalty": 1.3},
    {"top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"bad_token_ids": [[3], [4, 5]], "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.05, "bad_token_ids": [[1, 2]]},
]


def text_logits(request: LlmRequest, vocab_size: int) -> torch.Tensor:
    """A model whose logits are a function of the text alone."""
    text = tuple(request.prompt_token_ids + request.output_token_ids)
    generator = torch.Generator().manual_seed(hash(text) % 2**31)
    return torch.randn(vocab_size, generator=generator) * 2


def run_alone(request: LlmRequest, num_tokens: int, vocab_size: int) -> list[int]:
    decoder = Decoder(vocab_size, "cpu")
    for _ in range(num_tokens):
        logits = text_logits(request, vocab_size).unsqueeze(0)
        append(request, decode(decoder, logits, [request]).token_ids[0])
    return request.output_token_ids


def mixed_request(request_id: int) -> LlmRequest:
    params = MIXED[request_id % len(MIXED)]
    return make_request(request_id, prompt=[request_id % 7, 3, 4], seed=request_id, **params)


def test_output_is_aligned_with_logits_rows() -> None:
    """Rows that need no logits have none; context rows come first."""
    requests = [make_request(i, prompt=[0, 1, 2, 3]) for i in range(4)]
    chunk = ScheduledRequest(requests[0], 0, 2, False)
    whole = ScheduledRequest(requests[1], 0, 4, True)
    rows = tuple(ScheduledRequest(request, 3, 1, True) for request in requests[2:])
    output = SchedulerOutput(5, (chunk, whole), rows)
    logits = torch.eye(3, 6).flip(1)
    handle = Decoder(6, "cpu").decode_async(StepLogits(logits), output)
    assert handle.wait().token_ids == [5, 4, 3]
    assert handle.wait() == handle.wait()


def test_a_step_without_logits_rows() -> None:
    output = SchedulerOutput(0, (ScheduledRequest(make_request(prompt=[1, 2]), 0, 1, False),), ())
    result = Decoder(6, "cpu").decode_async(StepLogits(torch.empty(0, 6)), output).wait()
    assert (result.token_ids, result.logprobs) == ([], None)


@pytest.mark.parametrize("shape", [(1, 6), (2, 5), (2, 7)])
def test_logits_of_another_shape_are_a_bug(shape: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match=rf"\[{shape[0]}, {shape[1]}\]"):
        Decoder(6, "cpu").decode_async(StepLogits(torch.zeros(shape)), step_of([make_request(1), make_request(2)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_stay_as_they_are_in_any_type(dtype: torch.dtype) -> None:
    vocab_size = 40
    exact = (torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    logits = exact.to(dtype)
    kept = logits.clone()
    tokens = decode(Decoder(vocab_size, "cpu"), logits, [mixed_request(i) for i in range(12)]).token_ids
    assert torch.equal(logits, kept)
    assert tokens == decode(Decoder(vocab_size, "cpu"), exact.float(), [mixed_request(i) for i in range(12)]).token_ids


def test_logits_made_in_inference_mode_or_as_a_view() -> None:
    """What a model engine hands over: an inference tensor, or some columns of a padded matrix."""
    requests = [mixed_request(i) for i in range(6)]
    with torch.inference_mode():
        padded = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    expected = decode(Decoder(50, "cpu"), padded[:, :50].clone(), requests).token_ids
    decoder = Decoder(50, "cpu")
    for _ in range(2):
        assert decode(decoder, padded[:, :50], requests).token_ids == expected


def test_text_is_the_same_whatever_comes_and_goes() -> None:
    """Requests of all kinds arrive, end and change places at random; each one's text is as if it ran alone."""
    vocab_size, num_tokens, rng = 60, 12, random.Random(3)
    expected = {i: run_alone(mixed_request(i), num_tokens, vocab_size) for i in range(30)}
    decoder = Decoder(vocab_size, "cpu")
    waiting = [mixed_request(i) for i in range(30)]
    running: list[LlmRequest] = []
    finished = 0
    while waiting or running:
        while waiting and len(running) < 7 and rng.random() < 0.6:
            running.append(waiting.pop())
        if rng.random() < 0.3:
            rng.shuffle(running)
        rows = [request for request in running if rng.random() < 0.9]  # the others sit this step out
        if not rows:
            continue
        logits = torch.stack([text_logits(request, vocab_size) for request in rows])
        for request, token in zip(rows, decode(decoder, logits, rows).token_ids, strict=True):
            append(request, token)
            if len(request.output_token_ids) == num_tokens:
                assert request.output_token_ids == expected[request.request_id]
                running.remove(request)
                decoder.remove(request.request_id)
                finished += 1
    assert finished == 30


@pytest.mark.parametrize("kind", range(len(MIXED)))
@pytest.mark.parametrize("forget", [False, True])
def test_text_is_the_same_after_a_pause(kind: int, forget: bool) -> None:
    """A paused request keeps its output; whether the decoder kept or lost its state makes no difference."""
    vocab_size = 60
    expected = run_alone(mixed_request(kind), 20, vocab_size)
    decoder, request, other = Decoder(vocab_size, "cpu"), mixed_request(kind), mixed_request(kind + 6)
    for step in range(20):
        if step == 9:
            request.pause()
            if forget:
                decoder.remove(request.request_id)
            decode(decoder, torch.zeros(1, vocab_size), [other])  # the others go on meanwhile
        logits = text_logits(request, vocab_size).expand(2, -1)
        append(request, decode(decoder, logits, [request, other]).token_ids[0])
    assert request.output_token_ids == expected


def test_a_failed_step_can_be_repeated() -> None:
    """Tokens that were never appended leave no trace."""
    request, decoder = mixed_request(2), Decoder(60, "cpu")
    logits = text_logits(request, 60).unsqueeze(0)
    tokens = {decode(decoder, logits, [request]).token_ids[0] for _ in range(5)}
    assert len(tokens) == 1


def test_remove_is_idempotent_and_ids_may_come_again() -> None:
    decoder = Decoder(4, "cpu")
    decoder.remove(77)
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    for bad, expected in ((0, 1), (3, 0)):
        request = make_request(7, bad_token_ids=[[bad]])
        assert decode(decoder, logits, [request]).token_ids == [expected]
        decoder.remove(7)
        decoder.remove(7)
    assert decode(decoder, logits, [make_request(7)]).token_ids == [0]
    assert decode(decoder, logits, [make_request(7, bad_token_ids=[[0]])]).token_ids == [1]


def test_batch_tensors_are_made_only_when_the_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class CountedBatch(SamplingBatch):
        def __init__(self, samplings: Any, *rest: Any) -> None:
            built.append(len(samplings))
            super().__init__(samplings, *rest)

    monkeypatch.setattr(decoder_module, "SamplingBatch", CountedBatch)
    decoder = Decoder(40, "cpu")
    built.clear()
    requests = [mixed_request(i) for i in range(12)]
    requests.append(make_request(99, end_ids={1}, min_output_tokens=3))

    def step(rows: list[LlmRequest]) -> None:
        tokens = decode(decoder, torch.zeros(len(rows), 40), rows).token_ids
        for request, token in zip(rows, tokens, strict=True):
            append(request, token)

    for _ in range(3):
        step(requests)
    assert built == [13]
    step(requests)  # the last one has reached its minimum length
    assert built == [13, 13]
    for _ in range(5):
        step(requests)
    assert built == [13, 13]
    step(requests[::-1])
    step(requests[:5])
    assert built == [13, 13, 13, 5]
