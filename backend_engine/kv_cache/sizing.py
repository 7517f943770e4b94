"""How big the KV cache may be: pure arithmetic, and the question how much memory this process may use.

Called by ``executor/build.py`` and ``cache_plan.py``. Allocates nothing.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from backend_engine.config.engine_config import EngineConfig, KvCacheConfig
from backend_engine.config.kv_formats import KvFormat
from backend_engine.core.kv_spec import CacheSpec
from backend_engine.errors import ConfigError

CPU_MEMORY_SHARE = 4
"""On a CPU the cache takes at most one part in this many of the process's memory."""


def bytes_per_block(specs: Sequence[CacheSpec], kv_format: KvFormat, tokens_per_block: int) -> int:
    """Bytes that one block takes over all layers, scales included."""
    return sum(spec.bytes_per_block(tokens_per_block, *kv_format) for spec in specs)


def num_blocks_needed(max_batch_size: int, max_seq_len: int, tokens_per_block: int) -> int:
    """Blocks that ``max_batch_size`` requests of ``max_seq_len`` tokens take, sharing nothing."""
    return max_batch_size * -(-max_seq_len // tokens_per_block)


def num_blocks(config: KvCacheConfig, block_bytes: int, budget_bytes: int, num_needed: int) -> int:
    """Blocks in the pool: as many as the budget holds, but no more than ``config.max_tokens`` tokens.

    Without ``max_tokens`` no more than ``num_needed`` blocks; contiguous ones, which only those who run can use, never
    more than that. ``ConfigError`` if not even one block fits.
    """
    is_contiguous = config.layout == "contiguous"
    size = config.tokens_per_block
    assert size is not None, "resolve() decides tokens_per_block"
    if budget_bytes < block_bytes:
        if is_contiguous:
            what, knob = f"one contiguous run of max_seq_len {size} tokens", "max_seq_len"
        else:
            what, knob = f"one block of tokens_per_block {size}", "tokens_per_block"
        raise ConfigError(
            f"the KV cache has no room: {what} takes {block_bytes} bytes and {max(budget_bytes, 0)} bytes are allowed; "
            f"give it more memory or lower {knob}"
        )
    limits = [budget_bytes // block_bytes]
    if config.max_tokens is not None:
        limits.append(config.max_tokens // size)
    if config.max_tokens is None or is_contiguous:
        limits.append(num_needed)
    return min(limits)


def num_cpu_blocks(
    config: KvCacheConfig, block_bytes: int, max_batch_size: int, max_seq_len: int, memory_bytes: int
) -> int:
    """The rule for a CPU: what ``max_batch_size`` x ``max_seq_len`` needs, at most a quarter of ``memory_bytes``."""
    assert config.tokens_per_block is not None, "resolve() decides tokens_per_block"
    num_needed = num_blocks_needed(max_batch_size, max_seq_len, config.tokens_per_block)
    return num_blocks(config, block_bytes, memory_bytes // CPU_MEMORY_SHARE, num_needed)


def pool_blocks(config: EngineConfig, block_bytes: int, memory_bytes: int) -> int:
    """Blocks in the engine's pool. ``memory_bytes``: on a CPU the process's, on a GPU what is free after the weights,
    of which ``free_gpu_memory_fraction`` is taken.
    """
    max_batch_size, max_seq_len = config.scheduler.max_batch_size, config.max_seq_len
    if config.device == "cpu":
        return num_cpu_blocks(config.kv_cache, block_bytes, max_batch_size, max_seq_len, memory_bytes)
    needed = num_blocks_needed(max_batch_size, max_seq_len, config.tokens_per_block)
    return num_blocks(config.kv_cache, block_bytes, pool_budget(config, memory_bytes), needed)


def pool_budget(config: EngineConfig, memory_bytes: int) -> int:
    """Most bytes that the pool may take of ``memory_bytes``, see ``pool_blocks``."""
    if config.device == "cpu":
        return memory_bytes // CPU_MEMORY_SHARE
    return int(memory_bytes * config.kv_cache.free_gpu_memory_fraction)


def process_memory_bytes(root: Path = Path("/")) -> int:
    """Most memory this process may use, in bytes: that of the machine, or less if a container limits it.

    Counts the limits of the process's cgroup (version 2 and 1) and of all above it. ``root`` is where ``proc`` and
    ``sys`` are found.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Memory limits in bytes of the process's cgroups, those that are set."""
    mount = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    # In a container the path may be the host's, which is not to be seen here; the mount itself then has the limit.
    yield from _limits_up_to(mount, "/", "memory.max")
    yield from _limits_up_to(mount / "memory", "/", "memory.limit_in_bytes")
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield from _limits_up_to(mount, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_up_to(mount / "memory", path, "memory.limit_in_bytes")


def _limits_up_to(mount: Path, path: str, file_name: str) -> Iterable[int]:
    """The limits in ``file_name`` of cgroup ``path`` and of every one above it."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        try:
            text = mount.joinpath(*parts[:depth], file_name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" = no limit
            yield int(text)
