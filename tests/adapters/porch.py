"""From the engine to a client without the adapter: a fake engine, a real sender thread, a fake Triton sender."""

from typing import Any

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.triton_io.engine_request import EngineRequest, EngineRow, RequestOptions
from backend_engine.triton_io.reply import Reply
from backend_engine.triton_io.response_sender import ResponseSenderThread, SenderSettings
from tests.adapters import fake_pb_utils as pb_utils
from tests.adapters.fake_llm import FakeLLM
from tests.adapters.fake_pb_utils import ResponseSender

PROMPT = [1, 2]


class Porch:
    """An engine model without its adapter: fake engine, real sender thread."""

    def __init__(self, **settings: Any) -> None:
        self.llm = FakeLLM()
        self.num_updates = 0
        self.thread = ResponseSenderThread(
            self.llm, SenderSettings(**{"cancellation_check_period_ms": 5} | settings), self.count
        )

    def count(self) -> None:
        self.num_updates += 1

    def submit_rows(self, *counts: int, **options: Any) -> ResponseSender:
        """A request with a row for each of ``counts``, to be answered that many times."""
        sender = ResponseSender()
        rows = tuple(EngineRow(PROMPT, SamplingParams(n=n), RequestOptions(**options)) for n in counts)
        self.thread.submit(EngineRequest(rows), Reply(pb_utils, sender))
        return sender

    def submit(self, outputs: frozenset[str] = frozenset(), **options: Any) -> ResponseSender:
        sender = ResponseSender()
        request = EngineRequest((EngineRow(PROMPT, SamplingParams(), RequestOptions(**options)),))
        self.thread.submit(request, Reply(pb_utils, sender, outputs))
        return sender


def finals(sender: ResponseSender) -> int:
    return sum(flags == pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL for _, flags in sender.log)


def ids(sender: ResponseSender) -> list[int]:
    return [int(i) for response in sender.responses for i in response.arrays()["output_ids"].reshape(-1)]
