"""``pack_linears``: linear layers of a transformers model, multiplied by our weight scheme in place of their own.

Called once, while a model is loaded, with the layers that ran in the recording pass: one whose weight is only read
otherwise keeps it. Knows no model.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from backend_engine.layers.linear import Linear
from backend_engine.quantization.quant_method import QuantMethod, TensorOptions

# Exact types only: a subclass may do something else with its weight.
LINEAR_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)


class FlatLinear(Linear):
    """A ``Linear`` over any number of leading dimensions, with the weights of a transformers layer."""

    def __init__(self, source: nn.Module, quant: QuantMethod, options: TensorOptions) -> None:
        """``source``: one of ``LINEAR_TYPES``; its bias, and its weight where it need not be transposed, are shared."""
        weight, bias = source.weight, source.bias
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)), type(source)
        if isinstance(source, Conv1D):
            weight = weight.T.contiguous()
        empty = options._replace(device=torch.device("meta"))
        super().__init__(weight.shape[1], (weight.shape[0],), quant, empty, bias is not None)
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = bias
        self.after_loading()
        if self.weight is None:
            # Code that asks for the weight's dtype or shape gets an answer; code that computes with it gets NaN.
            nothing = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device)
            self.weight = nn.Parameter(nothing.expand(weight.shape), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.quant.apply(self, flat).view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, linears: Collection[nn.Module], quant: QuantMethod, options: TensorOptions) -> None:
    """Replace ``linears`` wherever ``model`` holds them. One that shares its weight leaves the other holder's alone."""
    wanted = set(linears)
    made: dict[nn.Module, FlatLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in wanted:
                if child not in made:
                    made[child] = FlatLinear(child, quant, options)
                    # Whoever else holds the module must not hold its weight beside ours.
                    child.register_parameter("weight", None)
                    child.register_parameter("bias", None)
                setattr(parent, name, made[child])
