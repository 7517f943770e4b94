#!/usr/bin/env python3
"""One sparse feed-forward layer: grouped by expert, against a loop over tokens and against transformers' block.

All of them hold the same float32 weights and take turns, so that a slow moment of the machine hits each alike. Prints
a table of median milliseconds over the number of tokens, and, last, one JSON line.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import bench_common as common


class Shape(NamedTuple):
    """hidden size, inner width, number of experts, experts of a token"""

    hidden: int
    size: int
    experts: int
    top_k: int


# The proportions of Mixtral 8x7B, and of the models with many narrow experts, at a fraction of their width.
SHAPES = {"8 wide experts": Shape(1024, 3584, 8, 2), "64 narrow experts": Shape(1024, 512, 64, 8)}
NUM_TOKENS = (1, 8, 64)


def our_layer(shape: Shape) -> Any:
    """An empty ``SparseMoe``."""
    import torch

    from backend_engine.attention.torch_attention import TorchAttention
    from backend_engine.layers.activations import GATED
    from backend_engine.layers.moe import MoeDecl, SparseMoe
    from backend_engine.layers.parts import ModelParts
    from backend_engine.layers.routing import RoutingDecl
    from backend_engine.ops.torch_ops import TorchOps
    from backend_engine.quantization.quant_method import TensorOptions
    from backend_engine.quantization.unquantized import Unquantized

    ops, cpu = TorchOps(), torch.device("cpu")
    parts = ModelParts(ops, TorchAttention(ops, cpu), Unquantized(), TensorOptions(torch.float32, cpu))
    decl = MoeDecl(RoutingDecl(shape.experts, shape.top_k), shape.size, GATED["silu"])
    return SparseMoe(decl, shape.hidden, parts)


def their_block(shape: Shape, implementation: str) -> Any:
    """transformers' Mixtral block with random weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.size,
        num_local_experts=shape.experts, num_experts_per_tok=shape.top_k,
    )  # fmt: skip
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        parameter.requires_grad_(False).normal_(std=0.02)
    return block


def contenders(shape: Shape) -> dict[str, Callable[[Any], Any]]:
    """By name: from ``[num_tokens, hidden]`` to the same, with the same weights."""
    import torch

    from backend_engine.layers.linear import Linear

    ours, block = our_layer(shape), their_block(shape, "eager")
    ours.router.weight.copy_(block.gate.weight)
    for expert, layer in enumerate(ours.experts):
        layer.gate_up_proj.weight.copy_(block.experts.gate_up_proj[expert])
        layer.down_proj.weight.copy_(block.experts.down_proj[expert])
    for module in ours.modules():
        if isinstance(module, Linear):
            module.after_loading()
    grouped_mm = their_block(shape, "grouped_mm")
    grouped_mm.gate, grouped_mm.experts.gate_up_proj = block.gate, block.experts.gate_up_proj
    grouped_mm.experts.down_proj = block.experts.down_proj
    return {
        "grouped": ours,
        "token by token": lambda x: torch.cat([ours(x[i : i + 1]) for i in range(x.shape[0])]),
        "transformers, eager": lambda x: block(x.unsqueeze(0))[0],
        "transformers, grouped_mm": lambda x: grouped_mm(x.unsqueeze(0))[0],
    }


def medians_ms(runs: dict[str, Callable[[Any], Any]], x: Any, repeats: int) -> dict[str, float]:
    """Median milliseconds of each, taking turns; refuses to time answers that differ."""
    expected = runs["grouped"](x)
    for name, run in runs.items():
        difference = float((run(x) - expected).abs().max())
        if difference > 1e-4:
            raise SystemExit(f"error: {name} differs from grouped by {difference}")
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            taken[name].append(common.timed(lambda run=run: run(x)) * 1e3)
    return {name: common.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[list[str]] = []
    result: dict[str, object] = {"threads": args.threads}
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            runs = contenders(shape)
            for num_tokens in NUM_TOKENS:
                times = medians_ms(runs, torch.randn(num_tokens, shape.hidden), args.repeats)
                rows.append([name, str(num_tokens), *(f"{ms:.2f}" for ms in times.values())])
                key = f"{shape.experts}_experts_{num_tokens}_tokens"
                result[key] = {run: round(ms, 3) for run, ms in times.items()}
                common.progress(f"{name}, {num_tokens} tokens done")
    common.print_table(["layer", "tokens", *(f"{name} ms" for name in runs)], rows)
    common.print_json(result)


if __name__ == "__main__":
    main()
