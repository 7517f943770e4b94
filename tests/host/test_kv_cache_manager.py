"""``KVCacheManager``: reuse, waiting for pending blocks, eviction order, salts, tables and gauges."""

import random
from typing import Any

import numpy as np
import pytest

from backend_engine.config.engine_config import SchedulerConfig
from backend_engine.config.sampling_params import SamplingParams
from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.core.outputs import KvUsage
from backend_engine.core.protocols import KvCapacity, PrefixMatch
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.kv_cache_manager import KVCacheManager
from backend_engine.kv_cache.prefix_index import pack_tokens
from backend_engine.scheduler.request_scheduler import RequestScheduler
from tests.support.scheduling_driver import Driver, SimulatedMemory, make_request

PREFIX = list(range(1000, 1016))
"""Four blocks of four tokens."""


class _Manager(KVCacheManager):
    """With the memory that its blocks stand for."""

    def __init__(self, num_blocks: int, reuse: bool) -> None:
        super().__init__(num_blocks, 4, 16, 8, reuse)
        self.memory = SimulatedMemory(4)


def _manager(num_blocks: int = 32, *, reuse: bool = True) -> _Manager:
    return _Manager(num_blocks, reuse)


def _driver(manager: _Manager, **changes: object) -> Driver:
    config = SchedulerConfig(**{"max_batch_size": 8, "max_num_tokens": 64, **changes})
    return Driver(RequestScheduler(config), manager, memory=manager.memory)


def _run(manager: _Manager, *requests: LlmRequest) -> None:
    driver = _driver(manager)
    driver.add(*requests)
    driver.run()


def _match(manager: KVCacheManager, request: LlmRequest) -> PrefixMatch:
    """What the cache holds of a request that then goes away again; without the name of the block after that."""
    match = manager.match_prefix(request)
    manager.free_resources(request)
    return match._replace(next_block=None)


def _plan(*rows: ScheduledRequest, paused: tuple[LlmRequest, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(0, tuple(rows), (), paused)


def _whole(request: LlmRequest, reused: int = 0) -> ScheduledRequest:
    return ScheduledRequest(request, reused, request.num_tokens - reused, True, reused)


def test_fits_the_protocol() -> None:
    kv: KvCapacity = _manager()
    assert (kv.tokens_per_block, kv.num_total_blocks, kv.num_free_blocks) == (4, 32, 32)
    assert [kv.num_blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_request_holds_the_blocks_of_its_tokens_and_leaves_them_reusable() -> None:
    manager = _manager()
    request = make_request(0, 10)
    output = _plan(_whole(request))
    manager.prepare_resources(output)
    assert manager.num_blocks_of(0) == manager.num_releasable_blocks(0) == manager.num_used_blocks == 3
    request.advance(10)
    manager.update_resources(output)
    manager.check_integrity([request])
    manager.free_resources(request)
    manager.free_resources(request)
    manager.check_integrity([])
    assert (manager.num_used_blocks, manager.num_free_blocks, manager.num_cached_blocks) == (0, 32, 2)
    assert manager.block_ids(0) == [] and manager.num_blocks_of(0) == manager.num_releasable_blocks(0) == 0


@pytest.mark.parametrize(("num_tokens", "num_reused"), [(16, 12), (17, 16), (20, 16), (4, 0), (5, 4), (3, 0)])
def test_whole_blocks_are_reused_and_one_token_is_always_left(num_tokens: int, num_reused: int) -> None:
    manager = _manager()
    _run(manager, make_request(0, [*PREFIX, 1, 2, 3, 4], 1))
    again = make_request(1, [*PREFIX, 9, 9, 9, 9][:num_tokens])
    assert _match(manager, again) == PrefixMatch(num_reused, 0, False)
    driver = _driver(manager)
    driver.add(again)
    (row,) = driver.step().context
    assert (row.start, row.num_tokens, row.num_reused_tokens) == (num_reused, num_tokens - num_reused, num_reused)
    assert manager.num_reused_blocks_total == num_reused // 4
    driver.run()
    assert again.num_cached_tokens == num_reused


def test_generated_blocks_are_reused_too() -> None:
    manager = _manager()
    first = make_request(0, PREFIX, 9)
    _run(manager, first)
    follow_up = make_request(1, [*PREFIX, *first.output_token_ids, 5])
    # The last token made was never stored; 16 + 8 are.
    assert _match(manager, follow_up).num_tokens == 24


def test_held_blocks_are_counted() -> None:
    manager = _manager()
    driver = _driver(manager)
    driver.add(make_request(0, [*PREFIX, 1, 2], 8))
    driver.step()
    other = make_request(1, [*PREFIX, 3])
    assert _match(manager, other) == PrefixMatch(16, 4, False)
    driver.add(other)
    driver.step()
    assert manager.num_releasable_blocks(0) == manager.num_releasable_blocks(1) == 1
    assert manager.num_used_blocks == 6
    driver.run()


def test_salts_never_share() -> None:
    manager = _manager()
    _run(manager, make_request(0, [*PREFIX, 1], 1, cache_salt="alice"))
    assert _match(manager, make_request(1, [*PREFIX, 1], cache_salt="bob")).num_tokens == 0
    assert _match(manager, make_request(2, [*PREFIX, 1])).num_tokens == 0
    assert _match(manager, make_request(3, [*PREFIX, 1], cache_salt="alice")).num_tokens == 16
    _run(manager, make_request(4, [*PREFIX, 1], 1, cache_salt="bob"))
    assert _match(manager, make_request(5, [*PREFIX, 1], cache_salt="bob")).num_tokens == 16


def test_reuse_switched_off() -> None:
    manager = _manager(reuse=False)
    _run(manager, make_request(0, [*PREFIX, 1], 1), make_request(1, [*PREFIX, 1], 1))
    assert _match(manager, make_request(2, [*PREFIX, 1])) == PrefixMatch(0, 0, False)
    assert manager.num_cached_blocks == manager.num_reused_blocks_total == 0


def test_a_request_that_gives_back_its_prompts_logits_reuses_nothing_and_waits_for_nobody() -> None:
    manager = _manager()
    with_logits = SamplingParams(return_context_logits=True)
    _run(manager, make_request(0, [*PREFIX, 1], 1))
    again = make_request(1, [*PREFIX, 1], 1, params=with_logits)
    assert _match(manager, again) == PrefixMatch(0, 0, False)
    _run(manager, again)
    assert (again.num_cached_tokens, manager.num_reused_blocks_total) == (0, 0)
    # Not even for a block that another one is computing; but what it computes is there for others.
    other = [*reversed(PREFIX), 1]
    driver = _driver(manager, max_num_tokens=8)
    driver.add(make_request(2, other, 1), make_request(3, other, 1, params=with_logits))
    driver.step()
    assert not _match(manager, make_request(4, other, 1, params=with_logits)).is_pending
    driver.run()
    _run(manager, make_request(5, [7] * 9, 1, params=with_logits))
    assert _match(manager, make_request(6, [7] * 9)).num_tokens == 8


def test_usage_counts_the_blocks_of_a_requests_life() -> None:
    manager = _manager()
    first, second = make_request(0, [*PREFIX, 1], 5), make_request(1, [*PREFIX, 2], 5)
    driver = _driver(manager)
    assert manager.usage(0) == (0, 0)
    driver.add(first)
    driver.step()
    assert manager.usage(0) == (5, 0)
    for _ in range(3):
        driver.step()
    assert manager.usage(0) == (5, 0), "20 tokens are stored in five blocks"
    driver.add(second)
    driver.step()
    assert manager.usage(1) == (1, 4)
    driver.run()
    assert manager.usage(0) == manager.usage(1) == (0, 0), "forgotten with the request"


def test_usage_goes_on_after_a_pause() -> None:
    manager = _manager()
    request = make_request(0, 10, 5)
    output = _plan(_whole(request))
    manager.prepare_resources(output)
    request.advance(10)
    manager.update_resources(output)
    manager.prepare_resources(_plan(paused=(request,)))
    request.pause()
    assert manager.usage(0) == (3, 0) and manager.num_blocks_of(0) == 0
    manager.prepare_resources(_plan(_whole(request, 8)))
    assert manager.usage(0) == (4, 2), "two of its own blocks are found again"


def test_a_request_waits_for_blocks_that_another_is_computing() -> None:
    manager = _manager()
    driver = _driver(manager, max_num_tokens=10)
    driver.add(make_request(0, [*PREFIX, 1], 3))
    driver.step()
    waiter, stranger = make_request(1, [*PREFIX, 2], 3), make_request(2, 3, 1)
    assert _match(manager, waiter) == PrefixMatch(8, 2, True)
    driver.add(waiter, stranger)
    outputs = [driver.step() for _ in range(2)]
    contexts = [[(row.request.request_id, row.start) for row in output.context] for output in outputs]
    assert contexts == [[(0, 10), (2, 0)], [(1, 16)]]
    driver.run()


@pytest.mark.parametrize("how", ["cancelled", "paused"])
def test_waiters_go_on_when_the_one_they_wait_for_is_gone(how: str) -> None:
    manager = _manager()
    driver = _driver(manager, max_num_tokens=8)
    first, waiter = make_request(0, [*PREFIX, 1], 3), make_request(1, [*PREFIX, 2], 3)
    driver.add(first)
    driver.step()
    assert _match(manager, waiter).is_pending
    if how == "cancelled":
        driver.cancel(first)
    else:
        manager.prepare_resources(_plan(paused=(first,)))
        first.pause()
        manager.check_integrity([first, waiter])
        assert manager.num_blocks_of(0) == 0
    assert _match(manager, waiter) == PrefixMatch(8, 0, False)


def test_a_request_never_waits_on_itself() -> None:
    manager = _manager()
    request = make_request(0, [*PREFIX, 1])
    manager.prepare_resources(_plan(ScheduledRequest(request, 0, 4, False)))
    assert not manager.match_prefix(request).is_pending
    assert _match(manager, make_request(1, [*PREFIX, 1])).is_pending


def test_requests_admitted_together_compute_a_shared_prefix_once() -> None:
    manager = _manager()
    driver = _driver(manager)
    twins = [make_request(i, [*PREFIX, i], 12) for i in range(2)]
    driver.add(*twins)
    driver.step()
    assert manager.num_used_blocks == 5, "the second waits"
    driver.run()
    assert twins[1].num_cached_tokens == 16
    assert _match(manager, make_request(2, [*PREFIX, 5])) == PrefixMatch(16, 0, False)


def test_requests_that_generate_the_same_keep_the_first_block() -> None:
    manager = _manager()
    driver = _driver(manager)
    twins = [make_request(i, [1, 2], 26) for i in range(2)]
    driver.add(*twins)
    driver.step()
    assert manager.num_used_blocks == 2
    driver.run()
    assert manager.num_cached_blocks == 6, "27 stored tokens, indexed once"
    # What the second made after its un-indexed blocks is found behind the blocks of the first.
    assert _match(manager, make_request(3, [1, 2, *twins[1].output_token_ids])).num_tokens == 24


def test_least_recently_used_blocks_go_first_and_ends_before_beginnings() -> None:
    manager = _manager(12)
    old, new = [make_request(i, 17, 1) for i in range(2)]
    _run(manager, old)
    _run(manager, new)
    assert manager.num_cached_blocks == 8 and manager.num_free_blocks == 12
    _run(manager, make_request(2, 24, 1))  # 6 blocks: 4 without content, then the two last of the old one
    assert _match(manager, make_request(3, [*old.prompt_token_ids, 1])).num_tokens == 8
    assert _match(manager, make_request(4, [*new.prompt_token_ids, 1])).num_tokens == 16
    _run(manager, make_request(5, [*old.prompt_token_ids[:8], 1], 1))  # used again: now younger than the new one's
    _run(manager, make_request(6, 13, 1))
    assert _match(manager, make_request(7, [*old.prompt_token_ids, 1])).num_tokens == 8


def test_reused_blocks_are_taken_before_any_are_evicted() -> None:
    manager = _manager(8)
    _run(manager, make_request(0, PREFIX, 1))
    greedy, reuser = make_request(1, 16), make_request(2, [*PREFIX[:12], 7])
    assert _match(manager, reuser).num_tokens == 12
    manager.prepare_resources(_plan(_whole(greedy), _whole(reuser, 12)))
    reuser.reuse(12)
    manager.check_integrity([greedy, reuser])
    assert manager.num_free_blocks == 0


def test_exhaustion_is_an_assertion_with_numbers() -> None:
    manager = _manager(4)
    with pytest.raises(AssertionError, match=r"needs 5 more blocks, 4 of 4 free"):
        manager.prepare_resources(_plan(_whole(make_request(0, 17))))


def test_block_tables_follow_the_rows() -> None:
    manager = _manager()
    assert manager.block_tables(_plan()).shape == (0, 0)
    first, second = make_request(0, 10), make_request(1, 3)
    output = _plan(_whole(first), _whole(second))
    manager.prepare_resources(output)
    tables = manager.block_tables(output)
    assert tables.dtype == np.int32 and tables.shape == (2, 3)
    assert tables.tolist() == [manager.block_ids(0), [*manager.block_ids(1), 0, 0]]
    assert manager.block_tables(_plan(_whole(second))).tolist() == [manager.block_ids(1)]
    tables[:] = 99
    manager.check_integrity([first, second])


def test_the_step_indexes_only_what_it_computed() -> None:
    # With two steps on their way, the next one counts as computed already; if it fails, its blocks hold rubbish.
    manager = _manager()
    request = make_request(0, PREFIX)
    first = _plan(ScheduledRequest(request, 0, 8, False))
    manager.prepare_resources(first)
    request.advance(8)
    manager.prepare_resources(_plan(ScheduledRequest(request, 8, 8, True)))
    request.advance(8)
    manager.update_resources(first)
    manager.free_resources(request)
    assert manager.num_cached_blocks == 2


def test_a_row_whose_request_has_ended_is_harmless() -> None:
    manager = _manager()
    request = make_request(0, 8)
    output = _plan(_whole(request))
    manager.prepare_resources(output)
    manager.free_resources(request)
    manager.update_resources(output)
    manager.check_integrity([])
    assert manager.num_free_blocks == 32


class _CountingDict(dict[int, Any]):
    lookups = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(key, default)


def test_a_generation_row_that_fills_no_block_costs_no_lookup_when_settled() -> None:
    manager = _manager()
    requests = [make_request(i, 4, 9) for i in range(8)]
    context = _plan(*(_whole(request) for request in requests))
    manager.prepare_resources(context)
    lookups = []
    for start in range(4, 9):
        for request in requests:
            request.advance(request.num_pending_tokens)
            request.promise()
            request.append_token(5)
        output = SchedulerOutput(0, (), tuple(ScheduledRequest(request, start, 1, True) for request in requests))
        manager.prepare_resources(output)
        counting = manager._holdings = _CountingDict(manager._holdings)
        manager.update_resources(output)
        lookups.append(counting.lookups)
    assert lookups == [0, 0, 0, 8, 0]


@pytest.mark.parametrize("seed", range(3))
def test_colliding_hashes_never_give_wrong_blocks(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With one hash for all, or few, whatever is reused is still the request's own beginning."""
    rng = random.Random(seed)
    num_hashes = rng.choice([1, 2, 3])

    def weak_hash(parent: bytes, tokens: bytes) -> bytes:
        return bytes([sum(tokens) % num_hashes])

    monkeypatch.setattr("backend_engine.kv_cache.prefix_index.hash_block", weak_hash)
    monkeypatch.setattr("backend_engine.kv_cache.prefix_index.root_hash", lambda salt: b"root")
    manager = _manager(20)
    driver = _driver(manager, max_num_tokens=16)
    for i in range(60):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        driver.add(make_request(i, prompt, rng.randint(1, 6), cache_salt=rng.choice(["", "x"])))
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run()
    assert manager.num_used_blocks == 0 and manager.num_reused_blocks_total > 0


def test_integrity_check_notices_what_is_wrong() -> None:
    def fresh() -> tuple[_Manager, LlmRequest]:
        manager = _manager()
        driver = _driver(manager)
        request = make_request(0, 9, 5)
        driver.add(request)
        driver.step()
        return manager, request

    def broken(manager: KVCacheManager, request: LlmRequest, match: str, others: tuple[LlmRequest, ...] = ()) -> None:
        with pytest.raises(AssertionError, match=match):
            manager.check_integrity([request, *others])

    manager, request = fresh()
    manager.check_integrity([request])
    manager._holdings[0].blocks[0].ref_count = 2
    broken(manager, request, "is held by 1")
    manager, request = fresh()
    manager._table.array[manager._holdings[0].slot, 0] = 31
    broken(manager, request, "request 0: .* is not")
    manager, request = fresh()
    manager._holdings[0].blocks[0].tokens = pack_tokens((1, 2, 3, 4))
    broken(manager, request, "hash to")
    manager, request = fresh()
    manager._holdings[0].blocks[0].block_hash = None
    broken(manager, request, "indexed under another hash")
    manager, request = fresh()
    manager._pool.num_cached = 5
    broken(manager, request, "0 reusable, 5 counted")
    manager, request = fresh()
    manager._pool.free_queue.pop_front()
    broken(manager, request, "28 free \\+ 3 held of 32")
    manager, request = fresh()
    manager._index.mark_pending(b"x", 0)  # type: ignore[arg-type]
    broken(manager, request, "request 0 marks 78")
    manager, request = fresh()
    with pytest.raises(AssertionError, match=r"requests \[0\] own something"):
        manager.check_integrity([])
    manager, request = fresh()
    manager._usages[0] = KvUsage(2, 0)
    broken(manager, request, "holds 3 blocks and took")
    manager, request = fresh()
    request.num_computed_tokens = 13
    broken(manager, request, "holds 3 blocks and computed 4")
