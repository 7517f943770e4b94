"""The pieces of many requests in one response: the engine's side, the BLS's side, and the text between them."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backend_engine.core.request import FinishReason
from backend_engine.errors import InvalidRequestError, StepFailedError
from backend_engine.triton_io.bls_flow import BlsFlow
from backend_engine.triton_io.engine_request import NextPieceRequest, StopRequest
from backend_engine.triton_io.error_codes import ModelCallError
from backend_engine.triton_io.piece_inbox import PieceInbox, PiecesLostError, Tensors
from backend_engine.triton_io.piece_text import entry, from_text, to_text
from backend_engine.triton_io.reply import Reply
from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_pb_utils import ResponseSender, TritonError
from tests.adapters.porch import Porch, finals
from tests.adapters.test_bls import Models, parameters, piece, text, texts, view
from tests.support.waiting import eventually


def submit(porch: Porch, client_id: str, **options: Any) -> ResponseSender:
    made: dict[str, Any] = {"streaming": True, "piecewise": True, "detokenize": True, "piece_group": "g"}
    return porch.submit(frozenset({"text_output", "more", "error"}), client_id=client_id, **made | options)


def ask(porch: Porch, group: str = "g") -> ResponseSender:
    sender = ResponseSender()
    porch.thread.next_piece(NextPieceRequest(group), Reply(pb_utils, sender))
    return sender


def pieces(sender: ResponseSender) -> list[tuple[str, dict[str, np.ndarray]]]:
    assert eventually(lambda: sender.is_final)
    assert finals(sender) == len(sender.log) == 1
    return from_text(sender.responses[0].arrays()["pieces"].item())


def begin(porch: Porch, *client_ids: str) -> None:
    for number, client_id in enumerate(client_ids, 1):
        first = submit(porch, client_id)
        porch.llm.say(number, 5)
        assert eventually(lambda first=first: first.is_final), "the first piece answers the request itself"


def test_pieces_keep_types_shapes_and_numbers_bit_for_bit() -> None:
    tensors = {
        "text_output": text('é "\n\u2028🦙'), "cum_log_probs": np.array([[-0.1]], np.float32),
        "output_log_probs": np.array([[[-1e-30, -3.3333333]]], np.float32), "more": np.array([[True]]),
        "none": np.zeros((1, 1, 0), np.int32), "first_token_time_ns": np.array([[2**62 + 1]], np.int64),
    }  # fmt: skip
    (name, back), (other, empty) = from_text(to_text([entry("a", tensors), entry("b", {})]))
    assert (name, other, empty) == ("a", "b", {}) and list(back) == list(tensors)
    for key, values in tensors.items():
        assert back[key].dtype == values.dtype and back[key].shape == values.shape, key
        assert back[key].tolist() == values.tolist(), key


def test_what_a_step_gives_to_many_streams_leaves_in_one_response() -> None:
    porch = Porch()
    porch.thread.start()
    begin(porch, "a", "b", "c")
    waiting = ask(porch)
    with pytest.raises(InvalidRequestError, match="being waited for"):
        ask(porch)
    porch.llm.say(3, 6)
    ((one, tensors),) = pieces(waiting)
    assert one == "c" and set(tensors) == {"text_output", "more"}, "only what was asked for"
    for number in (1, 2, 3):
        porch.llm.say(number, 7)
        porch.llm.end(number, token_ids=[8])
    time.sleep(0.05)
    last = pieces(ask(porch))
    assert [(one, tensors["text_output"].item(), tensors["more"].item()) for one, tensors in last] == [
        ("a", b" w7 w8", False), ("b", b" w7 w8", False), ("c", b" w7 w8", False)
    ], "what nobody asked for in time comes together"  # fmt: skip
    assert eventually(lambda: not porch.thread._groups and not porch.thread._live)
    with pytest.raises(InvalidRequestError, match="no piecewise request"):
        ask(porch)
    porch.thread.close()


def test_an_error_and_a_stop_reach_their_request_and_no_other(porch: Porch) -> None:
    begin(porch, "a", "b", "c")
    waiting = ask(porch)
    porch.llm.end(2, FinishReason.ERROR, error=StepFailedError("no"))
    ((one, tensors),) = pieces(waiting)
    assert (one, tensors["error"].item(), tensors["more"].item()) == ("b", b"no", False)
    assert porch.thread.stop(StopRequest("c")) == 1
    assert porch.llm.cancelled == [3]
    ((one, tensors),) = pieces(ask(porch))
    assert (one, tensors["more"].item()) == ("c", False)
    assert list(porch.thread._groups) == ["g"], "a is still running"


def test_pieces_that_cannot_be_sent_end_with_an_error_for_who_waits(porch: Porch) -> None:
    begin(porch, "a")
    waiting = ask(porch)
    waiting.fail_next = 1
    porch.llm.say(1, 6)
    assert eventually(lambda: waiting.is_final)
    assert waiting.responses[-1].error().code() == TritonError.INTERNAL
    porch.llm.end(1, token_ids=[7])
    assert pieces(ask(porch))[0][1]["text_output"].item() == b" w7", "the next call is served"


def test_a_group_that_nobody_asks_is_given_up_and_one_that_waits_is_not() -> None:
    porch = Porch()
    porch.thread.ABANDONED_AFTER_S = 0.05  # type: ignore[misc]
    porch.thread.start()
    begin(porch, "a")
    waiting = ask(porch)
    time.sleep(0.1)
    assert not porch.llm.cancelled, "somebody waits"
    porch.llm.say(1, 6)
    assert len(pieces(waiting)) == 1
    assert eventually(lambda: porch.llm.cancelled == [1] and not porch.thread._groups)
    porch.thread.close()


def test_closing_the_engine_answers_who_waits(porch: Porch) -> None:
    begin(porch, "a")
    waiting = ask(porch)
    porch.thread.close()
    assert finals(waiting) == 1 and waiting.responses[-1].error().code() == TritonError.UNAVAILABLE


class Engine:
    """What the inbox fetches: each item is one answer, or an error."""

    def __init__(self, *answers: list[tuple[str, dict[str, np.ndarray]]] | Exception) -> None:
        self.answers = iter(answers)
        self.num_calls = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, group_id: str) -> Iterator[Tensors]:
        self.num_calls += 1
        assert self.may_answer.wait(10)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        yield {"pieces": np.array([[to_text(entry(*one) for one in answer)]], np.object_)}


def said(value: str, more: bool) -> dict[str, np.ndarray]:
    return {"text_output": text(value), "more": np.array([[more]])}


def test_pieces_that_come_before_the_first_one_was_taken_keep_their_order() -> None:
    engine = Engine(
        [("a", said("1", True)), ("b", said("x", True))], [("b", said("y", False)), ("a", said("2", False))]
    )
    inbox, taken = PieceInbox(engine), []
    with inbox.box("a", lambda t: taken.append(t["text_output"].item())) as a, inbox.box("b", lambda _: None) as b:
        inbox.wait("a", a)
        assert taken == [b"1", b"2"] and engine.num_calls == 2
        inbox.wait("b", b)  # its pieces are there already: nothing is fetched, and nothing hangs
    inbox.close()
    assert engine.num_calls == 2


@pytest.mark.parametrize("error", [ModelCallError("UNAVAILABLE", "the model is not ready"), KeyError("pieces")])
def test_lost_pieces_end_every_request_that_waits_and_the_next_one_works(error: Exception) -> None:
    inbox = PieceInbox(Engine(error, [("b", said("1", False))]))
    if isinstance(error, KeyError):
        threading.excepthook, old = (lambda _: None), threading.excepthook
    try:
        with inbox.box("a", lambda _: None) as box, pytest.raises(PiecesLostError) as caught:
            inbox.wait("a", box)
        assert caught.value.code == ("UNAVAILABLE" if isinstance(error, ModelCallError) else "INTERNAL")
        taken: list[Tensors] = []
        with inbox.box("b", taken.append) as box:
            inbox.wait("b", box)
        assert len(taken) == 1
        inbox.close()
    finally:
        if isinstance(error, KeyError):
            threading.excepthook = old


def test_a_request_whose_pieces_are_lost_is_stopped() -> None:
    models = Models(piece(" 1"), piece(" 2"))
    models.during = lambda request_id, index: (
        (_ for _ in ()).throw(ModelCallError("INTERNAL", "gone")) if index else None
    )
    flow = BlsFlow(models, parameters())
    with pytest.raises(PiecesLostError, match="gone"):
        flow.run(view(stream=np.array([[True]])), "inner", lambda: False, lambda _: None)
    flow.close()
    assert models.stopped == ["inner"]


def test_a_request_for_logits_makes_a_call_a_piece() -> None:
    responses: list[dict[str, np.ndarray]] = []
    models = Models(piece(" 1"), piece(" 2"), piece(" 3"))
    flow = BlsFlow(models, parameters())
    flow.run(view(return_generation_logits=np.array([[True]])), "inner", lambda: False, responses.append)
    flow.close()
    assert texts(responses) == [" 1", " 2", " 3"] and not models.groups
    assert {request_id for _, _, request_id in models.calls} == {"inner"}
