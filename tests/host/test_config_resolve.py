"""``resolve``: what it refuses, by field, value and what is allowed; what it chooses, and that it says why."""

from typing import Any

import pytest

from backend_engine.config.engine_args import EngineArgs
from backend_engine.config.engine_config import KvCacheConfig, SchedulerConfig
from backend_engine.config.model_facts import ModelFacts
from backend_engine.config.resolve import DeviceInfo, Resolved, resolve
from backend_engine.errors import ConfigError
from backend_engine.plugins.catalog import CAPACITY_POLICIES, CONTEXT_CHUNKING_POLICIES, WAITING_QUEUES
from backend_engine.scheduler.request_scheduler import RequestScheduler

MAX_SEQ_LEN = 128


def _resolve(**args: Any) -> Resolved:
    return resolve(
        EngineArgs("model", **args), ModelFacts(max_positions=MAX_SEQ_LEN), DeviceInfo(has_cuda=False, num_cpus=3)
    )


def _reasons(resolved: Resolved, word: str) -> list[str]:
    return [reason for reason in resolved.reasons if word in reason]


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("capacity_policy", ["guaranteed_no_evict", "max_utilization", "static_batch"]),
        ("waiting_queue_policy", ["fcfs", "priority", "shortest_first"]),
        ("context_chunking_policy", ["equal_progress", "first_come_first_served"]),
    ],
)
def test_every_policy_is_accepted_by_name_and_can_be_built(field: str, allowed: list[str]) -> None:
    for name in allowed:
        scheduler = _resolve(scheduler_config=SchedulerConfig(**{field: name})).config.scheduler
        assert getattr(scheduler, field) == name
        assert RequestScheduler(scheduler).num_waiting == 0
    with pytest.raises(ConfigError, match=f"^{field} 'nonsense' is not allowed; use {', '.join(allowed)}$"):
        _resolve(scheduler_config=SchedulerConfig(**{field: "nonsense"}))


def test_the_registries_know_no_other_policy_and_a_plugins_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(r.names()) for r in (CAPACITY_POLICIES, WAITING_QUEUES, CONTEXT_CHUNKING_POLICIES)] == [3, 3, 2]
    monkeypatch.setitem(CAPACITY_POLICIES._entries, "of_a_plugin", object)
    assert _resolve(scheduler_config=SchedulerConfig(capacity_policy="of_a_plugin")).config


def test_defaults() -> None:
    config = _resolve().config
    scheduler = config.scheduler
    assert (scheduler.capacity_policy, scheduler.waiting_queue_policy) == ("guaranteed_no_evict", "priority")
    assert scheduler.context_chunking_policy == "first_come_first_served"
    assert config.kv_cache == KvCacheConfig(tokens_per_block=32, dtype="float32")
    assert config.tokens_per_block == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size 0 is out of range; it must be 1 or more"),
        ({"max_num_tokens": 0}, "max_num_tokens 0 is out of range; it must be 1 or more"),
        ({"chunk_unit_size": 0}, "chunk_unit_size 0 is out of range; it must be 1 or more"),
        ({"max_queue_size": -1}, "max_queue_size -1 is out of range; it must be 0 or more"),
        ({"context_cost_tokens": -1}, "context_cost_tokens -1 is out of range; it must be 0 or more"),
        ({"max_num_tokens": 64, "chunk_unit_size": 65}, "chunk_unit_size 65 must not be more than max_num_tokens 64"),
        ({"max_num_tokens": 16}, "max_num_tokens 16 must not be less than max_batch_size 32"),
    ],
)
def test_limits_of_the_scheduler(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(scheduler_config=SchedulerConfig(**changes))


@pytest.mark.parametrize("value", [0, 1, 2458])
def test_what_position_costs_may_be_said_in_either_place_and_is_else_left_to_the_model(value: int) -> None:
    of_scheduler = SchedulerConfig(context_cost_tokens=value)
    assert _resolve().config.scheduler.context_cost_tokens is None
    assert _resolve(scheduler_config=of_scheduler).config.scheduler.context_cost_tokens == value
    assert _resolve(context_cost_tokens=value).config.scheduler.context_cost_tokens == value
    both = _resolve(context_cost_tokens=5, scheduler_config=of_scheduler)
    assert both.config.scheduler.context_cost_tokens == 5
    with pytest.raises(ConfigError, match=r"^context_cost_tokens -2 is out of range; it must be 0 or more$"):
        _resolve(context_cost_tokens=-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "ragged"}, "^layout 'ragged' is not allowed; use paged, contiguous$"),
        ({"tokens_per_block": 0}, "tokens_per_block 0 is out of range; it must be 1 or more"),
        ({"max_tokens": 31}, "max_tokens 31 of the KV cache is less than one block of tokens_per_block 32 tokens"),
        (
            {"max_tokens": MAX_SEQ_LEN - 1, "layout": "contiguous"},
            "max_tokens 127 of the KV cache is less than max_seq_len 128, which is one request's run",
        ),
        ({"free_gpu_memory_fraction": 0.0}, r"free_gpu_memory_fraction 0.0 is out of range; it must be in \(0, 1\]"),
        ({"max_attention_window": (64, 0)}, "^max_attention_window 0 is out of range; it must be 1 or more$"),
    ],
)
def test_limits_of_the_kv_cache(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(kv_cache_config=KvCacheConfig(**changes))


def test_a_contiguous_cache_has_runs_of_max_seq_len_and_no_reuse_and_says_so() -> None:
    resolved = _resolve(kv_cache_config=KvCacheConfig(layout="contiguous", tokens_per_block=7), max_seq_len=100)
    assert resolved.config.kv_cache == KvCacheConfig(
        layout="contiguous", tokens_per_block=100, enable_block_reuse=False, dtype="float32"
    )
    assert _reasons(resolved, "contiguous") == [
        "tokens_per_block 100: max_seq_len, since the KV cache's layout is contiguous",
        "enable_block_reuse False: the KV cache's layout is contiguous, requests share no blocks",
    ]
    quiet = _resolve(kv_cache_config=KvCacheConfig(layout="contiguous", enable_block_reuse=False))
    assert quiet.config.kv_cache.tokens_per_block == MAX_SEQ_LEN and not _reasons(quiet, "enable_block_reuse")


@pytest.mark.parametrize(
    ("changes", "kv_cache", "expected"),
    [
        # As many tokens as take as much memory as the states, in whole multiples of 32.
        ({"elements_per_token": 100, "state_bytes": 400 * 96}, {}, 96),
        ({"elements_per_token": 100, "state_bytes": 400 * 96 + 1}, {}, 128),
        ({"elements_per_token": 100, "state_bytes": 1}, {}, 32),
        # Nothing but states: a longest request fills 16 blocks.
        ({"state_bytes": 1}, {}, 64),
        # Never more than fit, and what the user says holds.
        ({"elements_per_token": 1, "state_bytes": 10**6}, {}, 1000),
        ({"elements_per_token": 1, "state_bytes": 10**6}, {"max_tokens": 400}, 400),
        ({"elements_per_token": 1, "state_bytes": 10**6}, {"tokens_per_block": 16}, 16),
        ({"elements_per_token": 1, "state_bytes": 10**6}, {"layout": "contiguous"}, 1000),
    ],
)
def test_a_block_with_a_recurrent_state_holds_more_tokens(
    changes: dict[str, int], kv_cache: dict[str, Any], expected: int
) -> None:
    args = EngineArgs("model", kv_cache_config=KvCacheConfig(**kv_cache))
    resolved = resolve(args, ModelFacts(max_positions=1000, **changes), DeviceInfo(has_cuda=False, num_cpus=3))
    assert resolved.config.tokens_per_block == expected
    told = [reason for reason in resolved.reasons if "recurrent states" in reason]
    assert told == (
        []
        if kv_cache.keys() & {"tokens_per_block", "layout"}
        else [
            f"tokens_per_block {expected}: each block also holds recurrent states, {changes['state_bytes']} bytes, "
            "which take as much memory as many tokens"
        ]
    )


def test_a_wider_dtype_of_keys_and_values_makes_up_for_a_state_with_fewer_tokens() -> None:
    facts = ModelFacts(max_positions=10_000, dtype="bfloat16", elements_per_token=100, state_bytes=400 * 320)
    sizes = [
        resolve(EngineArgs("model", dtype=dtype), facts, DeviceInfo(False, 1)).config.tokens_per_block
        for dtype in ("float32", "bfloat16", "float16")
    ]
    assert sizes == [320, 640, 640]


def test_windows_that_hold_every_text_are_dropped_and_others_kept() -> None:
    for windows, kept in [(None, None), ((64,), (64,)), ((MAX_SEQ_LEN, 64), (MAX_SEQ_LEN, 64)), ((), None)]:
        kv_cache = _resolve(kv_cache_config=KvCacheConfig(max_attention_window=windows)).config.kv_cache
        assert kv_cache.max_attention_window == kept
    resolved = _resolve(kv_cache_config=KvCacheConfig(max_attention_window=(MAX_SEQ_LEN, 4096)))
    assert resolved.config.kv_cache.max_attention_window is None
    assert _reasons(resolved, "window") == [
        "max_attention_window none: [128, 4096] holds nothing below max_seq_len 128"
    ]


@pytest.mark.parametrize("num_iterations", [0, 5])
def test_kept_iterations(num_iterations: int) -> None:
    assert _resolve(iter_stats_max_iterations=num_iterations).config.iter_stats_max_iterations == num_iterations
    with pytest.raises(ConfigError, match="iter_stats_max_iterations -1 is out of range; it must be 0"):
        _resolve(iter_stats_max_iterations=-1)


def test_a_model_that_states_no_limit_needs_one_unless_its_state_is_recurrent() -> None:
    machine = DeviceInfo(has_cuda=False, num_cpus=3)
    with pytest.raises(ConfigError, match="max_seq_len must be set"):
        resolve(EngineArgs("model"), ModelFacts(), machine)
    resolved = resolve(EngineArgs("model"), ModelFacts(state_bytes=1000), machine)
    assert resolved.config.max_seq_len == 8192
    assert _reasons(resolved, "max_seq_len 8192: config.json states no limit")
    assert resolve(EngineArgs("model", max_seq_len=50), ModelFacts(), machine).config.max_seq_len == 50


@pytest.mark.parametrize(
    ("asked", "of_checkpoint", "dtype", "expected", "reason"),
    [
        ("auto", None, "auto", "float32", "kv_cache_dtype float32: the model's dtype"),
        ("auto", None, "bfloat16", "bfloat16", "kv_cache_dtype bfloat16: the model's dtype"),
        ("auto", "fp8", "auto", "fp8", "kv_cache_dtype fp8: the checkpoint was made for it"),
        ("auto", "int8", "float16", "int8", "kv_cache_dtype int8: the checkpoint was made for it"),
        ("float32", "fp8", "bfloat16", "float32", None),
        ("bfloat16", None, "auto", "bfloat16", None),
        ("float16", None, "auto", "float16", None),
        ("fp8", None, "auto", "fp8", None),
        ("fp8_e5m2", "fp8", "auto", "fp8_e5m2", None),
        ("int8", None, "auto", "int8", None),
    ],
)
def test_the_kv_cache_has_the_dtype_asked_for_else_that_of_the_checkpoint_else_that_of_the_model(
    asked: str, of_checkpoint: str | None, dtype: str, expected: str, reason: str | None
) -> None:
    args = EngineArgs("model", dtype=dtype, kv_cache_config=KvCacheConfig(dtype=asked))
    facts = ModelFacts(max_positions=MAX_SEQ_LEN, kv_cache_dtype=of_checkpoint)
    resolved = resolve(args, facts, DeviceInfo(False, 1))
    assert resolved.config.kv_cache.dtype == expected
    assert _reasons(resolved, "kv_cache_dtype") == ([] if reason is None else [reason])


def test_an_unknown_dtype_of_the_kv_cache_is_refused_with_the_choices() -> None:
    allowed = "auto, float32, bfloat16, float16, fp8, fp8_e5m2, int8"
    with pytest.raises(ConfigError, match=f"^kv_cache_dtype 'fp9' is not allowed; use {allowed}$"):
        _resolve(kv_cache_config=KvCacheConfig(dtype="fp9"))


def test_a_narrower_cache_makes_up_for_a_state_with_more_tokens() -> None:
    facts = ModelFacts(max_positions=10_000, elements_per_token=100, state_bytes=400 * 320)
    sizes = [
        resolve(EngineArgs("model", kv_cache_config=KvCacheConfig(dtype=dtype)), facts, DeviceInfo(False, 1))
        for dtype in ("float32", "bfloat16", "fp8", "int8")
    ]
    assert [resolved.config.tokens_per_block for resolved in sizes] == [320, 640, 1280, 1280]
