"""The search for the scales of a weight, which the grids share: candidates for each group, the error each leaves.

A grid proposes scales and rounds; here they are tried on some rows at a time. A row's scales do not depend on the other
rows, to the last bit: the arithmetic is of operations that are rounded correctly, and sums are of a fixed order.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SHRUNK = tuple(1 - step / 40 for step in range(20))
"""Parts of a group's range that a search of clipped ranges tries, the whole one first."""

# Numbers of a weight that are tried at once: on a CPU, those of a thread stay in a core's cache.
_CHUNK_NUMBERS_OF_THREAD = 1 << 16
_CHUNK_NUMBERS_ON_GPU = 1 << 21
# Columns that are summed at once. A longer sum of one row is split over threads, which is another order.
_SUMMED_COLUMNS = 1 << 14


class Candidate(NamedTuple):
    """scale, zero: of each group, ``[num_rows, num_groups, 1]``, as ``Scales`` has them."""

    scale: Tensor
    zero: Tensor | None = None


Propose = Callable[[Tensor], Iterator[Candidate]]
"""Candidates for groups ``[num_rows, num_groups, size]`` (float32), that of the whole range first."""

Nearest = Callable[[Tensor, Tensor | None], Tensor]
"""Weights in steps (divided by their scale) -> those of the grid, a new tensor, in steps; ``zero`` broadcasts."""


def largest_number(weight: Tensor) -> float:
    """The largest absolute value. Raises ``ValueError`` (a phrase) where a number is not finite."""
    low, high = (float(end) for end in torch.aminmax(weight))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("the weight has numbers that are not finite")
    return max(-low, high)


def search_scales(
    weight: Tensor, group_size: int | None, importance: Tensor | None, propose: Propose, nearest: Nearest
) -> Candidate:
    """The candidate of the least error for each group of ``weight [rows, in_features]``, as ``[rows, num_groups]``.

    The error is the sum of ``|rounded - weight| ** 2.5``, times the columns' ``importance [in_features]``: between the
    squares, and a norm that lets outliers decide. GPTQ's reference (https://github.com/IST-DASLab/gptq) has 2.4; 2.5 is
    two multiplications and a root. Of equal ones the first counts. Raises ``ValueError`` (a phrase) for an importance
    that is negative or not finite.
    """
    rows, columns = weight.shape
    size = columns if group_size is None else group_size
    assert columns % size == 0, (columns, size)
    counts = None if importance is None else _checked(importance, columns).view(-1, size)
    scale = torch.empty(rows, columns // size, device=weight.device)
    zero: Tensor | None = None
    for chunk in _chunks(rows, columns, weight.device):
        grouped = weight[chunk].to(torch.float32).reshape(-1, columns // size, size)
        found = _best(grouped, counts, propose, nearest)
        scale[chunk] = found.scale.squeeze(-1)
        if found.zero is not None:
            zero = torch.empty_like(scale) if zero is None else zero
            zero[chunk] = found.zero.squeeze(-1)
    return Candidate(scale, zero)


def _chunks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    is_cpu = device.type == "cpu"
    numbers = _CHUNK_NUMBERS_OF_THREAD * torch.get_num_threads() if is_cpu else _CHUNK_NUMBERS_ON_GPU
    step = max(1, numbers // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _checked(importance: Tensor, columns: int) -> Tensor:
    """``importance`` with 1 as its largest number, of which only ratios matter."""
    assert importance.shape == (columns,), (importance.shape, columns)
    counts = importance.to(torch.float32)
    low, high = (float(end) for end in torch.aminmax(counts))
    if not (math.isfinite(high) and low >= 0):
        raise ValueError(f"the columns' importance is between {low} and {high}; expected numbers from 0 on")
    return counts / high if high > 0 else counts


def _best(grouped: Tensor, counts: Tensor | None, propose: Propose, nearest: Nearest) -> Candidate:
    candidates = propose(grouped)
    first = best = next(candidates)
    least: Tensor | None = None
    for candidate in candidates:
        if least is None:
            least = _error(grouped, counts, first, first.scale, nearest)
        error = _error(grouped, counts, candidate, first.scale, nearest)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scale = torch.where(is_better, candidate.scale, best.scale)
        if candidate.zero is None or best.zero is None:
            best = Candidate(scale)
        else:
            best = Candidate(scale, torch.where(is_better, candidate.zero, best.zero))
    return best


def _error(grouped: Tensor, counts: Tensor | None, candidate: Candidate, unit: Tensor, nearest: Nearest) -> Tensor:
    """``[num_rows, num_groups, 1]``, with the scale ``unit`` as 1, so that tiny and huge weights are alike."""
    steps = grouped / candidate.scale
    errors = _power(nearest(steps, candidate.zero).sub_(steps).abs_())
    if counts is not None:
        errors.mul_(counts)
    total = torch.zeros_like(unit)
    for part in torch.split(errors, _SUMMED_COLUMNS, -1):
        total += part.sum(-1, keepdim=True)
    return total.mul_(_power(candidate.scale / unit))


def _power(values: Tensor) -> Tensor:
    """``values ** 2.5`` of numbers from 0 on. ``pow`` depends on where in a vector register a number comes to lie."""
    root = values.sqrt()
    return root.mul_(values).mul_(values)
