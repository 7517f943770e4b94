#!/usr/bin/env python3
"""Print what a model would take of a device's memory, and what fits beside it, from its files' headers alone.

    python scripts/plan_memory.py --model FOLDER_OR_FILE_OR_HUB_ID --device cuda --device-memory 24GB
    python scripts/plan_memory.py --model FOLDER --device cpu --kv-cache-dtype float32 int8 --max-batch-size 16

Loads nothing. With --tp or --pp it tells what each rank would hold, by rule: a plan, since the engine runs on one
device. Prints tables and, last, one JSON line; exits with 1 after one line that says why there is no plan.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import bench_common as common
import inspect_checkpoint
from command_line import OneLineParser, whole_number

from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from backend_engine.config.engine_config import EngineConfig
    from backend_engine.config.model_facts import ModelFacts
    from backend_engine.kv_cache.cache_plan import CachePlan
    from backend_engine.model_engine.memory_plan import MemoryPlan
    from backend_engine.model_engine.step_memory import StepBytes

UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
RULE = (
    "a plan: the engine runs on one device today. Heads, inner widths and the vocabulary are divided over --tp ranks, "
    "heads of keys and values fewer than the ranks are on several of them, experts go to the ranks whole; layers are "
    "divided over --pp stages. Numbers are those of the fullest rank."
)


class Question(NamedTuple):
    """What is asked: the model with its limits, the memory of each device in bytes, and the ranks."""

    configs: Sequence["EngineConfig"]
    chosen_kv_dtype: str
    memory_bytes: int
    tp: int
    pp: int


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        plan_and_print(options)
    except EngineError as error:
        print(f"plan_memory: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("plan_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a file, or an id on the Hugging Face Hub")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    parser.add_argument("--device-memory", help="of each device, like 16GiB or 24GB; default: what is here")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16, or auto (default)")
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", metavar="DTYPE", help=f"auto, {', '.join(KV_FORMATS)}; default: all"
    )
    parser.add_argument("--max-batch-size", type=whole_number, help="most requests in a step")
    parser.add_argument("--max-seq-len", type=whole_number, help="most tokens of a request; default: the model's")
    parser.add_argument("--max-num-tokens", type=whole_number, help="most tokens in a step")
    parser.add_argument("--free-gpu-memory-fraction", type=fraction, default=0.9, help="of what the weights leave")
    parser.add_argument("--tp", type=whole_number, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=whole_number, default=1, help="pipeline-parallel stages")
    parser.add_argument("--model-backend", default="auto", help="native, transformers, or auto (default)")
    parser.add_argument("--trust-remote-code", action="store_true", help="whether code in the folder may run")
    return parser.parse_args(argv)


def fraction(text: str) -> float:
    """More than 0, at most 1."""
    if not re.fullmatch(r"[01]?(\.[0-9]+)?", text) or not text or not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a number above 0, at most 1")
    return float(text)


def bytes_of(text: str) -> int:
    """A number of bytes with or without a unit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    count = int(float(match[1]) * UNITS[match[2].upper()]) if match and match[2].upper() in UNITS else 0
    if count < 1:
        raise ConfigError(f"--device-memory {text!r} is not allowed; use a number of bytes like 16GiB, 24GB or 512MiB")
    return count


def plan_and_print(options: argparse.Namespace) -> None:
    from backend_engine.hub import local_path
    from backend_engine.kv_cache.cache_plan import Stage, plan_cache
    from backend_engine.model_engine.model_loader import describe_model, plan_memory

    model = local_path(options.model)
    facts = describe_model(model, options.model_backend, options.trust_remote_code)
    question = ask(options, model, facts)
    config = question.configs[0]
    backend = config.model_backend
    plan = plan_memory(model, config.dtype, config.device, backend, options.trust_remote_code, question.tp)
    if plan is None:
        raise ConfigError(
            f"{model} cannot be planned: model_backend {backend} decodes packed weights while it loads them, which "
            "headers do not tell; only model_backend native keeps them packed"
        )
    weights = plan.stage_bytes(question.pp)
    result = about_weights(options.model, question, plan, weights)
    if plan.cache_specs is None:
        print(f"KV cache and step: not known before the model is loaded (model_backend {backend})")
        common.print_json({**result, "kv_cache": None, "step_estimate": None})
        return
    parts = [plan.cache_specs[layers.start : layers.stop] for layers in plan.stages(question.pp)]
    stages = [Stage(specs, size) for specs, size in zip(parts, weights, strict=True)]
    plans = [plan_cache(config, stages, question.memory_bytes) for config in question.configs]
    rows = about_cache(question, plans)
    steps = about_step(question, plan, plans, max(weights))
    common.print_json({**result, "kv_cache": rows, "step_estimate": steps})


def ask(options: argparse.Namespace, model: str, facts: "ModelFacts") -> Question:
    """Decide what is left open and check the rest, as the engine does."""
    from backend_engine.config.engine_args import EngineArgs
    from backend_engine.config.engine_config import KvCacheConfig
    from backend_engine.config.resolve import DeviceInfo, resolve

    device = "cuda" if options.device == "cuda" or (options.device == "auto" and gpu_memory_bytes()) else "cpu"

    def config_for(kv_dtype: str) -> "EngineConfig":
        args = EngineArgs(
            model,
            dtype=options.dtype,
            device=device if options.device == "auto" else options.device,
            max_batch_size=options.max_batch_size,
            max_seq_len=options.max_seq_len,
            max_num_tokens=options.max_num_tokens,
            kv_cache_config=KvCacheConfig(dtype=kv_dtype, free_gpu_memory_fraction=options.free_gpu_memory_fraction),
            model_backend=options.model_backend,
            trust_remote_code=options.trust_remote_code,
        )
        return resolve(args, facts, DeviceInfo(device == "cuda", 1)).config

    chosen = config_for("auto").kv_cache.dtype
    names = options.kv_cache_dtype or [chosen, *(name for name in KV_FORMATS if name != chosen)]
    configs = [config_for(name) for name in names]
    memory = bytes_of(options.device_memory) if options.device_memory is not None else memory_here(device)
    return Question(configs, chosen, memory, options.tp, options.pp)


def gpu_memory_bytes() -> int:
    """Memory of the first GPU, 0 without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def memory_here(device: str) -> int:
    from backend_engine.kv_cache.sizing import process_memory_bytes

    found = process_memory_bytes() if device == "cpu" else gpu_memory_bytes()
    if not found:
        raise ConfigError("--device-memory is not given and there is no CUDA device to ask; use a size like 24GB")
    return found


def about_weights(model: str, question: Question, plan: "MemoryPlan", weights: list[int]) -> dict[str, Any]:
    config = question.configs[0]
    print(f"{model}: {config.dtype} on {config.device} with {size(question.memory_bytes)}\n")
    if question.tp > 1 or question.pp > 1:
        print(f"--tp {question.tp} --pp {question.pp} is {RULE}\n")
    kinds: dict[tuple[str, str], list[int]] = {}
    for weight in plan.weights:
        kind = ".".join("N" if piece.isdigit() else piece for piece in weight.name.split("."))
        found = kinds.setdefault((kind, form(weight.form)), [0, 0, 0])
        for i, count in enumerate((1, weight.num_bytes, weight.rank_bytes)):
            found[i] += count
    has_ranks = question.tp > 1
    header = ["weights", "tensors", "kept as", "bytes", *(["on a tp rank"] if has_ranks else [])]
    rows = [
        [kind, str(count), kept, size(whole), *([size(part)] if has_ranks else [])]
        for (kind, kept), (count, whole, part) in kinds.items()
    ]
    total = ["all", str(len(plan.weights)), "", size(plan.num_bytes)]
    common.print_table(
        header, [*rows, [*total, *([size(sum(w.rank_bytes for w in plan.weights))] if has_ranks else [])]]
    )
    if question.pp > 1:
        print("\nweights of a rank, stage by stage: " + ", ".join(size(count) for count in weights))
    print()
    return {
        "model": model,
        "device": config.device,
        "device_memory_bytes": question.memory_bytes,
        "dtype": config.dtype,
        "tp": question.tp,
        "pp": question.pp,
        "max_batch_size": config.scheduler.max_batch_size,
        "max_seq_len": config.max_seq_len,
        "max_num_tokens": config.scheduler.max_num_tokens,
        "weight_bytes": plan.num_bytes,
        "rank_weight_bytes": weights,
    }


def form(kept: object) -> str:
    """A dtype or a scheme in words."""
    text = str(kept)
    return text.removeprefix("torch.") if text.startswith("torch.") else inspect_checkpoint.describe_scheme(kept)


def about_cache(question: Question, plans: Sequence["CachePlan"]) -> list[dict[str, Any]]:
    config = question.configs[0]
    print(
        f"KV cache, requests of max_seq_len {config.max_seq_len}; the engine takes it for max_batch_size "
        f"{config.scheduler.max_batch_size} of them at most, and at most {share(config)}:"
    )
    header = ["KV cache", "bytes a token", "tokens a block", "bytes a block", "taken", "tokens", "requests"]
    rows, found = [], []
    for each, plan in zip(question.configs, plans, strict=True):
        name, tokens = each.kv_cache.dtype, plan.num_blocks * plan.tokens_per_block
        fitting = plan.blocks_that_fit
        row = {
            "dtype": name,
            "bytes_per_token": plan.token_bytes,
            "state_bytes_per_block": plan.state_bytes,
            "tokens_per_block": plan.tokens_per_block,
            "bytes_per_block": plan.block_bytes,
            "blocks": plan.num_blocks,
            "bytes": plan.num_bytes,
            "tokens": tokens,
            "requests": plan.num_requests(plan.num_blocks),
            "tokens_that_fit": fitting * plan.tokens_per_block,
            "requests_that_fit": plan.num_requests(fitting),
        }
        found.append(row)
        mark = " (chosen)" if name == question.chosen_kv_dtype else ""
        rows.append([
            name + mark, str(plan.token_bytes), str(plan.tokens_per_block), str(plan.block_bytes),
            size(plan.num_bytes) if plan.num_blocks else "no room", str(tokens), str(row["requests"]),
            f"{row['tokens_that_fit']}", str(row["requests_that_fit"]),
        ])  # fmt: skip
    common.print_table([*header, "tokens that fit", "requests that fit"], rows)
    if any(plan.state_bytes for plan in plans):
        print(f"Of each block, {max(plan.state_bytes for plan in plans)} bytes are recurrent states.")
    print()
    return found


def share(config: "EngineConfig") -> str:
    if config.device == "cpu":
        return "a quarter of the memory"
    return f"{config.kv_cache.free_gpu_memory_fraction} of what the weights leave"


def about_step(
    question: Question, plan: "MemoryPlan", plans: Sequence["CachePlan"], weights: int
) -> list[dict[str, Any]]:
    found = []
    for config, cache in zip(question.configs, plans, strict=True):
        step = step_bytes(config, plan, cache)
        left = question.memory_bytes - weights - cache.num_bytes
        found.append({"kv_cache_dtype": config.kv_cache.dtype, **step._asdict(), "total": step.total, "left": left})
    max_num_tokens = question.configs[0].scheduler.max_num_tokens
    print(
        f"A step of max_num_tokens {max_num_tokens}: an estimate (hidden states + the larger "
        "of attention or state space and feed-forward + float32 logits of max_batch_size rows)"
    )
    names = ("stream", "mixer", "mlp", "logits", "total", "left")
    titles = ["KV cache", "hidden states", "attention", "feed-forward", "logits", "step", "left by weights and cache"]
    rows = [[row["kv_cache_dtype"], *(size(row[name]) for name in names)] for row in found]
    common.print_table(titles, rows)
    for row in found:
        if row["left"] < row["total"]:
            print(f"{row['kv_cache_dtype']}: weights and cache leave less than a full step may need")
    print()
    return found


def step_bytes(config: "EngineConfig", plan: "MemoryPlan", cache: "CachePlan") -> "StepBytes":
    import torch

    from backend_engine.model_engine.model_inputs import EngineLimits
    from backend_engine.model_engine.step_memory import estimate_step

    assert plan.spec is not None and plan.rank_spec is not None, "a step of a model that is not known"
    scheduler = config.scheduler
    limits = EngineLimits(scheduler.max_batch_size, scheduler.max_num_tokens, config.max_seq_len)
    cached_tokens = cache.num_blocks * cache.tokens_per_block
    return estimate_step(
        plan.rank_spec, plan.spec.vocab_size, limits, cached_tokens, getattr(torch, config.dtype).itemsize
    )


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


if __name__ == "__main__":
    sys.exit(main())
