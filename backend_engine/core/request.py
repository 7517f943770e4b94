"""``LlmRequest``: one generation, its progress and its end.

Progress is two counters (tokens known, tokens computed); the phase is derived from them. Moving fields
are written by the executor thread alone, through the verbs below. A request holds no block ids and no
tensors: those belong to ``KVCacheManager`` and ``Decoder``.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend_engine.config.sampling_params import SamplingParams

if TYPE_CHECKING:
    from backend_engine.core.outputs import RequestOutput
    from backend_engine.core.protocols import NamedProcessor, StopMatcher
    from backend_engine.errors import EngineError


MAX_PRIORITY = 100
DEFAULT_PRIORITY = 50
"""What 0 and an absent priority mean."""


class RequestState(enum.Enum):
    """Where a request stands. Pausing leads from generation back to context."""

    CONTEXT_INIT = "context_init"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    GENERATION_COMPLETE = "generation_complete"


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are what clients read."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class StopConditions:
    """What ends a request, resolved once at submission (limits clamped, end ids looked up).

    ``max_output_tokens`` counts new tokens; end ids do not appear in the output. ``stop_sequences`` are
    token id sequences that stay in the output. ``min_output_tokens`` holds all of them back.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class RequestLimits:
    """Times (``time.monotonic`` seconds) after which a request ends by itself; ``None`` = never."""

    deadline: float | None = None
    queue_deadline: float | None = None


class LlmRequest:
    """One generation. Equality is identity; ties anywhere are broken by ``request_id``.

    Fixed: ``request_id`` (unique, increasing), ``client_id`` (the client's free string), ``prompt_token_ids``,
    ``sampling_params``, ``stop``, ``limits``, ``arrival_time`` (monotonic seconds), ``seed`` (of this
    sequence), ``cache_salt``, ``priority`` (1 = most urgent .. ``MAX_PRIORITY``), ``sequence_index`` (which of the
    answers to its prompt, from 0), ``sink`` (called by the executor thread, must not block), ``stop_matcher``,
    ``logits_processors`` (of plugins, in their order).
    """

    __slots__ = (
        "arrival_time", "cache_salt", "client_id", "error", "finish_reason", "first_scheduled_time", "first_token_time",
        "last_token_time", "limits", "logits_processors", "num_cached_tokens", "num_computed_tokens",
        "num_context_logits", "num_context_tokens", "num_promised_tokens", "num_tokens", "output_token_ids", "priority",
        "prompt_token_ids", "request_id", "sampling_params", "seed", "sequence_index", "sink", "stop", "stop_matcher",
        "stop_reason",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - the fixed fields of the noun everybody shares
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        stop: StopConditions,
        sink: "Callable[[RequestOutput], None]",
        *,
        arrival_time: float = 0.0,
        client_id: str = "",
        seed: int = 0,
        cache_salt: str = "",
        priority: int = DEFAULT_PRIORITY,
        sequence_index: int = 0,
        limits: RequestLimits = RequestLimits(),
        stop_matcher: "StopMatcher | None" = None,
        logits_processors: "tuple[NamedProcessor, ...]" = (),
    ) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.stop = stop
        self.sink = sink
        self.arrival_time = arrival_time
        self.seed = seed
        self.cache_salt = cache_salt
        self.priority = priority
        self.sequence_index = sequence_index
        self.limits = limits
        self.stop_matcher = stop_matcher
        self.logits_processors = logits_processors

        self.output_token_ids: list[int] = []
        self.num_tokens = len(prompt_token_ids)
        self.num_context_tokens = self.num_tokens
        self.num_computed_tokens = 0
        self.num_promised_tokens = 0
        self.num_cached_tokens = 0
        self.num_context_logits = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: EngineError | None = None

    @property
    def state(self) -> RequestState:
        """Derived: complete once there is a finish reason, context until the context is computed."""
        if self.finish_reason is not None:
            return RequestState.GENERATION_COMPLETE
        if self.in_context_phase:
            return RequestState.CONTEXT_INIT
        return RequestState.GENERATION_IN_PROGRESS

    @property
    def in_context_phase(self) -> bool:
        """True while tokens of the prompt (or, after a pause, of the text so far) are not computed."""
        return self.num_computed_tokens < self.num_context_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens, known or promised by a launched step, whose keys and values are not computed."""
        return self.num_tokens + self.num_promised_tokens - self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """Most tokens whose keys and values this request can ever store (the last one is never stored)."""
        return len(self.prompt_token_ids) + self.stop.max_output_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known token ids ``[start, stop)`` of prompt followed by output."""
        prompt = self.prompt_token_ids
        num_prompt = len(prompt)
        if stop <= num_prompt:
            return prompt[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return prompt[start:] + self.output_token_ids[: stop - num_prompt]

    def last_token_id(self) -> int:
        """The newest known token."""
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    def reuse(self, num_tokens: int) -> None:
        """Count the first ``num_tokens`` as computed: their blocks were found in the cache."""
        assert self.num_computed_tokens == 0 and 0 < num_tokens < self.num_tokens, (num_tokens, self)
        self.num_computed_tokens = num_tokens
        self.num_cached_tokens = num_tokens

    def advance(self, num_tokens: int) -> None:
        """Count ``num_tokens`` more as computed; called as soon as the step that computes them is launched."""
        num_computed = self.num_computed_tokens + num_tokens
        assert num_tokens > 0 and num_computed <= self.num_tokens + self.num_promised_tokens, (num_tokens, self)
        self.num_computed_tokens = num_computed

    def count_context_logits(self) -> None:
        """The logits of the prompt tokens computed so far are on their way; a pause does not ask for them again."""
        num_now = min(self.num_computed_tokens, len(self.prompt_token_ids))
        self.num_context_logits = max(self.num_context_logits, num_now)

    def promise(self, num_tokens: int = 1) -> None:
        """A launched step will yield ``num_tokens`` new tokens."""
        self.num_promised_tokens += num_tokens

    def append_token(self, token_id: int) -> None:
        """Settle one promise with the token that came."""
        assert self.num_promised_tokens > 0, self
        self.num_promised_tokens -= 1
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def pause(self) -> None:
        """Give up all computed tokens; the whole text so far becomes context again."""
        assert not self.is_finished, self
        self.num_computed_tokens = 0
        self.num_context_tokens = self.num_tokens + self.num_promised_tokens

    def finish(
        self, reason: FinishReason, *, stop_reason: str | int | None = None, error: "EngineError | None" = None
    ) -> None:
        """End the request; a second end is a bug."""
        assert self.finish_reason is None, self
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error = error
        self.num_promised_tokens = 0

    def __repr__(self) -> str:
        return (
            f"LlmRequest({self.request_id}, {self.state.value}, prompt={len(self.prompt_token_ids)}, "
            f"output={len(self.output_token_ids)}, computed={self.num_computed_tokens})"
        )
