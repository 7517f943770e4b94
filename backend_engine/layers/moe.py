"""``SparseMoe``: a feed-forward layer of many gated experts of which every token goes to a few.

Stands where ``GatedMlp`` does. Tokens are grouped by expert, so that a step costs one pair of products for each expert
that it needs; what a token gets does not depend on which tokens are in the step with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend_engine.layers.activations import Activation
from backend_engine.layers.linear import Linear
from backend_engine.layers.mlp import GatedMlp, GatedMlpDecl
from backend_engine.layers.parts import ModelParts
from backend_engine.layers.routing import Router, RoutingDecl
from backend_engine.layers.smoothing import Smoothing
from backend_engine.ops.torch_activations import sigmoid
from backend_engine.quantization.unquantized import Unquantized


@dataclass(frozen=True)
class MoeDecl:
    """Sparse mixture of gated experts of inner width ``size``.

    shared_size: inner width of a gated layer, without bias, that every token goes through beside its experts, 0 = none;
    shared_gate: its output is multiplied by the sigmoid of a product of the token with a learned vector. bias: of the
    experts' products.
    """

    routing: RoutingDecl
    size: int
    act: Activation
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False


class SparseMoe(nn.Module):
    """See ``MoeDecl``."""

    def __init__(self, decl: MoeDecl, hidden_size: int, parts: ModelParts) -> None:
        super().__init__()
        assert decl.shared_size or not decl.shared_gate, "a gate on a shared layer that does not exist"
        expert = GatedMlpDecl(decl.size, decl.act, decl.bias)
        self.router = Router(decl.routing, hidden_size, parts.options)
        experts = [GatedMlp(expert, hidden_size, parts) for _ in range(decl.routing.num_experts)]
        self.experts = nn.ModuleList(experts)
        self.shared: GatedMlp | None = None
        self.shared_gate: Linear | None = None
        if decl.shared_size:
            self.shared = GatedMlp(GatedMlpDecl(decl.shared_size, decl.act), hidden_size, parts)
        if decl.shared_gate:
            self.shared_gate = Linear(hidden_size, (1,), Unquantized(), parts.options, bias=False)
        # The same modules: looking one up in a ModuleList costs as much as a small product.
        self._experts = tuple(experts)
        self._act = decl.act
        self._ops = parts.ops

    def readers(self) -> tuple[Linear, ...]:
        """The products that read the layer's input, the router first."""
        gates = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *gates, *(reader for mlp in self._gated() for reader in mlp.readers()))

    def smoothable(self) -> list[Smoothing]:
        """See ``Smoothing``; those within the experts and the shared layer."""
        return [found for mlp in self._gated() for found in mlp.smoothable()]

    def _gated(self) -> tuple[GatedMlp, ...]:
        return self._experts if self.shared is None else (*self._experts, self.shared)

    def forward(self, x: Tensor) -> Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape and dtype."""
        experts, weights = self.router.choose(x)
        parts = self._one_token(x, experts) if x.shape[0] == 1 else self._grouped(x, experts)
        # Always summed in the order of the router's choice, so a token's result does not depend on its neighbours.
        out = (parts * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        if self.shared is not None:
            shared = self.shared(x)
            out += shared if self.shared_gate is None else shared * sigmoid(self.shared_gate(x))
        return out

    def _one_token(self, x: Tensor, experts: Tensor) -> Tensor:
        """What each chosen expert makes of the only token, ``[1, top_k, hidden_size]``.

        Nothing is sorted, and one activation serves all: with narrow experts such calls take longer than their work.
        """
        chosen = [self._experts[expert] for expert in experts[0].tolist()]
        inner = self._act(self._ops, torch.cat([expert.gate_up_proj(x) for expert in chosen]))
        return torch.cat([expert.down_proj(inner[i : i + 1]) for i, expert in enumerate(chosen)]).unsqueeze(0)

    def _grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """What each token's chosen experts make of it, ``[num_tokens, top_k, hidden_size]``."""
        num_tokens, top_k = experts.shape
        by_expert = experts.flatten()
        # Pairs of token and expert, in the order of the experts.
        order = by_expert.argsort(stable=True)
        inputs = x.index_select(0, order // top_k)
        parts = x.new_empty(num_tokens * top_k, x.shape[1])
        start = 0
        for expert, count in enumerate(by_expert.bincount(minlength=len(self._experts)).tolist()):
            if count:
                end = start + count
                parts.index_copy_(0, order[start:end], self._experts[expert](inputs[start:end]))
                start = end
        return parts.view(num_tokens, top_k, x.shape[1])
