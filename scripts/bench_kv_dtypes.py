#!/usr/bin/env python3
"""One layer's attention over the KV cache, for each number format that the cache may have.

Each request of a batch brings one token and has a full context, its blocks shuffled in the pool. Formats take turns, so
that a slow moment of the machine hits each alike. Prints a table of median milliseconds, the bytes that a token takes
in the layer, and the ratio to float32; and, last, one JSON line.
"""

import argparse
from collections.abc import Callable

import bench_common as common

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, TOKENS_PER_BLOCK = 16, 8, 64, 32
CONTEXTS = (256, 1024, 4096)
BATCHES = (1, 8)


def steps(kv_name: str, context: int, batch_size: int) -> tuple[Callable[[], object], float]:
    """A function that computes one step, and the bytes a token takes."""
    import numpy as np
    import torch

    from backend_engine.attention.interface import AttentionMetadata, AttentionSpec
    from backend_engine.attention.paged_kv import paged_kv
    from backend_engine.attention.torch_attention import TorchAttention
    from backend_engine.core.kv_spec import KvSpec
    from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
    from backend_engine.ops.torch_ops import TorchOps

    size, cpu = TOKENS_PER_BLOCK, torch.device("cpu")
    num_blocks = batch_size * (context // size)
    pool = KVPool([KvSpec(NUM_KV_HEADS, HEAD_DIM)], num_blocks, size, KV_DTYPES[kv_name], cpu)
    kv = paged_kv(pool.layers[0])
    ops, generator = TorchOps(), torch.Generator().manual_seed(0)
    for first in range(0, num_blocks * size, size):
        k, v = torch.randn(2, size, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        kv.append(ops, k, v, ops.kv_rows(torch.arange(first, first + size), size))
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(batch_size, -1).astype(np.int32)
    q_lens, kv_lens = np.ones(batch_size, np.int32), np.full(batch_size, context, np.int32)
    slots = tables[:, -1] * size + size - 1
    metadata = AttentionMetadata(
        num_contexts=0,
        num_ctx_tokens=0,
        tokens_per_block=size,
        q_lens=torch.from_numpy(q_lens),
        kv_lens=torch.from_numpy(kv_lens),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slots),
        q_lens_host=q_lens,
        kv_lens_host=kv_lens,
        block_tables_host=tables,
    )
    spec = AttentionSpec(0, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    backend = TorchAttention(ops, cpu)
    backend.prepare(metadata)
    q = torch.randn(batch_size, NUM_HEADS, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, batch_size, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    return lambda: backend.forward(q, k, v, spec, kv), pool.num_bytes / (num_blocks * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    args = parser.parse_args()

    import torch

    from backend_engine.config.kv_formats import KV_FORMATS

    torch.set_num_threads(args.threads)
    rows: list[list[str]] = []
    result: dict[str, object] = {"threads": args.threads}
    with torch.inference_mode():
        for batch_size in BATCHES:
            for context in CONTEXTS:
                runs = {name: steps(name, context, batch_size) for name in KV_FORMATS}
                taken: dict[str, list[float]] = {name: [] for name in runs}
                for _ in range(args.repeats):
                    for name, (run, _) in runs.items():
                        taken[name].append(common.timed(run) * 1e3)
                medians = {name: common.median(values) for name, values in taken.items()}
                for name, ms in medians.items():
                    num_bytes = runs[name][1]
                    ratio = ms / medians["float32"]
                    rows.append(
                        [str(batch_size), str(context), name, f"{ms:.3f}", f"{ratio:.2f}", f"{num_bytes:.0f}",
                         f"{num_bytes / runs['float32'][1]:.2f}"]
                    )  # fmt: skip
                result[f"batch_{batch_size}_context_{context}"] = {name: round(ms, 4) for name, ms in medians.items()}
                common.progress(f"batch {batch_size}, context {context} done")
    header = ["batch", "context", "cache", "ms a call", "to float32", "bytes a token", "to float32"]
    common.print_table(header, rows)
    common.print_json(result)


if __name__ == "__main__":
    main()
