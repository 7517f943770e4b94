"""``InputStatistics``: what the inputs of a product are like over some texts; what calibrated quantizers go by.

Collected by ``block_walk.py``, batch by batch. Knows no model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputStatistics:
    """Of ``num_tokens`` inputs ``x [in_features]``, none of them centred; float32, zeros where there was no token.

    amax, mean_abs ``[in_features]``: largest and mean magnitude of each column. hessian ``[in_features, in_features]``:
    the mean of ``x x^T``, ``None`` where nobody asked for it.
    """

    num_tokens: int
    amax: Tensor
    mean_abs: Tensor
    hessian: Tensor | None

    def divided_by(self, factors: Tensor) -> "InputStatistics":
        """The statistics of inputs that are divided by ``factors [in_features]``."""
        hessian = None if self.hessian is None else self.hessian / factors / factors.unsqueeze(1)
        return InputStatistics(self.num_tokens, self.amax / factors, self.mean_abs / factors, hessian)


class InputCollector:
    """Adds up the statistics of one product's inputs of width ``in_features``."""

    def __init__(self, in_features: int, device: torch.device, with_hessian: bool) -> None:
        self._num_tokens = 0
        self._amax = torch.zeros(in_features, device=device)
        # Wider than its terms: it is a sum over all batches.
        self._sum_abs = torch.zeros(in_features, dtype=torch.float64, device=device)
        self._sum_outer = torch.zeros(in_features, in_features, device=device) if with_hessian else None

    def add(self, x: Tensor) -> None:
        """``x [num_tokens, in_features]``."""
        x = x.to(torch.float32)
        magnitudes = x.abs()
        self._num_tokens += x.shape[0]
        self._amax = torch.maximum(self._amax, magnitudes.amax(0))
        self._sum_abs += magnitudes.sum(0)
        if self._sum_outer is not None:
            self._sum_outer.addmm_(x.T, x)

    def result(self) -> InputStatistics:
        """Of everything that was added; called once."""
        count = max(1, self._num_tokens)
        hessian = None if self._sum_outer is None else self._sum_outer.div_(count)
        mean_abs = (self._sum_abs / count).to(torch.float32)
        return InputStatistics(self._num_tokens, self._amax, mean_abs, hessian)
