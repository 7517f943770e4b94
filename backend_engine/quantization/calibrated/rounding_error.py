"""Rounding to the nearest numbers of a grid, and what rounding does to a product's output on calibration data.

Used by the algorithms of this room and by whoever compares what they give. Pure tensor maths on any device: nothing
here runs a model or keeps anything.
"""

import torch
from torch import Tensor

from backend_engine.quantization.grids.weight_grid import Scales, WeightGrid, per_group


def round_to_nearest(weight: Tensor, grid: WeightGrid, scales: Scales) -> Tensor:
    """``weight [rows, in_features]`` (float32) with every number rounded for itself."""
    columns = weight.shape[1]
    zero = None if scales.zero is None else per_group(scales.zero, grid.group_size, columns)
    return grid.round(weight, per_group(scales.scale, grid.group_size, columns), zero)


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """tr(D H D^T): the mean over the calibration's tokens of the squared error of the output, summed over its rows.

    ``difference [rows, in_features]``: rounded less exact. ``hessian [in_features, in_features]``: the mean of x x^T
    over the inputs x. Exact, so no forward pass is needed to compare two roundings.
    """
    total = ((difference @ hessian) * difference).sum(dtype=torch.float64)
    return max(float(total), 0.0)
