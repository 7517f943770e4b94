"""The composition root: the one place that knows every concrete class and puts the house together.

Called by ``LLM``. Decides nothing that ``config/resolve.py`` can decide; logs what was decided and why.
"""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from backend_engine import envs
from backend_engine.admission import AdmissionLimits
from backend_engine.checkpoint.hf_folder import read_generation_config, read_hf_config
from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_config import EngineConfig
from backend_engine.config.resolve import DeviceInfo, resolve
from backend_engine.core.kv_spec import KvSpec
from backend_engine.decoder.decoder import Decoder
from backend_engine.executor.fault_injection import create_faults
from backend_engine.executor.py_executor import PyExecutor
from backend_engine.executor.rooms import Rooms
from backend_engine.executor.step_dump import NoDump, StepDump
from backend_engine.kv_cache import sizing
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.kv_cache.kv_pool import KVPool
from backend_engine.logger import get_logger
from backend_engine.model_engine.model_engine import ModelEngine
from backend_engine.model_engine.model_inputs import EngineLimits
from backend_engine.model_engine.model_loader import LoadedModel, load_model
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
    resolved = resolve(args, read_hf_config(args.model), device_info())
    config = resolved.config
    for reason in resolved.reasons:
        _logger.info("chosen: %s", reason)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(
        config.model_dir, config.dtype, config.device, config.attention_backend, _ProgressLog(args.model)
    )
    num_blocks = _num_blocks(config, loaded)
    executor = _create_executor(config, loaded, num_blocks)
    scheduler = config.scheduler
    limits = AdmissionLimits(
        vocab_size=loaded.vocab_size,
        max_seq_len=config.max_seq_len,
        kv_num_blocks=num_blocks,
        kv_tokens_per_block=config.kv_cache.tokens_per_block,
        max_context_tokens=None if scheduler.enable_chunked_context else scheduler.max_num_tokens,
        end_ids=frozenset(read_generation_config(config.model_dir).end_ids),
    )
    _logger.info("engine ready in %.1f s: %s", time.monotonic() - started, config)
    return Engine(executor, limits, config)


def device_info() -> DeviceInfo:
    """What this machine offers to this process."""
    return DeviceInfo(torch.cuda.is_available(), len(os.sched_getaffinity(0)))


def _create_executor(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> PyExecutor:
    scheduler, kv_cache = config.scheduler, config.kv_cache
    max_blocks_per_request = -(-config.max_seq_len // kv_cache.tokens_per_block)
    options = loaded.options
    pool = KVPool(loaded.kv_specs, num_blocks, kv_cache.tokens_per_block, options.dtype, options.device)
    limits = EngineLimits(scheduler.max_batch_size, scheduler.max_num_tokens, config.max_seq_len)
    dump_path = envs.ENGINE_DUMP_STEPS.get()
    rooms = Rooms(
        scheduler=RequestScheduler(scheduler),
        kv_cache=KVCacheManager(
            num_blocks,
            kv_cache.tokens_per_block,
            max_blocks_per_request,
            scheduler.max_batch_size,
            kv_cache.enable_block_reuse,
        ),
        model_engine=ModelEngine(loaded, pool, limits),
        decoder=Decoder(loaded.vocab_size, options.device),
        faults=create_faults(config.debug_step_delay_ms, config.debug_fail_on_tokens),
        dump=StepDump(dump_path) if dump_path else NoDump(),
    )
    return PyExecutor(
        rooms,
        max_batch_size=scheduler.max_batch_size,
        max_queue_size=scheduler.max_queue_size,
        check_invariants=envs.ENGINE_CHECK_INVARIANTS.get(),
    )


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Size of the KV pool in blocks, from the memory there is."""
    kv_cache = config.kv_cache
    specs: Sequence[KvSpec] = loaded.kv_specs
    block_bytes = sizing.bytes_per_block(specs, loaded.options.dtype.itemsize, kv_cache.tokens_per_block)
    max_batch_size = config.scheduler.max_batch_size
    if config.device == "cpu":
        memory = sizing.process_memory_bytes()
        num_blocks = sizing.num_cpu_blocks(kv_cache, block_bytes, max_batch_size, config.max_seq_len, memory)
    else:
        free_bytes, _ = torch.cuda.mem_get_info(loaded.options.device)
        budget = int(free_bytes * kv_cache.free_gpu_memory_fraction)
        needed = sizing.num_blocks_needed(max_batch_size, config.max_seq_len, kv_cache.tokens_per_block)
        num_blocks = sizing.num_blocks(kv_cache, block_bytes, budget, needed)
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MB in %d layers",
        num_blocks,
        kv_cache.tokens_per_block,
        num_blocks * block_bytes / 1e6,
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
