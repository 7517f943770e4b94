"""What happens to a request before it is queued: checked against the engine's limits, and resolved.

Runs in the submitting thread; pure. Everything that can be refused is refused here, by name.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backend_engine.config.sampling_defaults import SamplingDefaults
from backend_engine.config.sampling_params import MAX_SEED, SamplingParams
from backend_engine.core.protocols import NamedProcessor, OutputSink
from backend_engine.core.request import DEFAULT_PRIORITY, StopConditions
from backend_engine.errors import InvalidRequestError, ModelLoadError
from backend_engine.plugins.catalog import LOGITS_PROCESSORS
from backend_engine.plugins.foreign_code import call_foreign
from backend_engine.text.tokenizer import Tokenizer

_GOLDEN_RATIO = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Submission:
    """One sequence to generate, as ``LLM.submit_all`` takes it.

    ``sink`` is called on the executor thread with each ``RequestOutput`` and must neither block nor raise; the last
    one has ``finished``. ``priority``: 1 = most urgent .. ``MAX_PRIORITY``. ``deadline_s`` and ``queue_timeout_s``
    count from now. ``seed`` ``None`` = the sampling parameters' one, or a fresh one; sequence ``sequence_index`` uses
    one of its own that follows from it.
    """

    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    sink: OutputSink
    client_id: str = ""
    cache_salt: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    seed: int | None = None
    sequence_index: int = 0


class AdmissionLimits(NamedTuple):
    """What the engine can hold. ``end_ids`` are the model's own; ``max_context_tokens`` is ``None`` with chunking.
    ``positions_switch_at``: longer prompts have other positions from their first token on, ``None`` = none have.
    ``sampling_defaults``: the model's own, for what a request leaves unset; empty unless they were asked for.
    ``max_input_len``: longest prompt, ``None`` = whatever leaves room for one token of output.
    """

    vocab_size: int
    max_seq_len: int
    kv_num_blocks: int
    kv_tokens_per_block: int
    max_context_tokens: int | None
    end_ids: frozenset[int]
    positions_switch_at: int | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    max_input_len: int | None = None

    @property
    def kv_num_tokens(self) -> int:
        return self.kv_num_blocks * self.kv_tokens_per_block


def check_prompt(prompt_token_ids: Sequence[int], limits: AdmissionLimits) -> list[int]:
    """The prompt as a list of ints, or ``InvalidRequestError``."""
    num_tokens = len(prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty: it must have at least one token")
    if num_tokens >= limits.max_seq_len:
        raise InvalidRequestError(
            f"Prompt length ({num_tokens}) exceeds maximum input length ({limits.max_seq_len - 1}): "
            f"max_seq_len is {limits.max_seq_len}, one token of which is kept for the output"
        )
    if limits.max_input_len is not None and num_tokens > limits.max_input_len:
        raise InvalidRequestError(f"Prompt length ({num_tokens}) exceeds maximum input length ({limits.max_input_len})")
    if limits.max_context_tokens is not None and num_tokens > limits.max_context_tokens:
        raise InvalidRequestError(
            f"Prompt length ({num_tokens}) exceeds maximum input length ({limits.max_context_tokens}): "
            f"that is max_num_tokens, and chunked context is off"
        )
    if num_tokens > limits.kv_num_tokens:
        size = limits.kv_tokens_per_block
        raise InvalidRequestError(
            f"the prompt of {num_tokens} tokens needs {-(-num_tokens // size)} KV cache blocks of {size} tokens; "
            f"the cache has {limits.kv_num_blocks} blocks ({limits.kv_num_tokens} tokens)"
        )
    ids = np.asarray(prompt_token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequestError("prompt_token_ids must be a flat list of integers")
    bad = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if bad.size:
        raise InvalidRequestError(
            f"token id {int(bad[0])} of the prompt is outside the vocabulary of {limits.vocab_size}"
        )
    tokens: list[int] = ids.tolist()
    return tokens


def with_end_of(limits: AdmissionLimits, tokenizer: Tokenizer) -> AdmissionLimits:
    """``limits`` with the tokenizer's end token for a model whose files name no end id."""
    if limits.end_ids or tokenizer.eos_token_id is None:
        return limits
    return limits._replace(end_ids=frozenset((tokenizer.eos_token_id,)))


def check_vocabulary(tokenizer: Tokenizer, folder: str, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model, of ``vocab_size`` embedding rows, knows nothing of.

    Places for images and sounds are let be: a model for text alone has no row for them, and a prompt with one is
    refused when it comes.
    """
    beyond = tokenizer.ids_from(vocab_size)
    wrong = {i: token for i, token in beyond.items() if token not in tokenizer.media_tokens}
    if not wrong:
        return
    shown = ", ".join(f"{i} ({token!r})" for i, token in list(wrong.items())[:3])
    raise ModelLoadError(
        f"the tokenizer in {folder} has {len(wrong)} ids that the model has no embedding for: "
        f"{shown}{', ...' if len(wrong) > 3 else ''}; config.json says vocab_size {vocab_size}, so that ids must be "
        "below it"
    )


def cache_salt(salt: str, num_prompt_tokens: int, limits: AdmissionLimits) -> str:
    """What keeps the request's blocks apart from others': the client's ``salt``, and where long prompts have other
    positions than short ones, which of the two it is.
    """
    is_long = limits.positions_switch_at is not None and num_prompt_tokens > limits.positions_switch_at
    return f"{salt}\0long" if is_long else salt


def resolve_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Turn bad words into token ids, in each of their spellings. Without a tokenizer words are refused."""
    if tokenizer is None:
        for name in ("stop", "bad"):
            if getattr(params, name):
                raise InvalidRequestError(f"{name} words need a tokenizer, and this engine was started without one")
        return params
    if not params.bad:
        return params
    ids = [variant for word in params.bad for variant in tokenizer.token_variants(word)]
    return dataclasses.replace(params, bad=None, bad_token_ids=[*(params.bad_token_ids or ()), *ids])


def logits_processors(params: SamplingParams, vocab_size: int) -> tuple[NamedProcessor, ...]:
    """The request's own processors of plugins, made for one sequence. An unknown name and arguments that the plugin
    refuses are an ``InvalidRequestError``.
    """
    found = []
    for name, arguments in params.logits_processors.items():
        if name not in LOGITS_PROCESSORS:
            known = ", ".join(LOGITS_PROCESSORS.names()) or "none, as no plugin brings one"
            raise InvalidRequestError(f"logits_processors: {name!r} is not known; known: {known}")
        label = f"logits processor {name!r} of {LOGITS_PROCESSORS.owner_of(name)}"
        make = functools.partial(LOGITS_PROCESSORS.get(name), arguments, vocab_size)
        found.append(NamedProcessor(label, call_foreign(label, "it refuses the request", make, InvalidRequestError)))
    return tuple(found)


def stop_conditions(params: SamplingParams, num_prompt_tokens: int, limits: AdmissionLimits) -> StopConditions:
    """Limits clamped to what fits, and the ids that end this request."""
    bias = params.embedding_bias
    if bias is not None and len(bias) != limits.vocab_size:
        raise InvalidRequestError(f"embedding_bias has {len(bias)} entries; the vocabulary has {limits.vocab_size}")
    if params.ignore_eos or params.end_id == -1:
        end_ids: frozenset[int] = frozenset()
    else:
        end_ids = limits.end_ids if params.end_id is None else frozenset((params.end_id,))
    room = min(limits.max_seq_len - num_prompt_tokens, limits.kv_num_tokens - num_prompt_tokens + 1)
    return StopConditions(
        max_output_tokens=min(params.max_tokens, room),
        min_output_tokens=params.min_tokens,
        end_ids=end_ids | frozenset(params.stop_token_ids or ()),
        stop_sequences=tuple(tuple(sequence) for sequence in params.stop_sequences or ()),
    )


def sequence_seed(seed: int, sequence_index: int) -> int:
    """Seed of sequence ``sequence_index``: the request's own for the first, a mixed one for the rest (SplitMix64)."""
    if sequence_index == 0:
        return seed
    mixed = (seed + sequence_index * _GOLDEN_RATIO) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return mixed ^ (mixed >> 31)
