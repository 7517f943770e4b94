"""Requests, steps and a slow reference for tests of the decoder.

``reference_token`` decodes one row by itself in plain Python and float64, straight from the definitions.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.core.outputs import DecoderOutput
from backend_engine.core.request import LlmRequest, StopConditions
from backend_engine.decoder.decoder import Decoder
from backend_engine.decoder.uniform import stream_keys, uniforms
from backend_engine.ops.step_logits import StepLogits


def make_request(
    request_id: int = 1,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    end_ids: Iterable[int] = (),
    min_output_tokens: int = 0,
    max_output_tokens: int = 1_000_000,
    stop_sequences: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> LlmRequest:
    """A request whose output so far is ``output``; ``params`` are those of ``SamplingParams``."""
    stop = StopConditions(max_output_tokens, min_output_tokens, frozenset(end_ids), stop_sequences)
    request = LlmRequest(request_id, list(prompt), SamplingParams(**params), stop, lambda _: None, seed=seed)
    for token_id in output:
        append(request, token_id)
    return request


def append(request: LlmRequest, token_id: int) -> None:
    """Give the request its next token."""
    request.promise()
    request.append_token(token_id)


def step_of(requests: Sequence[LlmRequest]) -> SchedulerOutput:
    """A step in which each request yields a token."""
    rows = tuple(ScheduledRequest(request, request.num_tokens - 1, 1, True) for request in requests)
    return SchedulerOutput(0, (), rows)


def decode(decoder: Decoder, logits: Tensor, requests: Sequence[LlmRequest]) -> DecoderOutput:
    """One step of the decoder, waited for."""
    return decoder.decode_async(StepLogits(logits), step_of(requests)).wait()


def decode_alone(logits: Tensor, request: LlmRequest) -> int:
    """The token of one row ``[vocab_size]`` in a decoder of its own."""
    return decode(Decoder(len(logits), "cpu"), logits.unsqueeze(0), [request]).token_ids[0]


def reference_logits(raw: Sequence[float], request: LlmRequest) -> list[float]:
    """Bias, bad words, min tokens and penalties, one token at a time."""
    params, stop, output = request.sampling_params, request.stop, request.output_token_ids
    text = request.prompt_token_ids + output
    logits = list(raw)
    if params.embedding_bias is not None:
        logits = [logit + float(bias) for logit, bias in zip(logits, params.embedding_bias, strict=True)]
    for sequence in params.bad_token_ids or ():
        beginning, final = list(sequence[:-1]), sequence[-1]
        if final < len(logits) and text[len(text) - len(beginning) :] == beginning and len(beginning) <= len(text):
            logits[final] = -math.inf
    if len(output) < stop.min_output_tokens:
        for end_id in stop.end_ids:
            if 0 <= end_id < len(logits):
                logits[end_id] = -math.inf
    counts = Counter(output)
    seen = set(text)
    for token_id in range(len(logits)):
        if token_id in seen:
            factor = params.repetition_penalty or 1.0
            logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        if counts[token_id]:
            logits[token_id] -= params.presence_penalty + params.frequency_penalty * counts[token_id]
    return logits


def reference_kept(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Probabilities of the tokens that top-k, top-p and min-p keep, likeliest first, equals by rising id."""
    temperature = 1.0 if params.temperature is None else params.temperature
    best = max(logits)
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if params.top_k:
        order = order[: params.top_k]
    weights = {token_id: math.exp((logits[token_id] - best) / temperature) for token_id in order}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    mass = 0.0
    for token_id, weight in weights.items():
        is_in_nucleus = params.top_p is None or params.top_p <= 0 or mass < params.top_p * total * (1 - 1e-6)
        if weight > 0 and (not kept or (is_in_nucleus and weight >= (params.min_p or 0.0) * (1 - 1e-6))):
            kept[token_id] = weight
        mass += weight
    kept_total = sum(kept.values())
    return {token_id: weight / kept_total for token_id, weight in kept.items()}


def reference_top_p(request: LlmRequest) -> float | None:
    """The top_p in force, token by token from the start."""
    params = request.sampling_params
    if params.top_p_decay is None or params.top_p_decay == 1:
        return params.top_p
    start = params.top_p if params.top_p is not None and 0 < params.top_p < 1 else 1.0
    now = start
    for token_id in request.output_token_ids:
        now = start if token_id == params.top_p_reset_ids else max(now * params.top_p_decay, params.top_p_min or 0.0)
    return min(now, start)


def reference_token(raw: Sequence[float], request: LlmRequest) -> int:
    """The next token of a row with logits ``raw``."""
    params = request.sampling_params
    logits = reference_logits(raw, request)
    if max(logits) == -math.inf:
        return max(range(len(raw)), key=lambda token_id: (raw[token_id], -token_id))
    if params.is_greedy:
        return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
    top_p = reference_top_p(request)
    kept = reference_kept(logits, dataclasses.replace(params, top_p=top_p))
    if not params.top_k or params.top_k >= len(raw):
        decays = params.top_p_decay is not None and params.top_p_decay < 1
        has_ranking = decays or (top_p is not None and 0 < top_p < 1)
    else:
        has_ranking = True
    order = list(kept) if has_ranking else sorted(kept)
    number = float(uniforms(stream_keys([request.seed]), [len(request.output_token_ids)])[0])
    cumulative = 0.0
    for token_id in order:
        cumulative += kept[token_id]
        if number < cumulative:
            return token_id
    return order[-1]


def log_probabilities(*probabilities: float) -> Tensor:
    """Logits ``[vocab_size]`` of a known distribution."""
    return torch.tensor(probabilities, dtype=torch.float64).log().float()
