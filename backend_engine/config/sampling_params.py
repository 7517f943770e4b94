"""``SamplingParams``: how one request's tokens are chosen and when it ends.

Names and defaults follow TensorRT-LLM's LLM API. Checked on construction; every refusal names the field, the
value and what is allowed. Frozen; shared freely between threads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend_engine.errors import InvalidRequestError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """Sampling and length parameters of one request.

    A request samples when ``temperature`` > 0 is given, or ``top_k`` > 1, or 0 < ``top_p`` <= 1; it is greedy
    when none of these is given, when ``temperature`` is 0, or when ``top_k`` is 1. ``top_k`` 0 or ``None`` = no
    top-k; ``top_p`` <= 0 or ``None`` = no top-p; ``temperature`` ``None`` = 1.

    A field that is ``None`` is unset: it takes the model's value where the engine was told to use those
    (``generation_config``), and else means what is said here.

    max_tokens: most new tokens, at least 1.
    min_tokens: end ids and stop words do nothing before this many new tokens.
    top_p_decay: top_p is multiplied by it with each new token (0..1], 1 or ``None`` = it stays. top_p_min: it does not
    fall below this. top_p_reset_ids: the token that sets it back to ``top_p`` (factual-nucleus sampling, Lee et al.,
    2022).
    min_p: drop tokens less likely than ``min_p`` times the likeliest (0..1), ``None`` = 0.
    repetition_penalty: > 0; divides (positive) or multiplies (negative) logits of tokens seen in prompt or output;
    ``None`` = 1.
    presence_penalty, frequency_penalty: subtracted once per seen output token, and per occurrence.
    seed: ``None`` = a fresh one; equal seeds give equal text whatever else runs.
    end_id: ``None`` = the model's own end ids, -1 = never end on a token, else this id alone.
    stop: stop words, matched on text. stop_token_ids: further end ids.
    stop_sequences: token id sequences that end the request and stay in the output.
    include_stop_str_in_output: text ends right after the stop word instead of right before it.
    bad: words that must not appear (each also in its spelling with a leading blank). bad_token_ids: id sequences.
    embedding_bias: float32 ``[vocab_size]`` added to the logits.
    logits_processors: of plugins: the arguments of each by its name, applied in this order, before all the above.
    n: number of independent sequences. logprobs: ``None`` = none, 0 = of the chosen token, k = of the k best too.
    return_context_logits: give back the logits ``[prompt, vocab_size]`` of the prompt's tokens; a cached beginning is
    then computed again. return_generation_logits: those ``[new, vocab_size]`` that each new token was chosen from.
    return_perf_metrics: give back times and KV cache blocks.
    """

    max_tokens: int = 32
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_decay: float | None = None
    top_p_reset_ids: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_sequences: Sequence[Sequence[int]] | None = None
    include_stop_str_in_output: bool = False
    bad: Sequence[str] | str | None = None
    bad_token_ids: Sequence[Sequence[int]] | None = None
    ignore_eos: bool = False
    embedding_bias: np.ndarray | None = field(default=None, repr=False)
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    n: int = 1
    logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer(self, "max_tokens", 1)
        _integer(self, "min_tokens", 0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        _real(self, "temperature", 0.0, None)
        _integer(self, "top_k", 0)
        _real(self, "top_p", None, 1.0)
        for name in ("top_p_min", "top_p_decay"):
            _real(self, name, 0.0, 1.0)
        if self.top_p_decay == 0:
            raise InvalidRequestError("top_p_decay 0 is not allowed; it must be more than 0 and at most 1")
        _integer(self, "top_p_reset_ids", -1)
        _real(self, "min_p", 0.0, 1.0)
        _real(self, "repetition_penalty", 0.0, None)
        if self.repetition_penalty == 0:
            raise InvalidRequestError("repetition_penalty 0 is not allowed; it must be more than 0")
        _real(self, "presence_penalty", None, None)
        _real(self, "frequency_penalty", None, None)
        _integer(self, "seed", 0, MAX_SEED)
        _integer(self, "end_id", -1)
        _integer(self, "n", 1)
        _integer(self, "logprobs", 0)
        object.__setattr__(self, "stop", _words(self, "stop"))
        object.__setattr__(self, "bad", _words(self, "bad"))
        for name in ("stop_sequences", "bad_token_ids"):
            for sequence in getattr(self, name) or ():
                if isinstance(sequence, int) or len(sequence) == 0 or not all(_is_token_id(i) for i in sequence):
                    raise InvalidRequestError(f"{name} must be non-empty lists of token ids, got {sequence!r}")
        for token_id in self.stop_token_ids or ():
            if not _is_token_id(token_id):
                raise InvalidRequestError(f"stop_token_ids must be token ids (0 or more), got {token_id!r}")
        bias = self.embedding_bias
        if bias is not None and (bias.ndim != 1 or not np.isfinite(bias).all()):
            raise InvalidRequestError("embedding_bias must be a vector [vocab_size] of finite numbers")

        processors = self.logits_processors
        if not isinstance(processors, Mapping):
            raise InvalidRequestError(f"logits_processors must be an object of names, got {processors!r}")
        for name, arguments in processors.items():
            if not isinstance(name, str) or not isinstance(arguments, Mapping):
                raise InvalidRequestError(
                    f"logits_processors must have an object of arguments for each name, got {name!r}: {arguments!r}"
                )

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken at each step."""
        if self.temperature == 0 or self.top_k == 1:
            return True
        samples = self.temperature is not None or (self.top_k or 0) > 1 or (self.top_p or 0) > 0
        return not samples


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 0


def _integer(params: SamplingParams, name: str, low: int, high: int | None = None) -> None:
    value = getattr(params, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise InvalidRequestError(f"{name} {value} is out of range; it must be {allowed}")
    object.__setattr__(params, name, int(value))


def _real(params: SamplingParams, name: str, low: float | None, high: float | None) -> None:
    value = getattr(params, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} {value} is not allowed; it must be a finite number")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = [f"at {word} {limit:g}" for word, limit in (("least", low), ("most", high)) if limit is not None]
        raise InvalidRequestError(f"{name} {value:g} is out of range; it must be {' and '.join(limits)}")
    object.__setattr__(params, name, float(value))


def _words(params: SamplingParams, name: str) -> tuple[str, ...]:
    value = getattr(params, name)
    words = (value,) if isinstance(value, str) else tuple(value or ())
    for word in words:
        if not isinstance(word, str):
            raise InvalidRequestError(f"{name} must be a string or a list of strings, got {word!r}")
    return tuple(word for word in words if word)
