"""SmoothQuant: factors that move the outliers of a product's inputs into its weight, so that both round well.

Xiao et al. 2022 (https://arxiv.org/abs/2211.10438). The input is divided by the factors, by its producer, and the
weight is multiplied by them. Called by ``post_training``, which applies them; changes nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from backend_engine.quantization.calibrated.awq import MAX_FACTOR, MIN_FACTOR


def smoothing_factors(input_amax: Tensor, weights: Sequence[Tensor], strength: float = 0.5) -> Tensor:
    """max|x|^strength / max|w|^(1 - strength) of every channel, float32 ``[in_features]``.

    ``input_amax [in_features]``: the largest magnitude of each channel of the input; ``weights``: all that read it,
    each ``[..., in_features]``. ``strength``: 0 to 1, how much of the difficulty moves into the weights. A channel
    whose input, or whose weights, are all 0 gets 1. Raises ``ValueError`` (a phrase) for NaN or infinity.
    """
    assert weights and 0 <= strength <= 1, f"{len(weights)} weights, strength {strength}"
    weight_amax = torch.stack([weight.abs().flatten(0, -2).amax(0) for weight in weights]).amax(0).double()
    input_amax = input_amax.double()
    for name, amax in (("inputs", input_amax), ("weights", weight_amax)):
        if not amax.isfinite().all():
            raise ValueError(f"NaN or infinity in the {name}")
    factors = input_amax.pow(strength) / weight_amax.pow(1 - strength)
    is_used = (input_amax > 0) & (weight_amax > 0)
    return torch.where(is_used, factors, 1.0).clamp(MIN_FACTOR, MAX_FACTOR).float()
