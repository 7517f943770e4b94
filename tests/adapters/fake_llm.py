"""A scripted ``LLM`` for the porch's tests: it takes requests and says what the test tells it to say."""

from collections.abc import Callable, Sequence

from backend_engine.admission import Submission
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.outputs import RequestOutput, TokenLogprobs
from backend_engine.core.request import FinishReason
from backend_engine.errors import EngineError


class Words:
    """Text of a sequence: token 7 is `` w7``; ``echo`` puts the prompt in front."""

    def __init__(self, prompt: Sequence[int], echo: bool) -> None:
        self._prefix = "".join(f" w{i}" for i in prompt) if echo else ""

    def append(self, token_ids: Sequence[int]) -> str:
        text, self._prefix = self._prefix + "".join(f" w{i}" for i in token_ids), ""
        return text

    def finish(self) -> str:
        text, self._prefix = self._prefix, ""
        return text


class FakeLLM:
    """Keeps what was submitted and cancelled. ``refusal``: raised by the next ``submit_all``."""

    def __init__(self) -> None:
        self.submitted: dict[int, Submission] = {}
        self.sinks: dict[int, Callable[[RequestOutput], None]] = {}
        self.cancelled: list[int] = []
        self.refusal: EngineError | None = None

    def submit_all(self, submissions: Sequence[Submission]) -> list[int]:
        if self.refusal is not None:
            raise self.refusal
        ids = []
        for submission in submissions:
            ids.append(len(self.submitted) + 1)
            self.submitted[ids[-1]] = submission
            self.sinks[ids[-1]] = submission.sink
        return ids

    def cancel(self, request_id: int) -> None:
        """Like the engine's: idempotent, and the sink gets a final output."""
        self.cancelled.append(request_id)
        if request_id in self.sinks:
            self.end(request_id, FinishReason.CANCELLED)

    def detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams, echo: bool = False) -> Words:
        return Words(prompt_token_ids, echo)

    def say(self, request_id: int, *token_ids: int, logprob: float | None = None) -> None:
        """Let tokens come out."""
        logprobs = None if logprob is None else [TokenLogprobs(i, logprob) for i in token_ids]
        self.sinks[request_id](RequestOutput(request_id, list(token_ids), logprobs=logprobs))

    def end(
        self,
        request_id: int,
        reason: FinishReason = FinishReason.STOP,
        *,
        token_ids: Sequence[int] = (),
        stop_reason: str | int | None = None,
        error: EngineError | None = None,
    ) -> None:
        """Let the final output come out."""
        sink = self.sinks.pop(request_id)
        sink(RequestOutput(request_id, list(token_ids), True, reason, stop_reason, error=error))
