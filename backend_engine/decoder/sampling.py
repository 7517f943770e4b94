"""Drawing one token a row from what temperature, top-k, top-p and min-p leave, applied in this order.

Called by ``SamplingBatch``. One uniform number a token decides, by inverse CDF in float64 over the ranked kept
tokens (over all tokens by id when nothing needs a ranking). No state, and on CUDA no waiting for the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backend_engine.decoder.ranking import ranked, row_chunks

# Rows with at most this top_k share one top-k of the widest one's width.
NARROW_WIDTH = 256
# How many of the likeliest tokens a CPU looks at, in turn, for a nucleus before it sorts the vocabulary.
_NUCLEUS_WIDTHS = (256, 4096)
# Probabilities come from float32 logits: a mass that misses top_p, or a ratio that misses min_p, by less than this
# is meant to reach it.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class SamplingGroup:
    """Parameters of rows that are sampled the same way, each a tensor ``[num_rows, 1]``.

    ``temperature``, ``top_p`` and ``min_p`` are float64, ``top_k`` is int64. Off is ``top_k`` = vocab_size,
    ``top_p`` = infinity, ``min_p`` = 0. ``is_whole``: no row has top-k or top-p. ``width`` > 0: every row has a
    top-k and the largest is ``width``. ``has_min_p``: some row has one.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_whole: bool
    width: int
    has_min_p: bool


def sample(logits: Tensor, group: SamplingGroup, numbers: Tensor) -> Tensor:
    """Draw a token for each row of a group. ``logits [num_rows, vocab_size]``, ``numbers [num_rows]`` float64.

    The numbers lie in [0, 1). A token of probability 0 (logit -inf) is never drawn while another has more; a row of
    nothing but -inf or NaN still gives some id below vocab_size. Returns int64 ``[num_rows]``.
    """
    numbers = numbers.unsqueeze(1)
    if group.is_whole:
        return _sample_whole(logits, group, numbers)
    if group.width:
        values, ids = ranked(logits, group.width)
        weights = _weights(values, values[:, :1], group.temperature)
        weights = weights.masked_fill_(_places(weights) >= group.top_k, 0.0)
        cumulative = weights.cumsum(-1)
        num_kept = _num_kept(weights, cumulative, group.top_p * cumulative[:, -1:], group.min_p)
        return ids.gather(1, _draw(cumulative, num_kept, numbers)).squeeze(1)
    return _sample_nucleus(logits, group, numbers)


def _places(weights: Tensor) -> Tensor:
    return torch.arange(weights.shape[-1], device=weights.device)


def _weights(values: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalized probabilities in float64, 1 for the best; never NaN for any temperature or masked row."""
    best = torch.where(best.isfinite(), best, 0.0)
    return values.double().sub_(best).div_(temperature).exp_()


def _sample_whole(logits: Tensor, group: SamplingGroup, numbers: Tensor) -> Tensor:
    best = logits.amax(-1, keepdim=True)
    picks = torch.empty_like(numbers, dtype=torch.int64)
    for part in row_chunks(len(logits), logits):
        weights = _weights(logits[part], best[part], group.temperature[part])
        if group.has_min_p:
            weights.masked_fill_(weights < group.min_p[part] * (1 - _TOLERANCE), 0.0)
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        pick = torch.searchsorted(cumulative, numbers[part] * total, right=True)
        # A number below 1 stays below the total, but for totals of 0 and infinity (broken logits): then the first.
        picks[part] = torch.minimum(pick, torch.searchsorted(cumulative, total))
    return picks.clamp_(0, logits.shape[-1] - 1).squeeze(1)


def _num_kept(weights: Tensor, cumulative: Tensor, top_p_mass: Tensor, min_p: Tensor) -> Tensor:
    """How many of the falling ``weights [n, width]`` top-p and min-p leave, at least 1; ``[n, 1]``."""
    keep = cumulative - weights < top_p_mass * (1 - _TOLERANCE)
    keep &= (weights >= min_p * (1 - _TOLERANCE)) & (weights > 0)
    return keep.sum(-1, keepdim=True).clamp_(min=1)


def _draw(cumulative: Tensor, num_kept: Tensor, numbers: Tensor) -> Tensor:
    """Places ``[n, 1]`` drawn among the first ``num_kept`` of each row."""
    last = num_kept - 1
    target = numbers * cumulative.gather(1, last)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _sample_nucleus(logits: Tensor, group: SamplingGroup, numbers: Tensor) -> Tensor:
    """Top-p or a large top-k: on a CPU among ever more of the likeliest tokens, on CUDA by one full sort."""
    num_rows, vocab_size = logits.shape
    best = logits.amax(-1, keepdim=True)
    total = torch.empty_like(numbers)
    for part in row_chunks(num_rows, logits):
        total[part] = _weights(logits[part], best[part], group.temperature[part]).sum(-1, keepdim=True)
    widths = () if logits.is_cuda else tuple(width for width in _NUCLEUS_WIDTHS if width < vocab_size)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    pending: Any = slice(None)
    for width in (*widths, vocab_size):
        values, ids = ranked(logits[pending], width)
        weights = _weights(values, best[pending], group.temperature[pending])
        top_k, top_p = group.top_k[pending], group.top_p[pending]
        weights.masked_fill_(_places(weights) >= top_k, 0.0)
        cumulative = weights.cumsum(-1)
        # Top-p is a share of the top-k's mass where there is a top-k, and that is known once the width covers it.
        covers_top_k = top_k <= width
        top_p_mass = top_p * torch.where(covers_top_k, cumulative[:, -1:], total[pending])
        num_kept = _num_kept(weights, cumulative, top_p_mass, group.min_p[pending])
        tokens = ids.gather(1, _draw(cumulative, num_kept, numbers[pending])).squeeze(1)
        if width == vocab_size:
            chosen[pending] = tokens
            break
        is_done = (covers_top_k | ((top_k == vocab_size) & (num_kept < width))).squeeze(1)
        rows = torch.arange(num_rows)[pending]
        chosen[rows[is_done]] = tokens[is_done]
        pending = rows[~is_done]
        if len(pending) == 0:
            break
    return chosen
