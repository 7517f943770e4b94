#!/usr/bin/env python3
"""Device check: the CUDA rooms say what the CPU reference says. Needs a CUDA device; CI has none.

Runs tiny random models, one for each kind of layer and some over other forms of the KV cache, on both devices in
float32, with greedy, sampled and penalized requests in one batch, chunked prompts and a cache that is too small, and
compares token by token. Then quantizes a tiny model on both and compares what rounding did to its logits. Prints
tables; exit code 1 on a difference.
"""

import random
import sys
import tempfile
from pathlib import Path

import bench_common as common

# Rows of tests/support/tiny_models.py: attention of all kinds, latent attention, experts, recurrent states.
MODELS = ("llama", "gemma2", "phi3_long", "gpt2", "deepseek_v3", "gpt_oss", "qwen2_moe", "granite_hybrid", "mamba2")
# Rows of the same, and the forms of the KV cache.
CACHES = (("llama", "bfloat16"), ("llama", "fp8"), ("llama", "fp8_e5m2"), ("llama", "int8"), ("deepseek_v3", "int8"))
# Sums in another order decide ties between two roundings otherwise, which is all that may differ.
WORSE = 1.2


def answers(model: Path, device: str, prompts: list[list[int]], kv_dtype: str) -> list[list[int]]:
    """Token ids of every request on one device."""
    from backend_engine import LLM, KvCacheConfig, SamplingParams, SchedulerConfig

    kinds = [
        {}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 8},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=32, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(len(prompts))]
    scheduler = SchedulerConfig(max_batch_size=8, max_num_tokens=64, capacity_policy="max_utilization")
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=16 * 24, dtype=kv_dtype)
    with LLM(
        str(model), device=device, dtype="float32", scheduler_config=scheduler, kv_cache_config=cache,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


def quantization_errors(device: str, scratch: Path) -> dict[str, float]:
    """What each format does to the logits of a tiny Llama when it is quantized on ``device``, of their size."""
    from backend_engine.checkpoint.open_checkpoint import open_checkpoint
    from backend_engine.model_engine.model_loader import load_model
    from backend_engine.post_training.quantize_model import quantize_checkpoint
    from backend_engine.post_training.recipes import QFORMATS, recipe_of
    from tests.support.tiny_models import build_tiny_model
    from tests.support.window_logits import window_logits

    rng = random.Random(1)
    texts = [[rng.randrange(3, 96) for _ in range(40)] for _ in range(8)]
    build_tiny_model("llama", scratch / "source")
    expected = window_logits(load_model(scratch / "source", "float32", "cpu"), texts)
    errors = {}
    for qformat in QFORMATS:
        output = scratch / f"{device}-{qformat}"
        recipe = recipe_of(qformat, 16 if qformat.startswith("int4") else None)
        quantize_checkpoint(open_checkpoint(scratch / "source"), output, recipe, texts, "fp8", device)
        found = window_logits(load_model(output, "float32", "cpu"), texts)
        errors[qformat] = float((found - expected).norm() / expected.norm())
    return errors


def main() -> int:
    import torch

    from tests.support.tiny_models import build_tiny_model

    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device; this check needs one", file=sys.stderr)
        return 2
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 96) for _ in range(rng.choice([3, 17, 80]))] for _ in range(24)]
    rows = []
    for name, kv_dtype in (*((name, "auto") for name in MODELS), *CACHES):
        with tempfile.TemporaryDirectory() as folder:
            build_tiny_model(name, Path(folder))
            on_cpu, on_cuda = (answers(Path(folder), device, prompts, kv_dtype) for device in ("cpu", "cuda"))
        rows.append((name, kv_dtype, len(prompts), sum(a == b for a, b in zip(on_cpu, on_cuda, strict=True))))
    common.print_table(["model", "cache", "requests", "equal"], [[str(value) for value in row] for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        errors = [quantization_errors(device, Path(folder)) for device in ("cpu", "cuda")]
    worse = [name for name, error in errors[1].items() if error > WORSE * errors[0][name]]
    columns = ([name, f"{errors[0][name]:.4f}", f"{errors[1][name]:.4f}"] for name in errors[0])
    common.print_table(["quantized", "error, on the CPU", "on CUDA"], [*columns])
    total, equal = (sum(row[i] for row in rows) for i in (2, 3))
    common.print_json({"device": torch.cuda.get_device_name(), "requests": total, "equal": equal, "worse": worse})
    return 0 if equal == total and not worse else 1


if __name__ == "__main__":
    sys.exit(main())
