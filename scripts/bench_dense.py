#!/usr/bin/env python3
"""Products with plain weights on a CPU, against torch's: ``F.linear``, packed for oneDNN, FBGEMM's float16 and int8.

All of them take turns, so that a slow moment of the machine hits each alike. Prints a table of median milliseconds with
GB/s of weights as they are stored, or GFLOP/s; with --json one JSON line instead.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import bench_common as common

# Layers of SmolLM2-135M (head, gate, gate and up, attention's input and output, down) and one of a larger model.
SHAPES = ((49152, 576), (1536, 576), (3072, 576), (960, 576), (576, 576), (576, 1536), (4096, 4096))
NUM_TOKENS = (1, 4, 16, 64, 256)
SECONDS = 0.4  # to measure one shape and number of tokens for, at least three rounds
# Bytes of a number as each contender stores it.
NUMBER_BYTES = {
    "F.linear": 4, "oneDNN": 4, "FBGEMM fp16": 2, "FBGEMM int8": 1,
    "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I16": 2, "W8A8": 1,
}  # fmt: skip


def contenders(shape: tuple[int, int]) -> dict[str, Callable[[Any], Any]]:
    """Products by name, torch's first."""
    import torch
    import torch.nn.functional as F

    from backend_engine.ops.dense_packing import pack_dense
    from backend_engine.ops.dense_products import DenseKind, multiply_dense
    from backend_engine.ops.native_runtime import native_runtime

    plain = torch.randn(shape)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    onednn = torch.ops.mkldnn._linear_pointwise.default
    half = torch.ops.quantized.linear_prepack_fp16(plain, None)
    scales, zeros = plain.abs().amax(1).double() / 127, torch.zeros(shape[0], dtype=torch.long)
    eight = torch.ops.quantized.linear_prepack(torch.quantize_per_channel(plain, scales, zeros, 0, torch.qint8), None)
    runs: dict[str, Callable[[Any], Any]] = {
        "F.linear": lambda x: F.linear(x, plain),
        "oneDNN": lambda x: onednn(x, packed, None, "none", [], ""),
        "FBGEMM fp16": lambda x: torch.ops.quantized.linear_dynamic_fp16(x, half),
        "FBGEMM int8": lambda x: torch.ops.quantized.linear_dynamic(x, eight, True),
    }
    assert native_runtime() is not None, "there is no native library here to measure"
    for kind in DenseKind:
        weight = pack_dense(plain, kind)
        runs[kind.name] = lambda x, weight=weight: multiply_dense(weight, x)
    return runs


def medians(runs: dict[str, Callable[[Any], Any]], x: Any) -> dict[str, float]:
    """Median seconds of each, taking turns."""
    for run in runs.values():
        run(x)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    while sum(map(sum, taken.values())) < SECONDS or len(taken["F32"]) < 3:
        for name, run in runs.items():
            taken[name].append(common.timed(lambda run=run: run(x)))
    return {name: common.median(values) for name, values in taken.items()}


def shown(name: str, seconds: float, shape: tuple[int, int], num_tokens: int) -> str:
    """Milliseconds, and what they come to."""
    numbers = shape[0] * shape[1]
    rate = numbers * NUMBER_BYTES[name] if num_tokens <= 4 else 2 * numbers * num_tokens
    return f"{seconds * 1e3:.3f} ({rate / seconds / 1e9:.0f} {'GB/s' if num_tokens <= 4 else 'GF'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    args = parser.parse_args()

    import torch

    warnings.filterwarnings("ignore", message=".*quantized tensor creation.*")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[list[str]] = []
    result: dict[str, object] = {"threads": args.threads, "commit": common.commit()}
    with torch.inference_mode():
        for shape in SHAPES:
            runs = contenders(shape)
            for num_tokens in NUM_TOKENS:
                times = medians(runs, torch.randn(num_tokens, shape[1]))
                cells = [shown(name, seconds, shape, num_tokens) for name, seconds in times.items()]
                rows.append([f"{shape[0]}x{shape[1]}", str(num_tokens), *cells])
                key = f"{shape[0]}x{shape[1]}_{num_tokens}_tokens_ms"
                result[key] = {name: round(seconds * 1e3, 4) for name, seconds in times.items()}
                common.progress(f"{shape[0]}x{shape[1]}, {num_tokens} tokens done")
    if args.json:
        common.print_json(result)
    else:
        common.print_table(["weight", "tokens", *NUMBER_BYTES], rows)


if __name__ == "__main__":
    main()
