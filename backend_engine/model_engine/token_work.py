"""What a token of a loaded model costs to compute, from the sizes of its layers: products, and attention to a text.

Called once by the composition root, which chooses limits by it. Changes nothing, measures nothing.
"""

from collections.abc import Iterable

from torch import nn

from backend_engine.attention.interface import AttentionSpec
from backend_engine.layers.linear import Linear
from backend_engine.layers.moe import SparseMoe

ATTENTION_RATE = 0.8
"""FLOP/s of attention over prompts for one of the products', as measured on a CPU."""


def num_weights(model: nn.Module) -> int:
    """Weights of ``model``, whatever form their layers keep them in."""
    linear = [module for module in model.modules() if isinstance(module, Linear)]
    in_linear = {id(parameter) for module in linear for parameter in module.parameters()}
    others = sum(p.numel() for p in model.parameters() if id(p) not in in_linear)
    return others + sum(module.in_features * module.out_features for module in linear)


def num_layer_weights(model: nn.Module) -> float:
    """Weights of ``model``'s layers that a token meets: without embeddings and the vocabulary's projection, and of
    experts as many as it goes to (of transformers' own modules, which do not tell, all of them).
    """
    shares = {
        expert_part: moe.router.decl.top_k / moe.router.decl.num_experts
        for moe in model.modules()
        if isinstance(moe, SparseMoe)
        for expert_part in moe.experts.modules()
    }
    return sum(
        _own_weights(module) * shares.get(module, 1.0)
        for path, module in model.named_modules()
        # Layers stand in lists, so that their paths have numbers; what belongs to the vocabulary does not.
        if any(name.isdecimal() for name in path.split("."))
    )


def _own_weights(module: nn.Module) -> int:
    if isinstance(module, Linear):
        return module.in_features * module.out_features
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def attention_flop(specs: Iterable[AttentionSpec]) -> float:
    """FLOP that one more token before a token costs in all the layers ``specs``: its score, and its value's share."""
    return sum(2.0 * spec.num_heads * (spec.head_dim + (spec.value_dim or spec.head_dim)) for spec in specs)


def balanced_context_tokens(num_layer_weights: float, specs: Iterable[AttentionSpec], max_seq_len: int) -> int | None:
    """Tokens before a token to which its attention takes as long as its products; ``None`` = no number of them does.

    num_layer_weights: weights of the products. Of the layers ``specs``, those with a window below ``max_seq_len`` do
    not count: their attention stops growing with the text.
    """
    flop = attention_flop(spec for spec in specs if (spec.sliding_window or max_seq_len) >= max_seq_len)
    if flop == 0:
        return None
    return max(1, round(ATTENTION_RATE * 2.0 * num_layer_weights / flop))
