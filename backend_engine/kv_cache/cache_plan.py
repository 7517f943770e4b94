"""``plan_cache``: what the KV cache would take of a device and how many tokens it would hold, by the engine's rules.

Called by the composition root at start, and by ``scripts/plan_memory.py`` before there is an engine. Pure arithmetic.
"""

from collections.abc import Sequence
from typing import NamedTuple

from backend_engine.config.engine_config import EngineConfig
from backend_engine.config.kv_formats import KV_FORMATS
from backend_engine.core.kv_spec import CacheSpec, StateSpec
from backend_engine.kv_cache import sizing


class Stage(NamedTuple):
    """One device's part of a model: what its layers keep in the cache, and the bytes of its weights."""

    cache_specs: Sequence[CacheSpec]
    weight_bytes: int


class CachePlan(NamedTuple):
    """token_bytes: of a token on one device, states apart. state_bytes: of the recurrent states of a block. num_blocks:
    that the engine would take, 0 = there is no room. blocks_that_fit: of the device's share for the cache, if
    ``max_batch_size`` did not bound them. num_bytes: of ``num_blocks``. With several devices each number is that of the
    fullest, and every device has the same blocks.
    """

    tokens_per_block: int
    token_bytes: int
    state_bytes: int
    block_bytes: int
    num_blocks: int
    blocks_that_fit: int
    max_seq_len: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def num_requests(self, num_blocks: int) -> int:
        """Requests of ``max_seq_len`` tokens that have room in so many blocks, sharing nothing."""
        return num_blocks // sizing.num_blocks_needed(1, self.max_seq_len, self.tokens_per_block)


def plan_cache(config: EngineConfig, stages: Sequence[Stage], memory_bytes: int) -> CachePlan:
    """``memory_bytes``: of each device (a GPU), or of the process (a CPU), before the weights are there."""
    size, kv_format = config.tokens_per_block, KV_FORMATS[config.kv_cache.dtype]
    all_blocks, all_fitting = [], []
    for stage in stages:
        block_bytes = sizing.bytes_per_block(stage.cache_specs, kv_format, size)
        free = memory_bytes if config.device == "cpu" else max(0, memory_bytes - stage.weight_bytes)
        fitting = sizing.pool_budget(config, free) // block_bytes
        all_fitting.append(fitting)
        all_blocks.append(sizing.pool_blocks(config, block_bytes, free) if fitting else 0)
    return CachePlan(
        tokens_per_block=size,
        token_bytes=max(_bytes_per_token(stage.cache_specs, config) for stage in stages),
        state_bytes=max(_state_bytes(stage.cache_specs) for stage in stages),
        block_bytes=max(sizing.bytes_per_block(stage.cache_specs, kv_format, size) for stage in stages),
        num_blocks=min(all_blocks),
        blocks_that_fit=min(all_fitting),
        max_seq_len=config.max_seq_len,
    )


def _bytes_per_token(specs: Sequence[CacheSpec], config: EngineConfig) -> int:
    kv_format = KV_FORMATS[config.kv_cache.dtype]
    return sum(spec.bytes_per_block(1, *kv_format) for spec in specs if not isinstance(spec, StateSpec))


def _state_bytes(specs: Sequence[CacheSpec]) -> int:
    return sum(spec.bytes_per_block(1, 1) for spec in specs if isinstance(spec, StateSpec))
