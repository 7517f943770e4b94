"""The only place where "auto" becomes a value: ``EngineArgs`` + checkpoint + device -> ``EngineConfig``.

Pure: reads no file, asks no device. Every automatic choice comes back with its reason, to be logged once.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from backend_engine.config.built_limits import within_built
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_config import EngineConfig, KvCacheConfig, SchedulerConfig
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.config.model_facts import ModelFacts
from backend_engine.config.sampling_defaults import GENERATION_CONFIGS
from backend_engine.errors import ConfigError
from backend_engine.plugins.catalog import CAPACITY_POLICIES, CONTEXT_CHUNKING_POLICIES, OPERATORS, WAITING_QUEUES

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_ONLY_PRECISIONS = ("float16", "bfloat16", "int16", "int8", "w8a8")
DEVICES = ("cpu", "cuda")
KV_LAYOUTS = ("paged", "contiguous")
GPU_MAX_NUM_TOKENS = 8192
UNBOUNDED_MAX_SEQ_LEN = 8192
TOKENS_PER_BLOCK = 32
_SCHEDULER_MINIMA = {
    "max_batch_size": 1, "max_num_tokens": 1, "chunk_unit_size": 1, "max_queue_size": 0, "context_cost_tokens": 0,
}  # fmt: skip
STATES_PER_REQUEST = 16
"""Blocks of the longest request of a model that keeps a state in each block and nothing else."""


class DeviceInfo(NamedTuple):
    """What the machine offers: whether torch sees a CUDA device, and how many CPU cores this process may use."""

    has_cuda: bool
    num_cpus: int


class Resolved(NamedTuple):
    """The configuration, and one line a choice that was made automatically."""

    config: EngineConfig
    reasons: list[str]


def resolve(args: EngineArgs, model: ModelFacts, device_info: DeviceInfo) -> Resolved:
    """Decide every automatic value and check the rest; ``ConfigError`` names field, value and what is allowed."""
    reasons: list[str] = []
    if model.built is not None:
        args = within_built(args, model.built, reasons)
    device = _choose(args.device, "device", DEVICES) or _device(device_info, reasons)
    if device == "cuda" and not device_info.has_cuda:
        raise ConfigError("device 'cuda' is not available: torch sees no CUDA device; use device 'cpu' or 'auto'")
    dtype = _choose(args.dtype, "dtype", DTYPES) or _dtype(device, model, reasons)
    max_seq_len = _max_seq_len(args.max_seq_len, model, reasons)
    max_input_len = _max_input_len(args.max_input_len, max_seq_len)
    scheduler = _scheduler(args, device, max_seq_len, reasons)
    kv_cache = _kv_cache(args.kv_cache_config or KvCacheConfig(), model, dtype, max_seq_len, reasons)
    operators = ("native" if device == "cpu" else "torch") if args.operators == "auto" else args.operators
    _check_name("operators", operators, OPERATORS.names())
    precision = _weight_only_precision(args.weight_only_precision, device, dtype)
    _check_name("generation_config", args.generation_config, GENERATION_CONFIGS)
    num_threads = args.num_threads
    if num_threads < 0:
        raise ConfigError(f"num_threads {num_threads} is out of range; it must be 0 (one per usable core) or more")
    if args.iter_stats_max_iterations < 0:
        raise ConfigError(
            f"iter_stats_max_iterations {args.iter_stats_max_iterations} is out of range; it must be 0 (keep none) or "
            "more"
        )
    if num_threads == 0:
        num_threads = device_info.num_cpus
        reasons.append(f"num_threads {num_threads}: the CPU cores this process may use")
    if args.step_timeout_s is not None and not 0 < args.step_timeout_s < math.inf:
        raise ConfigError(f"step_timeout_s {args.step_timeout_s} is out of range; it must be more than 0, or None")
    if args.model_backend == "auto" and model.model_backend != "native":
        reasons.append(f"model_backend {model.model_backend}: there is no family file for the architecture")
    config = EngineConfig(
        model_dir=args.model,
        dtype=dtype,
        device=device,
        max_seq_len=max_seq_len,
        max_input_len=max_input_len,
        kv_cache=kv_cache,
        scheduler=scheduler,
        attention_backend=args.attention_backend,
        operators=operators,
        weight_only_precision=precision,
        batch_invariant=bool(args.batch_invariant),
        record_layers=args.record_layers,
        model_backend=model.model_backend,
        trust_remote_code=args.trust_remote_code,
        num_threads=num_threads,
        step_timeout_s=args.step_timeout_s,
        iter_stats_max_iterations=args.iter_stats_max_iterations,
        debug_step_delay_ms=args.debug_step_delay_ms,
        debug_fail_on_tokens=args.debug_fail_on_tokens,
        debug_hang_on_tokens=args.debug_hang_on_tokens,
    )
    return Resolved(config, reasons)


def _choose(value: str, name: str, allowed: tuple[str, ...]) -> str | None:
    if value == "auto":
        return None
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not allowed; use auto, {', '.join(allowed)}")
    return value


def _weight_only_precision(wanted: str, device: str, dtype: str) -> str:
    """The form of plain weights in memory; other forms than the dtype's are the native library's, on a CPU."""
    precision = _choose(wanted, "weight_only_precision", WEIGHT_ONLY_PRECISIONS) or dtype
    if precision != dtype and (device, dtype) != ("cpu", "float32"):
        raise ConfigError(
            f"weight_only_precision {wanted!r} is not allowed with device {device} and dtype {dtype}; use device cpu "
            "and dtype float32, or a checkpoint from scripts/quantize.py"
        )
    return precision


def _device(info: DeviceInfo, reasons: list[str]) -> str:
    device = "cuda" if info.has_cuda else "cpu"
    reasons.append(f"device {device}: torch sees {'a' if info.has_cuda else 'no'} CUDA device")
    return device


def _dtype(device: str, model: ModelFacts, reasons: list[str]) -> str:
    if device == "cpu":
        reasons.append("dtype float32: what the native operators of a CPU compute in")
        return "float32"
    dtype = model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"
    reasons.append(f"dtype {dtype}: the checkpoint states {model.dtype}")
    return dtype


def _max_seq_len(value: int | None, model: ModelFacts, reasons: list[str]) -> int:
    positions = model.max_positions
    if value is None:
        if positions is None and model.state_bytes:
            reasons.append(
                f"max_seq_len {UNBOUNDED_MAX_SEQ_LEN}: config.json states no limit, a recurrent state has none"
            )
            return UNBOUNDED_MAX_SEQ_LEN
        if positions is None:
            raise ConfigError("max_seq_len must be set: config.json has no max_position_embeddings")
        reasons.append(f"max_seq_len {positions}: max_position_embeddings of the checkpoint")
        return positions
    if value < 2:
        raise ConfigError(f"max_seq_len {value} is out of range; it must be 2 or more")
    if positions is not None and value > positions:
        raise ConfigError(f"max_seq_len {value} is more than the checkpoint's max_position_embeddings {positions}")
    return value


def _max_input_len(value: int | None, max_seq_len: int) -> int:
    if value is None:
        return max_seq_len - 1
    if not 1 <= value < max_seq_len:
        raise ConfigError(
            f"max_input_len {value} is out of range; it must be 1 to {max_seq_len - 1}: max_seq_len is {max_seq_len}, "
            "one token of which is kept for the output"
        )
    return value


def _scheduler(args: EngineArgs, device: str, max_seq_len: int, reasons: list[str]) -> SchedulerConfig:
    scheduler = args.scheduler_config or SchedulerConfig()
    if args.max_batch_size is not None:
        scheduler = dataclasses.replace(scheduler, max_batch_size=args.max_batch_size)
    if args.max_num_tokens is not None:
        scheduler = dataclasses.replace(scheduler, max_num_tokens=args.max_num_tokens)
    elif scheduler.max_num_tokens == SchedulerConfig().max_num_tokens:
        budget = max(GPU_MAX_NUM_TOKENS if device == "cuda" else scheduler.max_num_tokens, scheduler.max_batch_size)
        scheduler = dataclasses.replace(scheduler, max_num_tokens=budget)
        reasons.append(f"max_num_tokens {budget}: a step on a {device} that keeps running streams responsive")
    if args.context_cost_tokens is not None:
        scheduler = dataclasses.replace(scheduler, context_cost_tokens=args.context_cost_tokens)
    _check_names(scheduler)
    for name, low in _SCHEDULER_MINIMA.items():
        value = getattr(scheduler, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} {value} is out of range; it must be {low} or more")
    if scheduler.max_num_tokens < scheduler.max_batch_size:
        raise ConfigError(
            f"max_num_tokens {scheduler.max_num_tokens} must not be less than max_batch_size "
            f"{scheduler.max_batch_size}, or running requests would delay each other"
        )
    if scheduler.chunk_unit_size > scheduler.max_num_tokens:
        raise ConfigError(
            f"chunk_unit_size {scheduler.chunk_unit_size} must not be more than max_num_tokens "
            f"{scheduler.max_num_tokens}, or no chunk would ever fit"
        )
    return scheduler


def _check_names(scheduler: SchedulerConfig) -> None:
    """Policies must be ones that the registries know, plugins included."""
    _check_name("capacity_policy", scheduler.capacity_policy, CAPACITY_POLICIES.names())
    _check_name("waiting_queue_policy", scheduler.waiting_queue_policy, WAITING_QUEUES.names())
    _check_name("context_chunking_policy", scheduler.context_chunking_policy, CONTEXT_CHUNKING_POLICIES.names())


def _check_name(field: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} {value!r} is not allowed; use {', '.join(allowed)}")


def _kv_cache(
    kv_cache: KvCacheConfig, model: ModelFacts, dtype: str, max_seq_len: int, reasons: list[str]
) -> KvCacheConfig:
    _check_name("layout", kv_cache.layout, KV_LAYOUTS)
    kv_dtype = _choose(kv_cache.dtype, "kv_cache_dtype", tuple(KV_FORMATS)) or _kv_dtype(model, dtype, reasons)
    kv_cache = dataclasses.replace(kv_cache, dtype=kv_dtype)
    if kv_cache.layout == "contiguous":
        kv_cache = _contiguous(kv_cache, max_seq_len, reasons)
    else:
        kv_cache = _paged(kv_cache, model, max_seq_len, reasons)
    if not 0 < kv_cache.free_gpu_memory_fraction <= 1:
        raise ConfigError(
            f"free_gpu_memory_fraction {kv_cache.free_gpu_memory_fraction} is out of range; it must be in (0, 1]"
        )
    windows = kv_cache.max_attention_window
    if windows is None:
        return kv_cache
    for window in windows:
        if window < 1:
            raise ConfigError(f"max_attention_window {window} is out of range; it must be 1 or more")
    if min(windows, default=max_seq_len) >= max_seq_len:
        reasons.append(f"max_attention_window none: {list(windows)} holds nothing below max_seq_len {max_seq_len}")
        return dataclasses.replace(kv_cache, max_attention_window=None)
    return kv_cache


def _kv_dtype(model: ModelFacts, dtype: str, reasons: list[str]) -> str:
    if model.kv_cache_dtype is not None:
        reasons.append(f"kv_cache_dtype {model.kv_cache_dtype}: the checkpoint was made for it")
        return model.kv_cache_dtype
    reasons.append(f"kv_cache_dtype {dtype}: the model's dtype")
    return dtype


def _paged(kv_cache: KvCacheConfig, model: ModelFacts, max_seq_len: int, reasons: list[str]) -> KvCacheConfig:
    size = kv_cache.tokens_per_block
    if size is None:
        size = TOKENS_PER_BLOCK
        if model.state_bytes:
            longest = max_seq_len if kv_cache.max_tokens is None else min(max_seq_len, kv_cache.max_tokens)
            size = min(_tokens_beside_a_state(model, kv_cache.dtype, max_seq_len), longest)
            reasons.append(
                f"tokens_per_block {size}: each block also holds recurrent states, {model.state_bytes} bytes, "
                "which take as much memory as many tokens"
            )
    if size < 1:
        raise ConfigError(f"tokens_per_block {size} is out of range; it must be 1 or more")
    if kv_cache.max_tokens is not None and kv_cache.max_tokens < size:
        raise ConfigError(
            f"max_tokens {kv_cache.max_tokens} of the KV cache is less than one block of tokens_per_block {size} tokens"
        )
    return dataclasses.replace(kv_cache, tokens_per_block=size)


def _tokens_beside_a_state(model: ModelFacts, kv_dtype: str, max_seq_len: int) -> int:
    """Tokens of a block, a multiple of the usual number, whose keys and values take no less than the block's states.

    Without keys and values it is what the longest request fills ``STATES_PER_REQUEST`` times.
    """
    token_bytes = model.elements_per_token * KV_FORMATS[kv_dtype].element_bytes
    least = -(-model.state_bytes // token_bytes) if token_bytes else -(-max_seq_len // STATES_PER_REQUEST)
    return -(-least // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK


def _contiguous(kv_cache: KvCacheConfig, max_seq_len: int, reasons: list[str]) -> KvCacheConfig:
    """A contiguous run is one block that holds the longest request, which is never full and so never reused."""
    if kv_cache.max_tokens is not None and kv_cache.max_tokens < max_seq_len:
        raise ConfigError(
            f"max_tokens {kv_cache.max_tokens} of the KV cache is less than max_seq_len {max_seq_len}, which is one "
            "request's run in a contiguous layout"
        )
    reasons.append(f"tokens_per_block {max_seq_len}: max_seq_len, since the KV cache's layout is contiguous")
    if kv_cache.enable_block_reuse:
        reasons.append("enable_block_reuse False: the KV cache's layout is contiguous, requests share no blocks")
    return dataclasses.replace(kv_cache, tokens_per_block=max_seq_len, enable_block_reuse=False)
