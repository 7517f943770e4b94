"""``Linear``: one matrix product, possibly of several fused outputs; the weight scheme is a ``QuantMethod``.

Used by all layers and as the language model head. Never knows how its weight is stored.
"""

import torch
from torch import Tensor, nn

from backend_engine.quantization.quant_method import QuantMethod, TensorOptions, WeightedLayer


class Linear(WeightedLayer):
    """``x [num_tokens, in_features] -> [num_tokens, sum(out_sizes)]``; ``out_sizes`` are the fused outputs' widths.

    ``head_dim``: outputs of one attention head, for checkpoints that store fused outputs head by head.
    """

    def __init__(
        self,
        in_features: int,
        out_sizes: tuple[int, ...],
        quant: QuantMethod,
        options: TensorOptions,
        bias: bool,
        head_dim: int = 1,
    ) -> None:
        self.out_features = sum(out_sizes)
        super().__init__((self.out_features, in_features), options)
        self.head_dim = head_dim
        self.in_features = in_features
        self.out_sizes = out_sizes
        if bias:
            empty = torch.empty(self.out_features, dtype=options.dtype, device=options.device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        self.store_as(quant)

    def after_loading(self) -> None:
        """Prepare the weight for use; called once."""
        self.quant.after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant.apply(self, x)
