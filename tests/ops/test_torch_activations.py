"""Activations in torch: the usual functions, whose bits do not depend on where a number stands."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backend_engine.ops.torch_activations import gelu, sigmoid, silu, softplus

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, F.silu),
    "softplus": (softplus, F.softplus),
    "gelu": (lambda x: gelu(x, "none"), F.gelu),
    "gelu tanh": (lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
}
SPECIAL = [0.0, -0.0, 1e-38, -1e-38, 19.9, 20.1, 88.0, 89.0, -88.0, -104.0, 1e4, -1e4]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_torchs_own_functions(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    x = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor(SPECIAL)))
    torch.testing.assert_close(ours(x), theirs(x.double()).float(), rtol=2e-6, atol=5e-6)
    for dtype in (torch.float16, torch.bfloat16):
        short = x.clamp(-3e4, 3e4).to(dtype)
        assert ours(short).dtype == dtype
        torch.testing.assert_close(ours(short), theirs(short.double()).to(dtype))
    assert ours(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 7, 16, 17, 24, 40, 100, 1680])
def test_a_number_has_the_same_bits_wherever_it_stands(name: str, width: int) -> None:
    function, _ = FUNCTIONS[name]
    x = torch.randn(60, width, generator=torch.Generator().manual_seed(width))
    together = function(x)
    for row in range(60):
        assert torch.equal(function(x[row : row + 1]), together[row : row + 1]), row
