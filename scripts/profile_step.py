#!/usr/bin/env python3
"""Where the time of a step goes: the stages of the step, and the operations of its layers.

    python scripts/profile_step.py
    python scripts/profile_step.py --batch 16 --prompt 512 --weight-only-precision int8
    python scripts/profile_step.py --prompt 512 --steps 1 --weight-only-precision int16

Runs ``--batch`` requests of ``--prompt`` tokens for ``--steps`` tokens; their prompts are computed before, so that all
begin and end together. Stages: means over the steps with no prompt in them; with ``--steps 1`` there are none, and it
is the prompts' steps that are told of. Operations: the layers of the last step are run again, operation by operation
(recorded layers, on a CPU). Prints tables and, last, one JSON line; in it, too, how fast memory was read before.
"""

import argparse
import random
import statistics
import threading
from collections import defaultdict
from typing import Any

import bench_common as common

STAGES = ("schedule_ms", "forward_ms", "decode_ms", "emit_ms")
REPEATS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint or an engine folder (default: the model that serve.sh takes)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=common.usable_cores())
    parser.add_argument("--weight-only-precision", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    from backend_engine.config.engine_args import EngineArgs
    from backend_engine.config.engine_config import KvCacheConfig
    from backend_engine.executor.build import create_engine

    bandwidth = common.memory_bandwidth_gb_s(options.threads)
    length = options.prompt + options.steps
    engine = create_engine(
        EngineArgs(
            options.model or common.default_model(),
            max_batch_size=options.batch,
            max_seq_len=length,
            num_threads=options.threads,
            weight_only_precision=options.weight_only_precision,
            kv_cache_config=KvCacheConfig(max_tokens=options.batch * (length + 64), dtype=options.kv_cache_dtype),
        )
    )
    engine.executor.start()
    if options.steps > 1:
        run(engine.executor, options, 1)
    run(engine.executor, options, options.steps)
    steps = [s for s in engine.executor.recent_iterations() if is_told_of(s, options)]
    stages = {stage: statistics.fmean(getattr(step, stage) for step in steps) for stage in STAGES}
    common.print_table(["stage", "ms a step"], [[name.removesuffix("_ms"), f"{ms:.2f}"] for name, ms in stages.items()])
    operations = by_kind(engine.executor)
    if operations:
        print()
        common.print_table(["operation", "calls", "ms a step"], [[k, str(n), f"{ms:.3f}"] for k, n, ms in operations])
    engine.executor.shutdown()
    common.print_json(
        {
            "batch": options.batch, "prompt": options.prompt, "threads": options.threads,
            "weight_only_precision": options.weight_only_precision, "kv_cache_dtype": options.kv_cache_dtype,
            "memory_bandwidth_gb_s": round(bandwidth, 1),
            "stages_ms": {name: round(ms, 3) for name, ms in stages.items()},
            "operations_ms": {kind: round(ms, 3) for kind, _, ms in operations}, "commit": common.commit(),
        }
    )  # fmt: skip


def is_told_of(step: Any, options: argparse.Namespace) -> bool:
    """Whether the stages of a step count."""
    if options.steps == 1:
        return bool(step.num_context)
    return bool(step.num_context == 0 and step.num_generation == options.batch)


def run(executor: Any, options: argparse.Namespace, steps: int) -> None:
    """All requests from beginning to end, each for ``steps`` tokens; the same ones each time."""
    from backend_engine.config.sampling_params import SamplingParams
    from backend_engine.core.request import LlmRequest, StopConditions

    left = threading.Semaphore(0)

    def sink(output: Any) -> None:
        if output.finished:
            left.release()

    vocab_size = executor._model_engine.vocab_size
    rng = random.Random(1)
    prompts = [rng.choices(range(vocab_size), k=options.prompt) for _ in range(options.batch)]
    stop = StopConditions(steps)
    executor.enqueue([LlmRequest(i + 1, ids, SamplingParams(), stop, sink) for i, ids in enumerate(prompts)])
    for _ in prompts:
        left.acquire()


def by_kind(executor: Any) -> list[tuple[str, int, float]]:
    """Name, number and milliseconds of the kinds of operations in the layers, what takes longest first."""
    from backend_engine.ops.native_runtime import OpKind

    recorded = executor._model_engine.recorded_layers
    if recorded is None:
        return []
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for kind, seconds in recorded.profile(REPEATS):
        name = OpKind(kind).name.lower()
        counts[name] += 1
        times[name] += seconds * 1e3
    return sorted(((name, counts[name], ms) for name, ms in times.items()), key=lambda row: -row[2])


if __name__ == "__main__":
    main()
