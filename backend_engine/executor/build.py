"""The composition root: the one place that knows every concrete class and puts the house together.

Called by ``LLM``. Decides nothing that ``config/resolve.py`` can decide; logs what was decided and why.
"""

import dataclasses
import os
import time
from typing import NamedTuple

import torch

from backend_engine import envs
from backend_engine.admission import AdmissionLimits
from backend_engine.checkpoint.checkpoint import Checkpoint
from backend_engine.checkpoint.engine_folder import verifying
from backend_engine.checkpoint.generation_config import generation_defaults, sampling_defaults
from backend_engine.checkpoint.open_checkpoint import open_checkpoint
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_config import EngineConfig
from backend_engine.config.engine_manifest import EngineManifest
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.config.library_versions import differences
from backend_engine.config.resolve import DeviceInfo, resolve
from backend_engine.config.sampling_defaults import SamplingDefaults
from backend_engine.decoder.decoder import Decoder
from backend_engine.executor.collector import spare_the_steps
from backend_engine.executor.fault_injection import create_faults
from backend_engine.executor.iteration_stats import RuntimeMemory
from backend_engine.executor.memory_report import MemoryUse, report_memory
from backend_engine.executor.py_executor import PyExecutor
from backend_engine.executor.rooms import Rooms
from backend_engine.executor.stats_recorder import StatsRecorder
from backend_engine.executor.step_dump import NoDump, StepDump
from backend_engine.executor.watchdog import automatic_step_timeout_s
from backend_engine.kv_cache import sizing
from backend_engine.kv_cache.cache_plan import Stage, plan_cache
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.kv_cache.kv_pool import KV_DTYPES, KVPool
from backend_engine.kv_cache.populate import populate_in_background
from backend_engine.logger import get_logger
from backend_engine.model_engine.model_backend import Implementations, LoadedModel
from backend_engine.model_engine.model_engine import ModelEngine
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.model_engine.model_loader import describe_model, load_model, plan_memory
from backend_engine.model_engine.token_work import (
    attention_flop,
    balanced_context_tokens,
    num_layer_weights,
    num_weights,
)
from backend_engine.model_engine.weight_memory import weight_bytes
from backend_engine.scheduler.request_scheduler import RequestScheduler

_logger = get_logger(__name__)

PROGRESS_EVERY_S = 2.0


class Engine(NamedTuple):
    """A ready executor (not started), what it can hold, and the configuration it was built from."""

    executor: PyExecutor
    limits: AdmissionLimits
    config: EngineConfig


def create_engine(args: EngineArgs) -> Engine:
    """Load the model and put everything together. ``ModelLoadError`` or ``ConfigError`` in one line."""
    started = time.monotonic()
    with verifying(open_checkpoint(args.model)) as checkpoint:
        engine = _create_engine(args, checkpoint)
    _logger.info("engine ready in %.1f s: %s", time.monotonic() - started, engine.config)
    return engine


def _create_engine(args: EngineArgs, checkpoint: Checkpoint) -> Engine:
    resolved = resolve(args, describe_model(checkpoint, args.model_backend, args.trust_remote_code), device_info())
    config = resolved.config
    for reason in resolved.reasons:
        _logger.info("chosen: %s", reason)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    spare_the_steps(config.scheduler.max_batch_size)
    if checkpoint.engine is not None:
        _log_engine_folder(checkpoint.engine, config)
    planned = _planned_memory(config, checkpoint)
    loaded = load_model(
        checkpoint,
        config.dtype,
        config.device,
        Implementations(config.attention_backend, config.operators, config.weight_only_precision),
        _ProgressLog(args.model),
        config.kv_cache.max_attention_window,
        config.model_backend,
        config.trust_remote_code,
    )
    for warning in loaded.warnings:
        _logger.warning("%s", warning)
    config = _with_context_cost(config, loaded)
    num_blocks = _num_blocks(config, loaded)
    executor = _create_executor(config, loaded, num_blocks, planned)
    scheduler = config.scheduler
    limits = AdmissionLimits(
        vocab_size=loaded.traits.vocab_size,
        max_seq_len=config.max_seq_len,
        kv_num_blocks=num_blocks,
        kv_tokens_per_block=config.tokens_per_block,
        max_context_tokens=None if scheduler.enable_chunked_context else scheduler.max_num_tokens,
        positions_switch_at=loaded.traits.positions_switch_at,
        end_ids=frozenset(generation_defaults(checkpoint).end_ids),
        sampling_defaults=_sampling_defaults(args, checkpoint),
        max_input_len=config.max_input_len,
    )
    return Engine(executor, limits, config)


def _log_engine_folder(manifest: EngineManifest, config: EngineConfig) -> None:
    """What is made anew from an engine folder, since it is not what was built."""
    build = manifest.build
    for line in differences(manifest):
        _logger.info("engine folder: %s", line)
    if build.precision != config.dtype:
        _logger.info("engine folder: plain weights were built in %s, converted to %s", build.precision, config.dtype)
    num_ranks = build.tensor_parallel_size * build.pipeline_parallel_size
    if num_ranks > 1:
        _logger.info("engine folder: the weights of %d ranks are put together for one device", num_ranks)


def _sampling_defaults(args: EngineArgs, checkpoint: Checkpoint) -> SamplingDefaults:
    if args.generation_config == "ignore":
        return SamplingDefaults()
    defaults = sampling_defaults(checkpoint)
    _logger.info("requests that leave these unset take the model's: %s", defaults)
    return defaults


def device_info() -> DeviceInfo:
    """What this machine offers to this process."""
    return DeviceInfo(torch.cuda.is_available(), len(os.sched_getaffinity(0)))


def _planned_memory(config: EngineConfig, checkpoint: Checkpoint) -> MemoryUse:
    """What weights and cache will take, by the files' headers and the memory that is free before they are read."""
    plan = plan_memory(
        checkpoint,
        config.dtype,
        config.device,
        config.model_backend,
        config.trust_remote_code,
        weight_only_precision=config.weight_only_precision,
    )
    if plan is None:
        return MemoryUse()
    if plan.cache_specs is None:
        return MemoryUse(plan.num_bytes)
    stage = Stage(plan.cache_specs, plan.num_bytes)
    return MemoryUse(plan.num_bytes, plan_cache(config, [stage], _free_memory_bytes(config.device)).num_bytes)


def _free_memory_bytes(device: str) -> int:
    """Of the process on a CPU, of the device on a GPU."""
    return sizing.process_memory_bytes() if device == "cpu" else torch.cuda.mem_get_info(torch.device(device))[0]


def _create_executor(config: EngineConfig, loaded: LoadedModel, num_blocks: int, planned: MemoryUse) -> PyExecutor:
    scheduler, kv_cache = config.scheduler, config.kv_cache
    max_blocks_per_request = -(-config.max_seq_len // config.tokens_per_block)
    options = loaded.options
    kv_dtype = KV_DTYPES[kv_cache.dtype]
    pool = KVPool(loaded.traits.cache_specs, num_blocks, config.tokens_per_block, kv_dtype, options.device)
    if config.device == "cpu":
        populate_in_background(pool, pool.memory_regions())
    num_weight_bytes, num_cache_bytes = weight_bytes(loaded.model), pool.num_bytes
    report_memory(planned, MemoryUse(num_weight_bytes, num_cache_bytes))
    limits = EngineLimits(scheduler.max_batch_size, scheduler.max_num_tokens, config.max_seq_len)
    dump_path = envs.ENGINE_DUMP_STEPS.get()
    rooms = Rooms(
        scheduler=RequestScheduler(scheduler),
        kv_cache=KVCacheManager(
            num_blocks,
            config.tokens_per_block,
            max_blocks_per_request,
            scheduler.max_batch_size,
            kv_cache.enable_block_reuse,
        ),
        model_engine=ModelEngine(loaded, pool, limits, config.record_layers, config.batch_invariant),
        decoder=Decoder(loaded.traits.vocab_size, options.device),
        faults=create_faults(config.debug_step_delay_ms, config.debug_fail_on_tokens, config.debug_hang_on_tokens),
        dump=StepDump(dump_path) if dump_path else NoDump(),
    )
    return PyExecutor(
        rooms,
        max_batch_size=scheduler.max_batch_size,
        max_queue_size=scheduler.max_queue_size,
        check_invariants=envs.ENGINE_CHECK_INVARIANTS.get(),
        step_timeout_s=_step_timeout_s(config, loaded, num_blocks),
        recorder=_recorder(config, num_weight_bytes + num_cache_bytes),
    )


def _recorder(config: EngineConfig, num_bytes: int) -> StatsRecorder:
    """The statistics; ``num_bytes`` of weights and KV pool are where the model runs. No pinned buffer is kept."""
    return StatsRecorder(
        config.iter_stats_max_iterations,
        is_static_batching=config.scheduler.capacity_policy == "static_batch",
        memory=RuntimeMemory(cpu=num_bytes) if config.device == "cpu" else RuntimeMemory(gpu=num_bytes),
    )


def _step_timeout_s(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> float:
    """The configured step timeout, or one for a full step at the end of the longest request."""
    if config.step_timeout_s is not None:
        return config.step_timeout_s
    max_num_tokens = config.scheduler.max_num_tokens
    context = min(config.max_seq_len, num_blocks * config.tokens_per_block)
    flop = 2.0 * num_weights(loaded.model) + context * attention_flop(loaded.traits.attention_specs)
    chosen = automatic_step_timeout_s(flop, max_num_tokens, config.device) + config.debug_step_delay_ms / 1000
    _logger.info(
        "chosen: step_timeout_s %.1f: %d tokens of %.2f GFLOP each at most, with a wide margin",
        chosen,
        max_num_tokens,
        flop / 1e9,
    )
    return chosen


def _with_context_cost(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """``config`` with the scheduler's ``context_cost_tokens``, chosen from the model's sizes where it is not set."""
    scheduler = config.scheduler
    if scheduler.context_cost_tokens is not None or not scheduler.enable_chunked_context:
        return config
    num_products = num_layer_weights(loaded.model)
    chosen = balanced_context_tokens(num_products, loaded.traits.attention_specs, config.max_seq_len)
    if chosen is None:
        _logger.info("chosen: context_cost_tokens 0: no layer attends to a whole text")
    else:
        _logger.info(
            "chosen: context_cost_tokens %d: attention to that many takes as long as products of %.1f million weights",
            chosen,
            num_products / 1e6,
        )
    return dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, context_cost_tokens=chosen or 0))


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Size of the KV pool in blocks, from the memory there is."""
    kv_cache = config.kv_cache
    specs = loaded.traits.cache_specs
    block_bytes = sizing.bytes_per_block(specs, KV_FORMATS[kv_cache.dtype], config.tokens_per_block)
    num_blocks = sizing.pool_blocks(config, block_bytes, _free_memory_bytes(config.device))
    _logger.info(
        "KV cache: %d %s of %d tokens, %.1f MB of %s in %d layers",
        num_blocks,
        "contiguous runs" if kv_cache.layout == "contiguous" else "blocks",
        config.tokens_per_block,
        num_blocks * block_bytes / 1e6,
        kv_cache.dtype,
        len(specs),
    )
    return num_blocks


class _ProgressLog:
    """Logs how far the loading of weights is, every few seconds."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if done == total or now >= self._next:
            self._next = now + PROGRESS_EVERY_S
            _logger.info("loading %s: %d of %d (%s)", self._model_dir, done, total, what)
