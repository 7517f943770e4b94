"""The way back: coalescing, exactly one final flag, errors with their class, cancellation, drain and shutdown."""

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from backend_engine.core.request import FinishReason
from backend_engine.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OutOfCapacityError,
    ShutdownError,
    StepFailedError,
)
from backend_engine.triton_io.engine_request import (
    NextPieceRequest,
    StopRequest,
)
from backend_engine.triton_io.reply import Reply
from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_pb_utils import ResponseSender, TritonError
from tests.adapters.porch import Porch, finals, ids
from tests.support.waiting import eventually


def test_a_stream_sends_deltas_and_its_last_response_is_final(porch: Porch) -> None:
    sender = porch.submit(streaming=True, return_finish_reason=True, return_stop_reason=True)
    porch.llm.say(1, 5)
    assert eventually(lambda: len(sender.log) == 1)
    porch.llm.end(1, FinishReason.STOP, token_ids=[6], stop_reason="STOP")
    assert eventually(lambda: sender.is_final)
    first, last = (response.arrays() for response in sender.responses)
    assert first["output_ids"].tolist() == [[[5]]] and first["sequence_length"].tolist() == [[1]]
    assert "finish_reason" not in first and "text_output" not in first
    assert last["output_ids"].tolist() == [[[6]]]
    assert (last["finish_reason"].tolist(), last["stop_reason"].tolist()) == ([[b"stop"]], [[b"STOP"]])
    assert finals(sender) == 1


@pytest.mark.parametrize(
    ("exclude", "shown", "text"), [(False, [1, 2, 5, 6, 7], " w1 w2 w5 w6 w7"), (True, [5, 6, 7], " w5 w6 w7")]
)
def test_without_streaming_there_is_one_response_with_all_of_it(
    porch: Porch, exclude: bool, shown: list[int], text: str
) -> None:
    sender = porch.submit(
        exclude_input=exclude, detokenize=True, return_num_input_tokens=True, return_num_output_tokens=True
    )
    porch.llm.say(1, 5)
    porch.llm.say(1, 6)
    porch.llm.end(1, FinishReason.LENGTH, token_ids=[7])
    assert eventually(lambda: sender.is_final)
    (response,) = (r.arrays() for r in sender.responses)
    assert response["output_ids"].tolist() == [[shown]] and response["sequence_length"].tolist() == [[len(shown)]]
    assert response["text_output"].tolist() == [[text.encode()]]
    assert response["num_input_tokens"].tolist() == [[2]] and response["num_output_tokens"].tolist() == [[len(shown)]]
    assert list(response)[:2] == ["output_ids", "sequence_length"], "clients read the first output by its place"


def test_late_tokens_travel_together() -> None:
    porch = Porch()
    sender = porch.submit(streaming=True, detokenize=True, return_log_probs=True)
    for token_id in (5, 6, 7):
        porch.llm.say(1, token_id, logprob=-0.5)
    porch.thread.start()
    assert eventually(lambda: len(sender.log) == 1)
    arrays = sender.responses[0].arrays()
    assert arrays["output_ids"].tolist() == [[[5, 6, 7]]] and arrays["text_output"].tolist() == [[b" w5 w6 w7"]]
    assert arrays["output_log_probs"].tolist() == [[[-0.5, -0.5, -0.5]]] and arrays["cum_log_probs"].tolist() == [
        [-1.5]
    ]
    porch.llm.say(1, 8, logprob=-1000.0)
    porch.llm.end(1)
    porch.thread.close()
    assert ids(sender) == [5, 6, 7, 8] and finals(sender) == 1
    assert sender.responses[1].arrays()["cum_log_probs"].tolist() == [[-101.5]], "floored and added up"


def test_the_engine_is_never_held_up_by_a_client(porch: Porch) -> None:
    gate = threading.Event()
    sender = porch.submit(streaming=True)
    send = sender.send
    sender.send = lambda *a, **k: (gate.wait(10), send(*a, **k))[1]  # type: ignore[method-assign]
    for token_id in range(100):
        porch.llm.say(1, token_id)
    porch.llm.end(1)
    assert not sender.log
    gate.set()
    assert eventually(lambda: sender.is_final)
    assert ids(sender) == list(range(100)) and finals(sender) == 1


def test_outputs_that_nobody_asked_for_are_not_sent(porch: Porch) -> None:
    sender = porch.submit(frozenset({"output_ids"}), streaming=True, return_finish_reason=True)
    porch.llm.end(1, token_ids=[5])
    assert eventually(lambda: sender.is_final)
    assert list(sender.responses[0].arrays()) == ["output_ids"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("no"), TritonError.INVALID_ARG),
        (OutOfCapacityError("no"), TritonError.UNAVAILABLE),
        (ShutdownError("no"), TritonError.UNAVAILABLE),
        (DeadlineExceededError("no"), TritonError.UNAVAILABLE),
        (StepFailedError("no"), TritonError.INTERNAL),
    ],
)
@pytest.mark.parametrize("when", ["at submit", "first", "late"])
@pytest.mark.parametrize("streaming", [True, False])
def test_an_error_is_the_final_response_and_keeps_its_class(
    porch: Porch, error: EngineError, code: int, when: str, streaming: bool
) -> None:
    porch.llm.refusal = error if when == "at submit" else None
    sender = porch.submit(streaming=streaming)
    if when == "late":
        porch.llm.say(1, 5)
        assert not streaming or eventually(lambda: len(sender.log) == 1)
    if when != "at submit":
        porch.llm.end(1, FinishReason.ERROR, error=error)
    assert eventually(lambda: sender.is_final)
    assert finals(sender) == 1 and len(sender.log) == (2 if when == "late" and streaming else 1)
    assert (sender.responses[-1].error().code(), sender.responses[-1].error().message()) == (code, "no")


def test_tokens_that_are_unsent_when_an_error_comes_are_sent_before_it() -> None:
    porch = Porch()
    sender = porch.submit(streaming=True)
    for token_id in (5, 6):
        porch.llm.say(1, token_id)
    porch.llm.end(1, FinishReason.ERROR, error=StepFailedError("no"))
    porch.thread.start()
    assert eventually(lambda: sender.is_final)
    porch.thread.close()
    assert sender.responses[0].arrays()["output_ids"].tolist() == [[[5, 6]]]
    assert sender.responses[1].error().message() == "no" and finals(sender) == 1


def test_a_piecewise_stream_gives_one_final_response_a_request(porch: Porch) -> None:
    senders = [porch.submit(streaming=True, piecewise=True, client_id="a", detokenize=True)]

    def ask() -> ResponseSender:
        senders.append(ResponseSender())
        porch.thread.next_piece(NextPieceRequest("a"), Reply(pb_utils, senders[-1]))
        return senders[-1]

    porch.llm.say(1, 5)
    assert eventually(lambda: senders[0].is_final)
    porch.llm.say(1, 6)
    porch.llm.say(1, 7)
    time.sleep(0.02)
    assert eventually(lambda sender=ask(): sender.is_final), "what was unsent comes at once"
    waiting = ask()
    with pytest.raises(InvalidRequestError, match="being waited for"):
        ask()
    assert not waiting.log
    porch.llm.end(1, token_ids=[8])
    assert eventually(lambda: waiting.is_final)
    answers = [sender.responses[0].arrays() for sender in senders if sender.log]
    assert [answer["text_output"].tolist() for answer in answers] == [[[b" w5"]], [[b" w6 w7"]], [[b" w8"]]]
    assert [bool(answer["more"].item()) for answer in answers] == [True, True, False]
    assert all(len(sender.log) == 1 and finals(sender) == 1 for sender in senders if sender.log)
    assert eventually(lambda: not porch.thread._piecewise)
    with pytest.raises(InvalidRequestError, match="no piecewise request"):
        ask()


def test_a_piecewise_stream_keeps_an_error_for_the_next_request() -> None:
    porch = Porch()
    first = porch.submit(streaming=True, piecewise=True, client_id="a", errors_in_band=True)
    porch.llm.say(1, 5)
    porch.llm.end(1, FinishReason.ERROR, error=StepFailedError("no"))
    porch.thread.start()
    assert eventually(lambda: first.is_final)
    assert first.responses[0].arrays()["more"].item()
    second = ResponseSender()
    porch.thread.next_piece(NextPieceRequest("a"), Reply(pb_utils, second))
    assert eventually(lambda: second.is_final)
    assert second.responses[0].arrays()["error"].tolist() == [[b"no"]]
    porch.thread.close()


def test_a_piecewise_stream_that_nobody_asks_for_is_given_up() -> None:
    porch = Porch()
    porch.thread.ABANDONED_AFTER_S = 0.05  # type: ignore[misc]
    porch.thread.start()
    sender = porch.submit(streaming=True, piecewise=True, client_id="a")
    time.sleep(0.1)
    assert not porch.llm.cancelled, "somebody waits"
    porch.llm.say(1, 5)
    assert eventually(lambda: sender.is_final)
    assert eventually(lambda: porch.llm.cancelled == [1] and not porch.thread._piecewise)
    porch.thread.close()


@pytest.mark.parametrize("failures", [1, 3])
def test_a_piece_that_cannot_be_sent_ends_its_request(porch: Porch, failures: int) -> None:
    sender = porch.submit(streaming=True, piecewise=True, client_id="a")
    sender.fail_next = failures
    porch.llm.say(1, 5)
    assert eventually(lambda: porch.llm.cancelled == [1])
    assert finals(sender) == (1 if failures < 3 else 0)
    assert eventually(lambda: not porch.thread._piecewise)


@pytest.mark.parametrize("late", [True, False])
def test_our_own_models_get_errors_in_band(porch: Porch, late: bool) -> None:
    sender = porch.submit(streaming=True, errors_in_band=True, return_finish_reason=True)
    if late:
        porch.llm.say(1, 5)
    porch.llm.end(1, FinishReason.ERROR, error=StepFailedError("step\nfailed"))
    assert eventually(lambda: sender.is_final)
    last = sender.responses[-1]
    assert not last.has_error() and last.arrays()["output_ids"].shape == (1, 1, 0)
    assert last.arrays()["error"].tolist() == [[b"step failed"]] and last.arrays()["error_code"].tolist() == [
        [b"INTERNAL"]
    ]
    assert last.arrays()["finish_reason"].tolist() == [[b"error"]]


@pytest.mark.parametrize("tokens", [[], [5]])
def test_a_timeout_with_tokens_and_a_stop_are_ordinary_ends(porch: Porch, tokens: list[int]) -> None:
    sender = porch.submit(streaming=True, return_finish_reason=True)
    porch.llm.end(1, FinishReason.TIMEOUT, token_ids=tokens)
    assert eventually(lambda: sender.is_final)
    assert ids(sender) == tokens and sender.responses[-1].arrays()["finish_reason"].tolist() == [[b"timeout"]]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("silent", [True, False])
def test_a_client_that_leaves_ends_its_request(porch: Porch, streaming: bool, silent: bool) -> None:
    sender, other = porch.submit(streaming=streaming), porch.submit(streaming=True)
    if not silent:
        porch.llm.say(1, 5)
    sender.client_is_gone = True
    assert eventually(lambda: sender.is_final)
    assert porch.llm.cancelled[0] == 1 and finals(sender) == 1
    assert sender.responses[-1].error().code() == TritonError.CANCELLED
    porch.llm.say(2, 6)
    porch.llm.end(2)
    assert eventually(lambda: other.is_final) and ids(other) == [6]


def test_polling_is_bounded_and_reaches_everybody() -> None:
    porch = Porch(max_polls=2, cancellation_check_period_ms=20)
    senders = [porch.submit(streaming=True) for _ in range(7)]
    porch.thread.start()
    time.sleep(0.03)
    assert sum(sender.num_polls for sender in senders) <= 6
    assert eventually(lambda: all(sender.num_polls for sender in senders))
    for request_id in range(1, 8):
        porch.llm.end(request_id)
    porch.thread.close()
    assert all(finals(sender) == 1 for sender in senders)


def test_a_stop_request_ends_all_with_its_id_and_no_other(porch: Porch) -> None:
    mine = [porch.submit(streaming=True, client_id="a", return_finish_reason=True) for _ in range(2)]
    other = porch.submit(streaming=True, client_id="b")
    assert porch.thread.stop(StopRequest("a")) == 2
    assert eventually(lambda: all(sender.is_final for sender in mine))
    assert all(sender.responses[-1].arrays()["finish_reason"].tolist() == [[b"cancelled"]] for sender in mine)
    assert porch.thread.stop(StopRequest("unknown")) == 0
    assert porch.llm.cancelled == [1, 2] and not other.is_final


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_send_that_fails_ends_its_request_alone(porch: Porch, failures: int) -> None:
    broken, other = porch.submit(streaming=True), porch.submit(streaming=True)
    broken.fail_next = failures
    porch.llm.say(1, 5)
    porch.llm.say(2, 6)
    assert eventually(lambda: porch.llm.cancelled == [1])
    assert finals(broken) == (1 if failures < 3 else 0), "told once that it is over, if that can be said at all"
    porch.llm.end(2)
    assert eventually(lambda: other.is_final) and ids(other) == [6]


def test_closing_ends_what_is_unfinished() -> None:
    porch = Porch()
    porch.thread.start()
    streaming, waiting = porch.submit(streaming=True), porch.submit()
    porch.llm.say(1, 5)
    porch.thread.close()
    assert ids(ResponseSenderView(streaming)) == [5]
    assert [finals(sender) for sender in (streaming, waiting)] == [1, 1]
    assert waiting.responses[-1].error().code() == TritonError.UNAVAILABLE


class ResponseSenderView(ResponseSender):
    """A sender's good responses only."""

    def __init__(self, sender: ResponseSender) -> None:
        super().__init__()
        self.log = [(r, f) for r, f in sender.log if r is not None and not r.has_error()]


def test_no_sender_outlives_the_model() -> None:
    """Triton Server's objects crash its process when they are freed after it has shut its side down."""
    porch = Porch()
    porch.thread.start()
    senders = [porch.submit(streaming=True) for _ in range(3)] + [porch.submit(streaming=True, piecewise=True)]
    porch.llm.end(1)
    porch.llm.say(4, 5)
    assert eventually(lambda: senders[0].is_final and senders[3].is_final)
    porch.llm.sinks.clear()
    porch.thread.close()
    left = [weakref.ref(sender) for sender in senders]
    senders.clear()
    gc.collect()
    assert [ref() for ref in left] == [None] * 4


def test_the_drain_file_ends_everybody_and_says_so(tmp_path: Path) -> None:
    drain = tmp_path / "drain"
    porch = Porch(drain_file=str(drain))
    porch.thread.start()
    sender = porch.submit(streaming=True, return_finish_reason=True)
    time.sleep(0.03)
    assert not sender.log and not Path(f"{drain}.done").exists()
    drain.touch()
    assert eventually(Path(f"{drain}.done").exists)
    assert sender.responses[-1].arrays()["finish_reason"].tolist() == [[b"cancelled"]]
    late = porch.submit(streaming=True)
    assert eventually(lambda: late.is_final)
    assert late.responses[-1].error().code() == TritonError.UNAVAILABLE
    assert "shutting down" in late.responses[-1].error().message()
    porch.thread.close()


def test_metrics_are_updated_on_time_also_when_nothing_runs() -> None:
    porch = Porch(stats_check_period_ms=5)
    porch.thread.start()
    assert eventually(lambda: porch.num_updates >= 3)
    porch.thread.close()


def test_a_thousand_requests_from_many_threads_all_end_once() -> None:
    porch = Porch()
    porch.thread.start()
    senders = [porch.submit(streaming=index % 2 == 0, client_id=str(index % 7)) for index in range(1000)]
    rng = np.random.default_rng(0)

    def engine(offset: int) -> None:
        for request_id in range(1 + offset, 1001, 4):
            for token_id in range(int(rng.integers(0, 4))):
                porch.llm.say(request_id, token_id)
            porch.llm.end(request_id)

    threads = [threading.Thread(target=engine, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: all(sender.is_final for sender in senders))
    porch.thread.close()
    assert {finals(sender) for sender in senders} == {1}
