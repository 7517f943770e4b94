"""``finish_reason`` on ids: end ids, stop sequences, length, and which of them wins."""

from collections.abc import Iterable, Sequence

import pytest

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.request import FinishReason, LlmRequest, StopConditions
from backend_engine.executor.stop_criteria import Finish, finish_reason

END = Finish(FinishReason.STOP, None, keep_token=False)
SEQUENCE = Finish(FinishReason.STOP, None, keep_token=True)
LENGTH = Finish(FinishReason.LENGTH, None, keep_token=True)


def make_request(
    output: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (1, 2, 3),
    end_ids: Iterable[int] = (),
    sequences: tuple[tuple[int, ...], ...] = (),
    max_output_tokens: int = 100,
    min_output_tokens: int = 0,
) -> LlmRequest:
    stop = StopConditions(max_output_tokens, min_output_tokens, frozenset(end_ids), sequences)
    request = LlmRequest(1, list(prompt), SamplingParams(), stop, lambda _: None)
    request.output_token_ids.extend(output)
    return request


def test_goes_on() -> None:
    request = make_request([5, 6], end_ids={9}, sequences=((8, 8),))
    assert finish_reason(request, 7) is None
    assert request.output_token_ids == [5, 6]


@pytest.mark.parametrize(("num_output", "expected"), [(0, None), (2, None), (3, END), (4, END)])
def test_end_id_waits_for_the_minimum_without_it(num_output: int, expected: Finish | None) -> None:
    request = make_request([5] * num_output, end_ids={9, 1048576}, min_output_tokens=3)
    assert finish_reason(request, 9) == expected


def test_end_id_as_first_token() -> None:
    assert finish_reason(make_request(end_ids={9}), 9) == END


@pytest.mark.parametrize(
    ("output", "token", "sequences", "expected"),
    [
        ([5], 6, ((5, 6),), SEQUENCE),
        ([4, 5], 6, ((7,), (5, 6)), SEQUENCE),
        ([5, 5], 6, ((5, 6, 6), (4, 6)), None),
        ([], 6, ((6,),), Finish(FinishReason.STOP, 6, keep_token=True)),
        ([], 6, ((3, 6),), None),  # a prompt's end does not count
        ([6], 6, ((3, 6, 6), (6, 6, 6)), None),  # longer than the output
        ([5, 6, 7], 6, ((5, 6),), None),  # was complete before, is not now
    ],
)
def test_stop_sequences(
    output: list[int], token: int, sequences: tuple[tuple[int, ...], ...], expected: Finish | None
) -> None:
    assert finish_reason(make_request(output, sequences=sequences), token) == expected


@pytest.mark.parametrize(("output", "expected"), [([5], None), ([4, 5], SEQUENCE), ([4, 4, 5], SEQUENCE)])
def test_stop_sequence_waits_for_the_minimum_with_it(output: list[int], expected: Finish | None) -> None:
    assert finish_reason(make_request(output, sequences=((5, 6),), min_output_tokens=3), 6) == expected


@pytest.mark.parametrize(("num_output", "expected"), [(0, None), (1, None), (2, LENGTH), (3, LENGTH)])
def test_length(num_output: int, expected: Finish | None) -> None:
    assert finish_reason(make_request([5] * num_output, max_output_tokens=3), 6) == expected


def test_a_stop_wins_over_the_length() -> None:
    request = make_request([5, 5], end_ids={9}, sequences=((5, 6),), max_output_tokens=3)
    assert finish_reason(request, 9) == END
    assert finish_reason(request, 6) == SEQUENCE
    assert finish_reason(request, 7) == LENGTH


def test_an_end_id_held_back_by_the_minimum_still_counts_towards_the_length() -> None:
    assert finish_reason(make_request([5], end_ids={9}, min_output_tokens=2, max_output_tokens=2), 9) == LENGTH
