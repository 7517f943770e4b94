"""``SparseMoe`` and its routing against references that are written token by token and expert by expert."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from backend_engine.attention.torch_attention import TorchAttention
from backend_engine.layers.activations import GATED, ClampedSwiglu
from backend_engine.layers.linear import Linear
from backend_engine.layers.moe import MoeDecl, SparseMoe
from backend_engine.layers.parts import ModelParts
from backend_engine.layers.routing import RoutingDecl, route
from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions
from backend_engine.quantization.unquantized import Unquantized, packing_works

CPU = torch.device("cpu")
HIDDEN = 24
PLAIN = MoeDecl(RoutingDecl(8, 2), 16, GATED["silu"])
GROUPS = RoutingDecl(12, 3, "sigmoid", scale=2.5, has_correction=True, num_groups=4, top_groups=2, group_score="top2")
VARIANTS = {
    "plain": PLAIN,
    "bias": replace(PLAIN, bias=True, routing=RoutingDecl(8, 3, has_bias=True)),
    "clamped_swiglu": replace(PLAIN, act=ClampedSwiglu(1.702, 0.5), bias=True),
    "gelu": replace(PLAIN, act=GATED["gelu_pytorch_tanh"]),
    "odd_width": replace(PLAIN, size=21, shared_size=13, shared_gate=True),
    "not_normalized": replace(PLAIN, routing=RoutingDecl(8, 4, normalize=False)),
    "shared": replace(PLAIN, shared_size=40),
    "shared_with_gate": replace(PLAIN, shared_size=40, shared_gate=True),
    "sigmoid": replace(PLAIN, routing=RoutingDecl(8, 2, "sigmoid", has_correction=True)),
    "softmax_with_correction": replace(PLAIN, routing=RoutingDecl(8, 2, has_correction=True)),
    "groups_by_maximum": replace(
        PLAIN, routing=RoutingDecl(12, 4, normalize=False, scale=16.0, num_groups=4, top_groups=2)
    ),
    "groups_by_two_best": replace(PLAIN, routing=GROUPS, shared_size=8),
    "all_experts": replace(PLAIN, routing=RoutingDecl(4, 4)),
    "one_expert": replace(PLAIN, routing=RoutingDecl(1, 1)),
}


def build(
    decl: MoeDecl, pack: bool | None = None, dtype: torch.dtype = torch.float32
) -> tuple[SparseMoe, dict[str, torch.Tensor]]:
    """A loaded layer with random weights, and copies of them by name."""
    ops = TorchOps()
    parts = ModelParts(ops, TorchAttention(ops, CPU), Unquantized(pack), TensorOptions(dtype, CPU))
    layer = SparseMoe(decl, HIDDEN, parts)
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    weights = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for module in layer.modules():
        if isinstance(module, Linear):
            module.after_loading()
    return layer, weights


def tokens(num_tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def reference_route(logits: list[float], correction: list[float] | None, decl: RoutingDecl) -> dict[int, float]:
    """Weight of each chosen expert of one token, in plain Python."""
    if decl.score == "softmax":
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    merits = [a + b for a, b in zip(scores, correction or [0.0] * len(scores), strict=True)]
    size = decl.num_experts // decl.num_groups
    num_best = 1 if decl.group_score == "max" else 2
    groups = [merits[start : start + size] for start in range(0, decl.num_experts, size)]
    best_groups = sorted(range(decl.num_groups), key=lambda g: -sum(sorted(groups[g])[-num_best:]))[: decl.top_groups]
    allowed = [e for e in range(decl.num_experts) if e // size in best_groups]
    chosen = sorted(allowed, key=lambda e: -merits[e])[: decl.top_k]
    total = sum(scores[e] for e in chosen) if decl.normalize else 1.0
    return {e: scores[e] / total * decl.scale for e in chosen}


def reference_gated(x: torch.Tensor, weights: dict[str, torch.Tensor], prefix: str, decl: MoeDecl) -> torch.Tensor:
    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{prefix}.{name}.weight"], weights.get(f"{prefix}.{name}.bias"))

    return product(decl.act(TorchOps(), product(x, "gate_up_proj")), "down_proj")


def reference_moe(x: torch.Tensor, weights: dict[str, torch.Tensor], decl: MoeDecl) -> torch.Tensor:
    """Every expert on every token, times its weight, which is mostly 0."""
    logits = F.linear(x, weights["router.weight"], weights.get("router.bias")).double()
    correction = weights.get("router.correction_bias")
    out = torch.zeros_like(x)
    for token, row in enumerate(logits.tolist()):
        chosen = reference_route(row, None if correction is None else correction.tolist(), decl.routing)
        for expert in range(decl.routing.num_experts):
            out[token] += chosen.get(expert, 0.0) * reference_gated(x[token], weights, f"experts.{expert}", decl)
    if decl.shared_size:
        gate = torch.sigmoid(F.linear(x, weights["shared_gate.weight"])) if decl.shared_gate else 1.0
        out += gate * reference_gated(x, weights, "shared", decl)
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_layer_is_the_weighted_sum_of_its_experts(name: str, num_tokens: int) -> None:
    layer, weights = build(VARIANTS[name])
    x = tokens(num_tokens)
    before = x.clone()
    torch.testing.assert_close(layer(x), reference_moe(x, weights, VARIANTS[name]), atol=2e-5, rtol=2e-5)
    assert torch.equal(x, before)


def test_parameters_have_the_names_that_weight_rules_fill() -> None:
    _, weights = build(
        replace(PLAIN, routing=replace(GROUPS, has_bias=True), bias=True, shared_size=40, shared_gate=True)
    )
    ends = ("gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias")
    experts = {f"experts.{e}.{end}" for e in range(12) for end in ends}
    router = {"router.weight", "router.bias", "router.correction_bias"}
    shared = {"shared.gate_up_proj.weight", "shared.down_proj.weight", "shared_gate.weight"}
    assert set(weights) == experts | router | shared
    assert weights["shared_gate.weight"].shape == (1, HIDDEN) and weights["router.weight"].shape == (12, HIDDEN)


def test_all_tokens_may_go_to_one_expert() -> None:
    decl = replace(PLAIN, routing=RoutingDecl(8, 1, "sigmoid", has_correction=True))
    layer, weights = build(decl)
    for values in (weights["router.correction_bias"], layer.router.correction_bias):
        values.copy_(torch.eye(8)[6] * 10)
    x = tokens(33)
    expected = reference_gated(x, weights, "experts.6", decl)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_an_expert_is_run_once_and_only_if_a_token_goes_to_it(num_tokens: int) -> None:
    layer, _ = build(replace(PLAIN, routing=RoutingDecl(64, 2)))
    products: dict[str, list[tuple[int, int]]] = {"gate_up_proj": [], "down_proj": []}
    for number, expert in enumerate(layer.experts):
        for name, calls in products.items():
            expert.get_submodule(name).register_forward_hook(
                lambda module, args, out, calls=calls, number=number: calls.append((number, args[0].shape[0]))
            )
    x = tokens(num_tokens)
    numbers, counts = layer.router.choose(x)[0].unique(return_counts=True)
    layer(x)
    expected = list(zip(numbers.tolist(), counts.tolist(), strict=True))
    assert sorted(products["gate_up_proj"]) == sorted(products["down_proj"]) == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_is_the_same_whatever_it_is_batched_with(name: str) -> None:
    layer, _ = build(VARIANTS[name])
    x = tokens(70)
    alone = torch.cat([layer(row.unsqueeze(0)) for row in x])
    exact = {"atol": 0.0, "rtol": 0.0} if packing_works() else {"atol": 1e-5, "rtol": 1e-5}
    for first, last in ((0, 70), (0, 2), (3, 20), (69, 70), (11, 70)):
        torch.testing.assert_close(layer(x[first:last]), alone[first:last], **exact)


def test_no_tokens_are_no_tokens() -> None:
    layer, _ = build(replace(PLAIN, shared_size=8))
    assert layer(tokens(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_in_half_precision_the_router_stays_exact(num_tokens: int) -> None:
    layer, weights = build(replace(PLAIN, shared_size=8, shared_gate=True), dtype=torch.bfloat16)
    assert weights["router.weight"].dtype == torch.float32
    assert weights["experts.0.down_proj.weight"].dtype == torch.bfloat16
    x = tokens(num_tokens).bfloat16()
    result = layer(x)
    assert result.dtype == torch.bfloat16
    wide = {name: weight.float() for name, weight in weights.items()}
    expected = reference_moe(x.float(), wide, replace(PLAIN, shared_size=8, shared_gate=True))
    torch.testing.assert_close(result.float(), expected, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", VARIANTS)
def test_routing_is_that_of_the_plain_formula(name: str) -> None:
    decl = VARIANTS[name].routing
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(50, decl.num_experts, generator=generator) * 3
    correction = torch.randn(decl.num_experts, generator=generator) if decl.has_correction else None
    experts, weights = route(logits, correction, decl)
    assert experts.shape == weights.shape == (50, decl.top_k)
    for row, found, values in zip(logits.tolist(), experts.tolist(), weights.tolist(), strict=True):
        expected = reference_route(row, None if correction is None else correction.tolist(), decl)
        assert found == list(expected)
        assert values == pytest.approx(list(expected.values()), rel=1e-5)


def test_softmax_of_the_chosen_is_the_normalized_softmax_of_all() -> None:
    logits = torch.randn(20, 32, generator=torch.Generator().manual_seed(2)) * 4
    _, weights = route(logits, None, RoutingDecl(32, 4))
    torch.testing.assert_close(weights, logits.topk(4, -1).values.softmax(-1))


def test_the_correction_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    correction = torch.tensor([0.0, 0.0, 0.0, 9.0])
    experts, weights = route(logits, correction, RoutingDecl(4, 2, "sigmoid", normalize=False, has_correction=True))
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.0, 3.0]]).sigmoid())


def test_groups_are_judged_as_declared() -> None:
    logits = torch.tensor([[5.0, -5.0, 4.0, 4.0]])
    decl = RoutingDecl(4, 1, "sigmoid", num_groups=2, top_groups=1)
    assert route(logits, None, decl)[0].tolist() == [[0]]
    assert route(logits, None, replace(decl, group_score="top2"))[0].item() in (2, 3)


def test_a_token_that_no_expert_wants_gets_nothing_rather_than_nan() -> None:
    _, weights = route(torch.full((1, 4), -200.0), None, RoutingDecl(4, 2, "sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RoutingDecl(8, 2, "relu"),
        lambda: RoutingDecl(8, 2, group_score="mean"),
        lambda: RoutingDecl(8, 2, num_groups=3),
        lambda: RoutingDecl(8, 3, num_groups=4, top_groups=1),
        lambda: RoutingDecl(8, 1, num_groups=8, top_groups=1, group_score="top2"),
        lambda: build(replace(PLAIN, shared_gate=True)),
    ],
)
def test_a_declaration_that_means_nothing_is_an_assertion(make: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        make()
