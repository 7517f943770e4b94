"""GPTQ: rounds a weight column by column, the columns that are left making up for the error of each one.

Frantar et al. 2022 (https://arxiv.org/abs/2210.17323), with columns in the order of falling ``diag(H)`` and scales
that were fitted before, to groups of neighbours in the original order: what is stored needs no order of its own.
Called for one weight at a time by ``post_training``; never runs a model, never changes what it is given.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from backend_engine.quantization.calibrated.rounding_error import output_error, round_to_nearest
from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid

_BLOCK = 128


class Compensated(NamedTuple):
    """rounded: float32 ``[rows, in_features]``, numbers of the grid. relative_error: tr(D H D^T) / tr(W H W^T), the
    share of the output's energy that the error D is; infinite where the exact output is 0 and the rounded one is not.
    damping: the one with which the Hessian had a Cholesky factor; ``None`` = it had none, or no input was ever other
    than 0, and every number was rounded to its nearest.
    """

    rounded: Tensor
    relative_error: float
    damping: float | None


def round_with_compensation(
    weight: Tensor, hessian: Tensor, grid: WeightGrid, scales: Scales, damping: float = 0.01
) -> Compensated:
    """Round ``weight [rows, in_features]`` with the smallest error of its output that a greedy order finds.

    ``hessian [in_features, in_features]``: the mean (or any multiple) of x x^T over the inputs x; both float32, on one
    device. ``damping``: the part of the mean of ``diag(H)`` that is added to it; tenfold, up to 1, while H is not
    positive definite. Columns whose input was always 0 are rounded to their nearest. Raises ``ValueError`` (a phrase)
    for NaN or infinity in either.
    """
    assert weight.ndim == 2 and hessian.shape == (weight.shape[1],) * 2, f"{weight.shape} with {hessian.shape}"
    assert 0 < damping <= 1, f"damping {damping}"
    for name, tensor in (("weight", weight), ("statistics of its inputs", hessian)):
        if not tensor.isfinite().all():
            raise ValueError(f"NaN or infinity in the {name}")
    rounded = round_to_nearest(weight, grid, scales)
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)[: int((diagonal > 0).sum())]
    factor = _damped_factor(hessian[order][:, order], damping)
    if factor is not None:
        rounded[:, order] = _round_columns(weight, factor.upper, grid, scales, order)
    error, energy = output_error(rounded - weight, hessian), output_error(weight, hessian)
    relative_error = error / energy if energy > 0 else float("inf") if error > 0 else 0.0
    return Compensated(rounded, relative_error, None if factor is None else factor.damping)


class _Factor(NamedTuple):
    """``upper.T @ upper`` = the inverse of the damped Hessian."""

    upper: Tensor
    damping: float


def _damped_factor(hessian: Tensor, damping: float) -> _Factor | None:
    """The upper Cholesky factor of the inverse, through one factorisation: H = R R^T with R upper triangular (that of
    the reversed H, reversed) has the inverse R^-T R^-1.
    """
    if not len(hessian):
        return None
    diagonal = hessian.diagonal().clone()
    while True:
        hessian.diagonal().copy_(diagonal + damping * diagonal.mean())
        reversed_lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        if not failed:
            identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
            upper = torch.linalg.solve_triangular(reversed_lower.flip(0, 1), identity, upper=True)
            if upper.isfinite().all():
                return _Factor(upper, damping)
        if damping >= 1:
            return None
        damping = min(damping * 10, 1.0)


def _round_columns(weight: Tensor, upper: Tensor, grid: WeightGrid, scales: Scales, order: Tensor) -> Tensor:
    """The columns ``order`` of the weight, rounded one after the other, ``[rows, len(order)]``.

    Everything is kept a column a row, so that a column is one stretch of memory. What earlier columns add to a later
    one is computed when its turn comes: for a block of columns in one product, and within the block column by column.
    """
    columns = weight.T[order]
    errors, rounded = torch.empty_like(columns), torch.empty_like(columns)
    group_size = grid.group_size or weight.shape[1]
    groups = (order // group_size).tolist()
    scale, zero = scales.scale.T.contiguous(), None if scales.zero is None else scales.zero.T.contiguous()
    pivots = upper.diagonal().tolist()
    for start in range(0, len(order), _BLOCK):
        block = columns[start : start + _BLOCK]
        end = start + len(block)
        block = torch.addmm(block, upper[:start, start:end].T, errors[:start], alpha=-1)
        for i in range(start, end):
            column = torch.addmv(block[i - start], errors[start:i].T, upper[start:i, i], alpha=-1)
            group = groups[i]
            rounded[i] = grid.round(column, scale[group], None if zero is None else zero[group])
            errors[i] = (column - rounded[i]) / pivots[i]
    return rounded.T
