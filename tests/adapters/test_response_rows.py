"""Requests of several rows and sequences on their way back: indices, one final flag, errors, pieces, cancellation."""

import pytest

from backend_engine.core.request import FinishReason
from backend_engine.errors import StepFailedError
from backend_engine.triton_io.engine_request import NextPieceRequest, StopRequest
from backend_engine.triton_io.reply import Reply
from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_pb_utils import ResponseSender
from tests.adapters.porch import Porch, finals
from tests.support.waiting import eventually


def places(sender: ResponseSender) -> list[tuple[int | None, int | None, list[int]]]:
    """Row, sequence and token ids of each good response."""
    found = []
    for response in sender.responses:
        arrays = response.arrays()
        row, sequence = arrays.get("batch_index"), arrays.get("sequence_index")
        assert all(index is None or index.shape == (1, 1) for index in (row, sequence))
        found.append(
            (None if row is None else row.item(), None if sequence is None else sequence.item(),
             arrays["output_ids"].reshape(-1).tolist())
        )  # fmt: skip
    return found


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_and_sequences_answer_for_themselves_and_the_last_one_is_final(porch: Porch, streaming: bool) -> None:
    sender = porch.submit_rows(1, 2, streaming=streaming, exclude_input=True)
    assert [s.sequence_index for s in porch.llm.submitted.values()] == [0, 0, 1]
    assert porch.llm.submitted[2].seed == porch.llm.submitted[3].seed != porch.llm.submitted[1].seed
    porch.llm.say(2, 5)
    porch.llm.end(3, token_ids=[6])
    assert eventually(lambda: len(sender.log) == (2 if streaming else 1))
    porch.llm.end(1, token_ids=[7])
    assert eventually(lambda: len(sender.log) == (3 if streaming else 2))
    assert not sender.is_final
    porch.llm.end(2, token_ids=[8])
    assert eventually(lambda: sender.is_final)
    first = [(1, 0, [5]), (1, 1, [6]), (0, None, [7]), (1, 0, [8])]
    assert places(sender) == (first if streaming else [(1, 1, [6]), (0, None, [7]), (1, 0, [5, 8])])
    assert finals(sender) == 1 and sender.log[-1][1] != 0


def test_indices_are_sent_only_where_there_are_several(porch: Porch) -> None:
    single = porch.submit_rows(1, streaming=True)
    twice = porch.submit_rows(2, streaming=True)
    for request_id in (1, 2, 3):
        porch.llm.end(request_id, token_ids=[request_id])
    assert eventually(lambda: single.is_final and twice.is_final)
    assert places(single) == [(None, None, [1])]
    assert places(twice) == [(None, 0, [2]), (None, 1, [3])]


@pytest.mark.parametrize("last", [True, False])
def test_an_error_of_one_row_leaves_the_others(porch: Porch, last: bool) -> None:
    sender = porch.submit_rows(1, 1, streaming=True)
    order = [(1, None), (2, StepFailedError("no"))] if last else [(2, StepFailedError("no")), (1, None)]
    for request_id, error in order:
        reason = FinishReason.ERROR if error else FinishReason.STOP
        porch.llm.end(request_id, reason, token_ids=[] if error else [5], error=error)
        assert eventually(lambda: not porch.llm.sinks or len(sender.log) == 1)
    assert eventually(lambda: sender.is_final)
    errors = [response.error().message() for response in sender.responses if response.has_error()]
    assert errors == ["row 1: no"] and len(sender.log) == 2 and finals(sender) == 1


def test_a_piecewise_request_of_several_rows_gives_all_its_pieces(porch: Porch) -> None:
    senders = [porch.submit_rows(1, 1, streaming=True, piecewise=True, client_id="a")]
    porch.llm.say(1, 5)
    porch.llm.say(2, 6)
    porch.llm.end(1, token_ids=[7])
    porch.llm.end(2, FinishReason.ERROR, error=StepFailedError("no"))
    assert eventually(lambda: senders[0].is_final)
    while senders[-1].responses[0].arrays()["more"].item():
        senders.append(ResponseSender())
        porch.thread.next_piece(NextPieceRequest("a"), Reply(pb_utils, senders[-1]))
        assert eventually(lambda: senders[-1].is_final)
    pieces = [place for sender in senders for place in places(sender)]
    assert {row: [i for r, _, ids in pieces if r == row for i in ids] for row in (0, 1)} == {0: [5, 7], 1: [6]}
    answers = [sender.responses[0].arrays() for sender in senders]
    errors = [answer["error"].item() for answer in answers if "error" in answer]
    assert errors == [b"row 1: no"]
    assert all(finals(sender) == 1 and len(sender.log) == 1 for sender in senders)


def test_stop_and_a_client_that_leaves_end_every_sequence(porch: Porch) -> None:
    stopped = porch.submit_rows(1, 2, streaming=True, client_id="a")
    gone = porch.submit_rows(2, streaming=True)
    porch.thread.stop(StopRequest("a"))
    gone.client_is_gone = True
    assert eventually(lambda: stopped.is_final and gone.is_final)
    assert set(porch.llm.cancelled) == {1, 2, 3, 4, 5}
    assert [finals(sender) for sender in (stopped, gone)] == [1, 1]
