"""What leaves the engine: tokens, log probabilities and the end of a request. All frozen."""

from dataclasses import dataclass
from typing import NamedTuple

from backend_engine.core.request import FinishReason
from backend_engine.errors import EngineError


class TokenLogprobs(NamedTuple):
    """Log probabilities (natural log, of the model's own distribution) for one generated token.

    ``logprob`` is that of the chosen token, ``rank`` its place in the distribution (1 = most likely);
    ``top`` holds ``(token_id, logprob)`` of the most likely ones, best first. Never below ``LOGPROB_FLOOR``.
    """

    token_id: int
    logprob: float
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


LOGPROB_FLOOR = -100.0


@dataclass(frozen=True)
class DecoderOutput:
    """New tokens of one step, aligned with ``SchedulerOutput.logits_rows``.

    ``logprobs`` is ``None`` when no row asked for any, else one entry (or ``None``) a row.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None


class Usage(NamedTuple):
    """Token counts of a request so far."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class RequestOutput(NamedTuple):
    """What one step did for one request: new tokens, and whether and why it ended.

    ``token_ids`` are the new ones only, without end ids. ``error`` is set when ``finish_reason`` is ``ERROR``
    and whenever the request ended before it was run (queue full or timed out).
    ``usage`` is given with the final output only.
    """

    request_id: int
    token_ids: list[int]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: EngineError | None = None
    usage: Usage | None = None
