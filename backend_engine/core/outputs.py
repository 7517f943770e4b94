"""What leaves the engine: tokens, log probabilities and the end of a request. All frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backend_engine.core.request import FinishReason, LlmRequest
from backend_engine.errors import EngineError

LogitsArray = NDArray[np.float32]


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

    ``logprobs`` is ``None`` when no row asked for any, else one entry (or ``None``) a row. Logits, float32, by request
    id for those that asked: ``generation_logits`` ``[1, vocab_size]`` that the new token was chosen from,
    ``context_logits`` ``[n, vocab_size]`` of the prompt tokens that this step computed. ``failures``: by request id,
    why a request has to end now, its token being of no use.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    generation_logits: Mapping[int, LogitsArray] = field(default_factory=dict)
    context_logits: Mapping[int, LogitsArray] = field(default_factory=dict)
    failures: Mapping[int, EngineError] = field(default_factory=dict)


class Usage(NamedTuple):
    """Token counts of a request so far."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, request: LlmRequest) -> "Usage":
        """The counts of ``request`` now."""
        return cls(len(request.prompt_token_ids), request.num_cached_tokens, len(request.output_token_ids))


class KvUsage(NamedTuple):
    """Blocks of the KV cache that a request took over its life: newly allocated ones, and ones found in the cache."""

    num_allocated_blocks: int
    num_reused_blocks: int


class RequestTimes(NamedTuple):
    """When things happened to a request, ``time.monotonic`` seconds; ``None`` = they did not."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None


class RequestOutput(NamedTuple):
    """What one step did for one request: new tokens, and whether and why it ended.

    ``token_ids`` are the new ones only, without end ids. ``error`` is set when ``finish_reason`` is ``ERROR``
    and whenever the request ended before it was run (queue full or timed out).
    ``usage``, ``kv_usage`` and ``times`` are given with the final output only. Logits are those of ``DecoderOutput``;
    an output that brings ``context_logits`` may have no tokens.
    """

    request_id: int
    token_ids: list[int]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: EngineError | None = None
    usage: Usage | None = None
    kv_usage: KvUsage | None = None
    times: RequestTimes | None = None
    generation_logits: LogitsArray | None = None
    context_logits: LogitsArray | None = None
