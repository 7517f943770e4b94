"""How many blocks fit, and how much memory there is."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from backend_engine.config.engine_config import KvCacheConfig
from backend_engine.config.kv_formats import KvFormat
from backend_engine.core.kv_spec import KvSpec, LatentSpec, StateSpec
from backend_engine.errors import ConfigError
from backend_engine.kv_cache.sizing import (
    bytes_per_block,
    num_blocks,
    num_blocks_needed,
    num_cpu_blocks,
    process_memory_bytes,
)

MIB = 2**20
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_bytes_per_block_adds_up_layers_of_different_shape() -> None:
    assert bytes_per_block([KvSpec(2, 64), KvSpec(4, 32), KvSpec(1, 8)], KvFormat(2), 16) == 16 * 2 * 2 * (
        128 + 128 + 8
    )


def test_a_block_holds_one_state_a_layer_in_float32_whatever_its_tokens_and_their_dtype() -> None:
    states = StateSpec(((3, 20), (2, 4, 5)))
    for element_bytes, tokens_per_block in ((2, 16), (4, 16), (2, 1)):
        assert bytes_per_block([states, states], KvFormat(element_bytes), tokens_per_block) == 2 * 4 * (60 + 40)
    assert bytes_per_block([KvSpec(2, 64), states, LatentSpec(12)], KvFormat(2), 16) == 16 * 2 * (2 * 128 + 12) + 400
    assert bytes_per_block([KvSpec(2, 64), states, LatentSpec(12)], KvFormat(1, 4), 16) == 16 * (4 * 68 + 16) + 400


def test_blocks_needed_round_up_per_request() -> None:
    assert num_blocks_needed(3, 33, 16) == 9


@pytest.mark.parametrize(
    ("max_tokens", "budget", "needed", "expected"),
    [
        (None, 1000, 4, 4),
        (None, 399, 4, 3),
        (100, 1000, 4, 6),
        (100, 500, 9, 5),
        (16, 1000, 9, 1),
    ],
)
def test_num_blocks(max_tokens: int | None, budget: int, needed: int, expected: int) -> None:
    assert num_blocks(KvCacheConfig(tokens_per_block=16, max_tokens=max_tokens), 100, budget, needed) == expected


@pytest.mark.parametrize(
    ("config", "budget", "message"),
    [
        (
            KvCacheConfig(16),
            99,
            "one block of tokens_per_block 16 takes 100 bytes and 99 bytes are allowed; .* or lower tokens_per_block$",
        ),
        (KvCacheConfig(16), -5, "and 0 bytes are allowed"),
        (
            KvCacheConfig(2048, layout="contiguous"),
            99,
            "one contiguous run of max_seq_len 2048 tokens takes 100 bytes and 99 bytes .* or lower max_seq_len$",
        ),
    ],
)
def test_no_room_is_a_clear_error(config: KvCacheConfig, budget: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        num_blocks(config, 100, budget, 4)


def test_a_contiguous_cache_has_a_run_for_each_request_that_may_run_and_no_more() -> None:
    contiguous = KvCacheConfig(tokens_per_block=100, layout="contiguous")
    assert num_blocks(contiguous, 1000, 10**6, 4) == 4
    assert num_blocks(contiguous, 1000, 2500, 4) == 2
    assert num_blocks(replace(contiguous, max_tokens=350), 1000, 10**6, 4) == 3
    assert num_blocks(replace(contiguous, max_tokens=10_000), 1000, 10**6, 4) == 4


def test_cpu_takes_what_is_needed_and_at_most_a_quarter() -> None:
    config = KvCacheConfig(tokens_per_block=16)
    assert num_cpu_blocks(config, 1000, 4, 64, memory_bytes=10**9) == 16
    assert num_cpu_blocks(config, 1000, 4, 64, memory_bytes=20_000) == 5
    with pytest.raises(ConfigError, match="takes 1000 bytes and 750 bytes are allowed"):
        num_cpu_blocks(config, 1000, 4, 64, memory_bytes=3000)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, PHYSICAL),
        ({"sys/fs/cgroup/memory.max": "max\n"}, PHYSICAL),
        ({"sys/fs/cgroup/memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{32 * MIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            32 * MIB,
        ),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/memory.max": f"{8 * MIB}\n"}, 8 * MIB),
        (
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/x\n5:memory:/docker/1:2\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/docker/1:2/memory.limit_in_bytes": f"{16 * MIB}\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1\n",
            },
            16 * MIB,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, PHYSICAL),
    ],
)
def test_container_limits_count(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert process_memory_bytes(_write(tmp_path, files)) == expected


def test_this_machine_has_memory() -> None:
    assert 0 < process_memory_bytes() <= PHYSICAL
