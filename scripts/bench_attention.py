#!/usr/bin/env python3
"""Attention over a paged cache on a CPU: the native backend beside the one in torch, one layer and step at a time.

Both take turns, so that a slow moment of the machine hits each alike; each decoding step finds another part of the
pool, as the layers of a model do. Prints a table of median milliseconds, what the native one reads or computes a
second, and how many times as fast it is; with ``--json`` one JSON line too.
"""

import argparse
from typing import Any

import bench_common as common

# Heads, heads of the cache, numbers of a head: SmolLM2-135M, Llama 3.2 1B, GPT-2.
MODELS = {"smollm2-135m": (9, 3, 64), "llama-3.2-1b": (32, 8, 64), "gpt2": (12, 12, 64)}
DECODE = [(rows, length) for rows in (1, 4, 16) for length in (128, 512, 2048, 4096)]
PREFILL = [(256, past) for past in (0, 512, 1024, 2048)]
TOKENS_PER_BLOCK = 32
SECONDS = 0.5  # to measure one case for, at least four rounds
POOL_BYTES = 256 * 2**20  # decoding walks through so much, more than a processor's caches hold


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", choices=MODELS, default="smollm2-135m", help="whose heads (default: %(default)s)")
    found.add_argument("--dtype", default="float32", help="of the cache (default: %(default)s)")
    found.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    found.add_argument("--seconds", type=float, default=SECONDS, help="for each case (default: %(default)s)")
    found.add_argument("--json", action="store_true", help="a JSON line at the end")
    return found


class Case:
    """Rows that all bring ``q_len`` of their ``kv_len`` tokens, over as many layers as fill ``POOL_BYTES``."""

    def __init__(self, model: str, dtype: Any, rows: int, q_len: int, kv_len: int) -> None:
        import numpy as np
        import torch

        from backend_engine.attention.interface import AttentionMetadata, AttentionSpec
        from backend_engine.attention.paged_kv import paged_kv
        from backend_engine.core.kv_spec import KvSpec
        from backend_engine.kv_cache.kv_pool import KVPool

        heads, kv_heads, dim = MODELS[model]
        self.spec = AttentionSpec(0, heads, kv_heads, dim, dim**-0.5)
        per_row = -(-kv_len // TOKENS_PER_BLOCK)
        self.read_bytes = rows * kv_len * kv_heads * dim * 2 * dtype.itemsize
        self.operations = rows * heads * dim * 4 * sum(range(kv_len - q_len + 1, kv_len + 1))
        num_layers = max(1, min(64, POOL_BYTES // self.read_bytes)) if q_len == 1 else 1
        pool = KVPool(
            [KvSpec(kv_heads, dim)] * num_layers, rows * per_row, TOKENS_PER_BLOCK, dtype, torch.device("cpu")
        )
        for tensor in pool.tensors:
            tensor.copy_(torch.ones(()) if dtype == torch.int8 else torch.randn(tensor.shape).to(tensor.dtype))
        self.layers = [paged_kv(layer) for layer in pool.layers]
        tables = np.random.default_rng(0).permutation(rows * per_row).reshape(rows, per_row).astype(np.int32)
        positions = np.arange(kv_len - q_len, kv_len)
        slots = tables[:, positions // TOKENS_PER_BLOCK] * TOKENS_PER_BLOCK + positions % TOKENS_PER_BLOCK
        q_lens, kv_lens = np.full(rows, q_len, np.int32), np.full(rows, kv_len, np.int32)
        self.metadata = AttentionMetadata(
            num_contexts=rows if q_len > 1 else 0,
            num_ctx_tokens=rows * q_len if q_len > 1 else 0,
            tokens_per_block=TOKENS_PER_BLOCK,
            q_lens=torch.from_numpy(q_lens),
            kv_lens=torch.from_numpy(kv_lens),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots.reshape(-1).astype(np.int32)),
            q_lens_host=q_lens,
            kv_lens_host=kv_lens,
            block_tables_host=tables,
        )
        fused = torch.randn(rows * q_len, heads + 2 * kv_heads, dim)
        self.q, self.k, self.v = fused.split((heads, kv_heads, kv_heads), 1)

    def medians(self, backends: dict[str, Any], seconds: float) -> dict[str, float]:
        """Median seconds of a layer's ``forward``, taking turns."""
        for backend in backends.values():
            backend.prepare(self.metadata)
            backend.forward(self.q, self.k, self.v, self.spec, self.layers[0])
        taken: dict[str, list[float]] = {name: [] for name in backends}
        turn = 0
        while sum(map(sum, taken.values())) < seconds or turn < 4:
            for name, backend in backends.items():
                # Another layer for each, so that neither finds what the other has just read.
                kv = self.layers[turn % len(self.layers)]
                turn += 1
                taken[name].append(
                    common.timed(lambda backend=backend, kv=kv: backend.forward(self.q, self.k, self.v, self.spec, kv))
                )
        return {name: common.median(values) for name, values in taken.items()}


def main() -> None:
    options = parser().parse_args()
    import torch

    from backend_engine.attention.native_attention import NativeAttention
    from backend_engine.attention.torch_attention import TorchAttention
    from backend_engine.kv_cache.kv_pool import KV_DTYPES
    from backend_engine.ops.torch_ops import TorchOps

    torch.set_num_threads(options.threads)
    cpu = torch.device("cpu")
    backends = {"native": NativeAttention(TorchOps(), cpu), "torch": TorchAttention(TorchOps(), cpu)}
    rows, results = [], []
    shapes = [(f"decode {n} x {length}", n, 1, length) for n, length in DECODE]
    shapes += [(f"prefill {count} after {past}", 1, count, past + count) for count, past in PREFILL]
    for name, num_rows, q_len, kv_len in shapes:
        common.progress(name)
        case = Case(options.model, KV_DTYPES[options.dtype], num_rows, q_len, kv_len)
        with torch.inference_mode():
            medians = case.medians(backends, options.seconds)
        native, reference = medians["native"], medians["torch"]
        rate = case.read_bytes if q_len == 1 else case.operations
        per_second = rate / native / 1e9
        numbers = (f"{reference * 1e3:.3f}", f"{native * 1e3:.3f}", f"{per_second:.1f}", f"{reference / native:.2f}")
        rows.append([name, *numbers])
        results.append({"case": name, "torch_ms": reference * 1e3, "native_ms": native * 1e3})
    common.print_table(["case", "torch ms", "native ms", "GB/s or GFLOP/s", "times as fast"], rows)
    if options.json:
        common.print_json(
            {"model": options.model, "dtype": options.dtype, "threads": options.threads, "cases": results}
        )


if __name__ == "__main__":
    main()
