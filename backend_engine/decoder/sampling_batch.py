"""``SamplingBatch``: how the rows of one batch composition are decoded, as tensors made once.

``Decoder`` builds one whenever the requests or their order change, and uses it again until then; per-request facts
(``RequestSampling``) live as long as the request. Per step only what moves with the text is touched: the uniform
numbers, the penalties and the bad words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend_engine.core.request import LlmRequest
from backend_engine.decoder.custom_processors import CustomProcessors
from backend_engine.decoder.logits_processors import BadWords, Constraints, EmbeddingBias, LogitsProcessor, MinTokens
from backend_engine.decoder.penalties import Penalties, TokenCounts, has_penalties
from backend_engine.decoder.ranking import greedy
from backend_engine.decoder.sampling import NARROW_WIDTH, SamplingGroup, sample
from backend_engine.decoder.top_p_decay import TopPDecay, has_decay
from backend_engine.decoder.uniform import stream_keys, uniforms
from backend_engine.decoder.upload import upload
from backend_engine.errors import EngineError


class RequestSampling:
    """What the decoder keeps of one request, made at its first row. Only ``token_counts`` and ``decay`` move.

    ``top_k`` = vocab_size and ``top_p`` = infinity mean off. ``num_top_logprobs``: ``None`` = no log probabilities.
    ``token_counts``: ``None`` = no penalties. ``decay``: ``None`` = top_p stays.
    """

    def __init__(self, request: LlmRequest, vocab_size: int) -> None:
        params = request.sampling_params
        self.request = request
        self.is_greedy = params.is_greedy
        self.temperature = 1.0 if params.temperature is None else params.temperature
        self.top_k = min(params.top_k or vocab_size, vocab_size)
        self.top_p = params.top_p if params.top_p is not None and 0 < params.top_p < 1 else np.inf
        self.decay = TopPDecay(request) if has_decay(params) else None
        self.min_p = params.min_p or 0.0
        self.num_top_logprobs = None if params.logprobs is None else min(params.logprobs, vocab_size)
        self.constraints = Constraints(request, vocab_size)
        self.token_counts = TokenCounts(request, vocab_size) if has_penalties(params) else None

    def is_below_minimum(self) -> bool:
        """Whether end ids are masked for the next token."""
        return len(self.request.output_token_ids) < self.constraints.min_output_tokens

    def is_plain(self) -> bool:
        """Whether the next token is just the likeliest of the raw logits."""
        constraints = self.constraints
        is_changed = constraints.has_bias() or constraints.has_bad_words() or self.token_counts is not None
        is_changed = is_changed or bool(self.request.logits_processors)
        return self.is_greedy and not is_changed and not self.is_below_minimum()


class _SampledRows(NamedTuple):
    """Rows of the working logits (``None`` = all) that form one sampling group, and their random streams."""

    rows: Tensor | None
    group: SamplingGroup
    samplings: list[RequestSampling]
    keys: NDArray[np.uint64]
    decays: bool


class SamplingBatch:
    """Decoding of the rows of ``samplings``, in their order. Good until ``is_current`` says otherwise."""

    def __init__(self, samplings: Sequence[RequestSampling], vocab_size: int, device: torch.device) -> None:
        self._requests = [s.request for s in samplings]
        self._device = device
        self._vocab_size = vocab_size
        # Rows that need more than the likeliest raw logit are worked on in a matrix of their own.
        rows = [row for row, s in enumerate(samplings) if not s.is_plain()]
        worked = [samplings[row] for row in rows]
        self._has_work = bool(rows)
        self._rows = self._row_index(rows, len(samplings))
        self._below_minimum = [s for s in worked if s.is_below_minimum()]
        custom = [(row, s.request) for row, s in enumerate(worked) if s.request.logits_processors]
        self._custom = CustomProcessors(custom) if custom else None
        self._processors = [*([self._custom] if self._custom else []), *_processors(worked, vocab_size, device)]
        self._has_masks = any(processor.masks for processor in self._processors)
        self._greedy_rows = self._row_index([i for i, s in enumerate(worked) if s.is_greedy], len(worked))
        self._has_greedy = any(s.is_greedy for s in worked)
        self._sampled = self._sampled_rows(worked)
        asking = [row for row, s in enumerate(samplings) if s.num_top_logprobs is not None]
        self.num_top_logprobs = [s.num_top_logprobs for s in samplings if s.num_top_logprobs is not None]
        self.logprob_row_ids = asking
        self.logprob_rows = self._row_index(asking, len(samplings))

    def is_current(self, requests: Sequence[LlmRequest]) -> bool:
        """Whether this batch decodes exactly these requests, and none has reached its minimum length since."""
        return self._requests == requests and all(s.is_below_minimum() for s in self._below_minimum)

    @property
    def failures(self) -> Mapping[int, EngineError]:
        """Of plugins' processors in the last ``choose``, by request id."""
        return {} if self._custom is None else self._custom.failures

    def has_request(self, request: LlmRequest) -> bool:
        return request in self._requests

    def choose(self, logits: Tensor) -> Tensor:
        """Choose a token for each row of ``logits [num_rows, vocab_size]``, any float type; int64 ``[num_rows]``.

        A row in which every token is masked takes the likeliest of the model's own logits. ``logits`` stay as they
        are.
        """
        if not self._has_work:
            return greedy(logits)
        work = _take(logits, self._rows).float().contiguous()
        if self._processors and work.data_ptr() == logits.data_ptr():
            work = work.clone()
        for processor in self._processors:
            processor.apply(work)
        tokens = torch.empty(len(work), dtype=torch.int64, device=work.device)
        if self._has_greedy:
            _store(tokens, self._greedy_rows, greedy(_take(work, self._greedy_rows)))
        for part in self._sampled:
            indices = [len(s.request.output_token_ids) for s in part.samplings]
            numbers = upload(uniforms(part.keys, indices), self._device)
            group = part.group
            if part.decays:
                group = replace(group, top_p=self._column([_top_p(s) for s in part.samplings], np.float64))
            _store(tokens, part.rows, sample(_take(work, part.rows), group, numbers))
        if self._has_masks:
            is_masked = work.amax(-1) == -torch.inf
            if work.is_cuda or bool(is_masked.any()):
                tokens = torch.where(is_masked, greedy(_take(logits, self._rows)), tokens)
        if self._rows is None:
            return tokens
        chosen = greedy(logits)
        chosen[self._rows] = tokens
        return chosen

    def _row_index(self, rows: list[int], num_rows: int) -> Tensor | None:
        return None if len(rows) == num_rows else upload(np.array(rows, np.int64), self._device)

    def _sampled_rows(self, worked: list[RequestSampling]) -> list[_SampledRows]:
        whole: list[int] = []
        narrow: list[int] = []
        nucleus: list[int] = []
        for row, sampling in enumerate(worked):
            if sampling.is_greedy:
                continue
            has_top_k = sampling.top_k < self._vocab_size
            if has_top_k and sampling.top_k <= NARROW_WIDTH:
                narrow.append(row)
            elif has_top_k or sampling.top_p < np.inf or sampling.decay is not None:
                nucleus.append(row)
            else:
                whole.append(row)
        parts = []
        for rows in (whole, narrow, nucleus):
            if not rows:
                continue
            members = [worked[row] for row in rows]
            group = SamplingGroup(
                temperature=self._column([s.temperature for s in members], np.float64),
                top_k=self._column([s.top_k for s in members], np.int64),
                top_p=self._column([s.top_p for s in members], np.float64),
                min_p=self._column([s.min_p for s in members], np.float64),
                is_whole=rows is whole,
                width=max(s.top_k for s in members) if rows is narrow else 0,
                has_min_p=any(s.min_p > 0 for s in members),
            )
            keys = stream_keys([s.request.seed for s in members])
            decays = any(s.decay is not None for s in members)
            parts.append(_SampledRows(self._row_index(rows, len(worked)), group, members, keys, decays))
        return parts

    def _column(self, values: Sequence[float], dtype: type[np.float64] | type[np.int64]) -> Tensor:
        return upload(np.array(values, dtype), self._device).unsqueeze(1)


def _top_p(sampling: RequestSampling) -> float:
    return sampling.top_p if sampling.decay is None else sampling.decay.top_p()


def _take(matrix: Tensor, rows: Tensor | None) -> Tensor:
    return matrix if rows is None else matrix[rows]


def _store(target: Tensor, rows: Tensor | None, values: Tensor) -> None:
    if rows is None:
        target.copy_(values)
    else:
        target[rows] = values


def _processors(worked: Sequence[RequestSampling], vocab_size: int, device: torch.device) -> list[LogitsProcessor]:
    """The built-in processors that somebody uses, in their order: bias, bad words, min tokens, penalties."""
    rows = [(row, s, s.constraints) for row, s in enumerate(worked)]
    biased = [(row, c) for row, _, c in rows if c.has_bias()]
    bad = [(row, s.request, c) for row, s, c in rows if c.has_bad_words()]
    short = [(row, c) for row, s, c in rows if s.is_below_minimum()]
    penalized = [(row, s.request, s.token_counts) for row, s, _ in rows if s.token_counts is not None]
    processors: list[LogitsProcessor] = []
    if biased:
        processors.append(EmbeddingBias(biased, vocab_size, device))
    if bad:
        processors.append(BadWords(bad, vocab_size, device))
    if short:
        processors.append(MinTokens(short, vocab_size, device))
    if penalized:
        processors.append(Penalties(penalized, vocab_size, device))
    return processors
