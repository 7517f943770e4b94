#!/usr/bin/env python3
"""Products with packed weights on a CPU, against float32: ``F.linear``, and packed for oneDNN as the engine has it.

All of them take turns, so that a slow moment of the machine hits each alike. Prints a table of median milliseconds, of
each scheme also how many times as fast as the two float32 products it is; and, last, one JSON line.
"""

import argparse
from collections.abc import Callable
from typing import Any

import bench_common as common

# Layers of SmolLM2-135M (its attention's projections, its gate or up, its head) and one of a larger model.
SHAPES = ((576, 576), (1536, 576), (49152, 576), (4096, 4096))
NUM_TOKENS = (1, 4, 16, 64, 256)
SECONDS = 0.4  # to measure one shape and number of tokens for, at least three rounds


def schemes() -> dict[str, Any]:
    """By name."""
    import torch

    from backend_engine.quantization.schemes.codebook4 import E2M1, Codebook4
    from backend_engine.quantization.schemes.float8 import Float8
    from backend_engine.quantization.schemes.groupwise_int import GroupwiseInt

    return {
        "int4": GroupwiseInt(4, 32),
        "int4 zeros": GroupwiseInt(4, 128, "codes"),
        "int4 offsets": GroupwiseInt(4, 32, "offsets"),
        "int8": GroupwiseInt(8, None),
        "int8 groups": GroupwiseInt(8, 32),
        "nvfp4": Codebook4(E2M1, 16, "e4m3", has_row_scale=True),
        "mxfp4": Codebook4(E2M1, 32, "e8m0"),
        "nf4": Codebook4(tuple(i / 8 - 1 for i in range(16)), 64),
        "e4m3": Float8(),
        "e5m2": Float8(torch.float8_e5m2, 128),
    }


def random_weight(scheme: Any, shape: tuple[int, int]) -> dict[str, Any]:
    """Components of a weight whose numbers are neither huge nor tiny."""
    import torch

    found = {}
    for name, component in scheme.components(shape[1]).items():
        size = (shape[0], *component.shape)
        if component.dtype != torch.uint8:
            found[name] = torch.rand(size).add_(0.5).to(component.dtype)
        elif name == "scales":
            found[name] = torch.randint(120, 124, size, dtype=torch.uint8)
        else:
            found[name] = torch.randint(0, 16 if name == "zeros" else 256, size, dtype=torch.uint8)
    return found


def contenders(shape: tuple[int, int], with_reference: bool) -> dict[str, Callable[[Any], Any]]:
    """Products by name; the two of float32 first."""
    import torch
    import torch.nn.functional as F

    from backend_engine.quantization.weight_scheme import WeightScheme

    plain = torch.randn(shape)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    onednn = torch.ops.mkldnn._linear_pointwise.default
    runs: dict[str, Callable[[Any], Any]] = {
        "F.linear": lambda x: F.linear(x, plain),
        "oneDNN": lambda x: onednn(x, packed, None, "none", [], ""),
    }
    for name, scheme in schemes().items():
        tensors = scheme.prepare(random_weight(scheme, shape))
        runs[name] = lambda x, scheme=scheme, tensors=tensors: scheme.multiply(tensors, x)
        if with_reference:
            runs[f"{name}, torch"] = lambda x, scheme=scheme, tensors=tensors: WeightScheme.multiply(scheme, tensors, x)
    return runs


def medians_ms(runs: dict[str, Callable[[Any], Any]], x: Any) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    for run in runs.values():
        run(x)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    while sum(map(sum, taken.values())) < SECONDS * 1e3 or len(taken["oneDNN"]) < 3:
        for name, run in runs.items():
            taken[name].append(common.timed(lambda run=run: run(x)) * 1e3)
    return {name: common.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    parser.add_argument("--with-reference", action="store_true", help="also the product in torch alone (slow)")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[list[str]] = []
    result: dict[str, object] = {"threads": args.threads}
    with torch.inference_mode():
        for shape in SHAPES:
            runs = contenders(shape, args.with_reference)
            for num_tokens in NUM_TOKENS:
                times = medians_ms(runs, torch.randn(num_tokens, shape[1]))
                base, packed = times["F.linear"], times["oneDNN"]
                shown = [f"{ms:.2f} ({base / ms:.1f}x {packed / ms:.1f}x)" for ms in list(times.values())[2:]]
                rows.append([f"{shape[0]}x{shape[1]}", str(num_tokens), f"{base:.2f}", f"{packed:.2f}", *shown])
                key = f"{shape[0]}x{shape[1]}_{num_tokens}_tokens_ms"
                result[key] = {name: round(ms, 3) for name, ms in times.items()}
                common.progress(f"{shape[0]}x{shape[1]}, {num_tokens} tokens done")
    print("milliseconds (times as fast as F.linear, as oneDNN)")
    common.print_table(["weight", "tokens", *runs], rows)
    common.print_json(result)


if __name__ == "__main__":
    main()
