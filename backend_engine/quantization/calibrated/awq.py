"""AWQ: factors for the columns of a weight that make rounding kinder to the columns whose inputs are large.

Lin et al. 2023 (https://arxiv.org/abs/2306.00978). A weight is multiplied by the factors and what produces its input
is divided by them, which leaves the product as it is. Called by ``post_training``, which applies them; changes nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from backend_engine.quantization.calibrated.gptq import round_with_compensation
from backend_engine.quantization.calibrated.rounding_error import output_error, round_to_nearest
from backend_engine.quantization.grids.weight_grid import WeightGrid

# Factors stay within these: a producer in float16 can be divided and multiplied by them.
MIN_FACTOR, MAX_FACTOR = 1e-4, 1e4


def best_factors(
    weights: Sequence[Tensor], hessian: Tensor, mean_abs: Tensor, grid: WeightGrid, num_steps: int = 20
) -> Tensor:
    """Factors, float32 ``[in_features]``, by which the weights are multiplied and their common input is divided.

    ``weights``: all that read the input, each ``[rows, in_features]`` float32. ``hessian [in_features, in_features]``:
    the mean of x x^T over the inputs x; ``mean_abs [in_features]``: the mean of their magnitudes. Tried are the powers
    0 to 1 of ``mean_abs`` in ``num_steps`` steps, normalised by the root of their largest times their smallest; the
    first one, factors of 1, wins a tie. The loss is the summed error of the outputs with each weight rounded to its
    nearest on ``grid.fit``, computed exactly from ``hessian``: a grid that searches for its scales makes this slow.
    Raises ``ValueError`` (a phrase) for statistics with NaN or infinity.
    """
    assert weights and num_steps > 0, f"{len(weights)} weights, {num_steps} steps"
    if not (mean_abs.isfinite().all() and hessian.isfinite().all()):
        raise ValueError("NaN or infinity in the statistics of the inputs")
    best = torch.ones_like(mean_abs, dtype=torch.float32)
    if not mean_abs.any():
        return best
    least_loss = _loss(weights, hessian, best, grid)
    for step in range(1, num_steps + 1):
        factors = _powers(mean_abs, step / num_steps)
        loss = _loss(weights, hessian, factors, grid)
        if loss < least_loss:
            best, least_loss = factors, loss
    return best


def kindest_to_compensation(factors: Tensor, weights: Sequence[Tensor], hessian: Tensor, grid: WeightGrid) -> Tensor:
    """``factors``, their roots, or factors of 1: whichever leaves the least error when the weights are then rounded as
    GPTQ does it. What helps numbers that are rounded each for itself need not help there.

    Arguments and errors as in ``best_factors``. Rounds every weight three times.
    """
    best, least_error = factors, float("inf")
    for candidate in (torch.ones_like(factors), factors.sqrt(), factors):
        scaled = hessian / candidate / candidate.unsqueeze(1)
        error = 0.0
        for weight in weights:
            wider = weight * candidate
            rounded = round_with_compensation(wider, scaled, grid, grid.fit(wider)).rounded
            error += output_error(rounded - wider, scaled)
        if error < least_error:
            best, least_error = candidate, error
    return best


def _powers(mean_abs: Tensor, exponent: float) -> Tensor:
    """``mean_abs ** exponent``, normalised. A channel that was always 0 counts as the quietest of the others, so that
    its weights are not lost for other texts.
    """
    quietest = mean_abs[mean_abs > 0].min()
    logs = mean_abs.clamp_min(quietest).double().log()
    normalised = (logs - (logs.max() + logs.min()) / 2) * exponent
    return normalised.exp().clamp(MIN_FACTOR, MAX_FACTOR).float()


def _loss(weights: Sequence[Tensor], hessian: Tensor, factors: Tensor, grid: WeightGrid) -> float:
    """The error of the outputs with factors and rounding, summed over the weights."""
    loss = 0.0
    for weight in weights:
        scaled = weight * factors
        rounded = round_to_nearest(scaled, grid, grid.fit(scaled))
        loss += output_error(rounded / factors - weight, hessian)
    return loss
