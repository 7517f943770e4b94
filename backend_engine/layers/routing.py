"""Routing of a sparse mixture of experts: which experts a token goes to, and with which weights.

Pure functions of the router's logits, and ``Router``, the product before them; used by ``layers/moe.py`` only. A
token's choice depends on no other token. Everything is float32, whatever the model's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend_engine.layers.linear import Linear
from backend_engine.ops.torch_activations import sigmoid
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized

# Keeps a token whose chosen scores are all 0 at weight 0; far below what float32 can see in any other sum.
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True)
class RoutingDecl:
    """How the router chooses ``top_k`` of ``num_experts`` and weighs them.

    score: ``softmax`` or ``sigmoid`` of the router's logits, over all experts. normalize: divide the chosen scores by
    their sum; with ``softmax`` this is also the softmax over the chosen logits alone. scale: then multiply them.
    has_bias: a bias on the router's product. has_correction: a learned bias that is added to the scores for the choice
    only (DeepSeek-V3, 2024). num_groups, top_groups: experts lie in ``num_groups`` equal groups and only the best
    ``top_groups`` of them are chosen from; group_score: a group is as good as its ``max`` score (DeepSeek-V2, 2024) or
    as the sum of its ``top2`` (DeepSeek-V3).
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    has_bias: bool = False
    has_correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"

    def __post_init__(self) -> None:
        assert self.score in ("softmax", "sigmoid") and self.group_score in ("max", "top2"), self
        assert self.num_experts % self.num_groups == 0 and 1 <= self.top_groups <= self.num_groups, self
        group_size = self.num_experts // self.num_groups
        assert self.top_k <= self.top_groups * group_size, f"{self}: the best groups hold too few experts"
        assert self.group_score == "max" or group_size >= 2, f"{self}: a group of one has no second score"


def scores(logits: Tensor, decl: RoutingDecl) -> Tensor:
    """Scores of all experts from ``logits [num_tokens, num_experts]``."""
    return logits.softmax(-1) if decl.score == "softmax" else sigmoid(logits)


def within_best_groups(merits: Tensor, decl: RoutingDecl) -> Tensor:
    """``merits [num_tokens, num_experts]`` with those outside the best ``top_groups`` groups at minus infinity."""
    if decl.top_groups == decl.num_groups:
        return merits
    groups = merits.view(merits.shape[0], decl.num_groups, -1)
    if decl.group_score == "max":
        group_merits = groups.amax(-1)
    else:
        group_merits = groups.topk(2, -1).values.sum(-1)
    best = group_merits.topk(decl.top_groups, -1).indices
    is_out = torch.ones_like(group_merits, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).view_as(merits)


def route(logits: Tensor, correction: Tensor | None, decl: RoutingDecl) -> tuple[Tensor, Tensor]:
    """Experts, int64, and their weights, both ``[num_tokens, top_k]``, best first.

    ``logits [num_tokens, num_experts]``, ``correction [num_experts]``, both float32.
    """
    every = scores(logits, decl)
    merits = every if correction is None else every + correction
    best, experts = within_best_groups(merits, decl).topk(decl.top_k, -1)
    weights = best if correction is None else every.gather(-1, experts)
    if decl.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return experts, weights if decl.scale == 1.0 else weights * decl.scale


class Router(Linear):
    """The product of tokens and experts, and the choice; its weight is float32 and never quantized."""

    def __init__(self, decl: RoutingDecl, hidden_size: int, options: TensorOptions) -> None:
        exact = options._replace(dtype=torch.float32)
        super().__init__(hidden_size, (decl.num_experts,), Unquantized(), exact, decl.has_bias)
        self.decl = decl
        correction = None
        if decl.has_correction:
            empty = torch.empty(decl.num_experts, dtype=torch.float32, device=options.device)
            correction = nn.Parameter(empty, requires_grad=False)
        self.correction_bias = correction

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts, int64, and weights, float32, both ``[num_tokens, top_k]``."""
        logits = self(x.to(torch.float32))
        return route(logits, self.correction_bias, self.decl)
