"""The invariants of the KV cache, recomputed from scratch. For tests, ``ENGINE_CHECK_INVARIANTS`` and idle moments.

Called by ``KVCacheManager.check_integrity``; reads everything, changes nothing, trusts no counter.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from backend_engine.core.outputs import KvUsage
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache import prefix_index
from backend_engine.kv_cache.block_pool import BlockPool
from backend_engine.kv_cache.prefix_index import BYTES_PER_TOKEN, BlockHash, HashChain, PrefixIndex
from backend_engine.kv_cache.request_blocks import BlockTable, RequestBlocks


@dataclass(frozen=True)
class CacheState:
    """All that the manager keeps."""

    tokens_per_block: int
    pool: BlockPool
    index: PrefixIndex
    table: BlockTable
    holdings: dict[int, RequestBlocks]
    chains: dict[int, HashChain]
    usages: dict[int, KvUsage]


def check_cache(state: CacheState, requests: list[LlmRequest]) -> None:
    """``AssertionError`` with numbers on the first contradiction."""
    _check_blocks(state)
    _check_table(state)
    _check_index(state)
    _check_requests(state, requests)


def _check_blocks(state: CacheState) -> None:
    """Each block is in one place, and its ref count is the number of requests that hold it."""
    pool = state.pool
    num_holders = Counter(block.block_id for holding in state.holdings.values() for block in holding.blocks)
    for block in pool.blocks:
        assert block.ref_count == num_holders[block.block_id], f"{block} is held by {num_holders[block.block_id]}"
    free = list(pool.free_queue)
    free_ids = {block.block_id for block in free}
    assert len(free) == len(free_ids) == pool.num_free, (
        f"{len(free)} free, {len(free_ids)} ids, {pool.num_free} counted"
    )
    for before, after in pairwise(free):
        assert after.prev_free is before, f"{after} follows {before}, which it does not know"
        assert before.block_hash is None or after.block_hash is not None, f"{after} without content after {before}"
    both = free_ids & num_holders.keys()
    assert not both, f"blocks {sorted(both)} are free and held"
    num_held = len(num_holders)
    assert len(free) + num_held == len(pool.blocks), f"{len(free)} free + {num_held} held of {len(pool.blocks)}"
    num_cached = sum(block.block_hash is not None for block in free)
    assert num_cached == pool.num_cached, f"{num_cached} reusable, {pool.num_cached} counted"


def _check_table(state: CacheState) -> None:
    """Block table rows equal the lists, and each row belongs to one request or to nobody."""
    table = state.table
    slots = sorted(table.free_slots + [holding.slot for holding in state.holdings.values()])
    assert slots == list(range(len(table.array))), f"rows of the block table: {slots} of {len(table.array)}"
    for request_id, holding in state.holdings.items():
        block_ids = [block.block_id for block in holding.blocks]
        assert len(set(block_ids)) == len(block_ids), f"request {request_id} holds a block twice: {block_ids}"
        row = table.array[holding.slot].tolist()
        assert row == block_ids + [0] * (len(row) - len(block_ids)), f"request {request_id}: {row} is not {block_ids}"
    for slot in table.free_slots:
        assert not table.array[slot].any(), f"free row {slot} holds {table.array[slot].tolist()}"


def _check_index(state: CacheState) -> None:
    """An indexed hash leads to a block whose tokens hash to it, and back."""
    for block_hash, entry in state.index.entries():
        block = entry.block
        assert block.block_hash == block_hash, f"{block} is indexed under another hash"
        assert block.tokens is not None, f"{block} has lost its tokens"
        assert len(block.tokens) == state.tokens_per_block * BYTES_PER_TOKEN, f"tokens of {block}"
        expected = prefix_index.hash_block(entry.parent_hash, block.tokens)
        assert expected == block_hash, f"tokens of {block} hash to {expected.hex()}, not {block_hash.hex()}"
    num_hashed = sum(block.block_hash is not None for block in state.pool.blocks)
    assert num_hashed == len(state.index), f"{num_hashed} blocks have a hash, {len(state.index)} are indexed"


def _check_requests(state: CacheState, requests: list[LlmRequest]) -> None:
    """A request holds what it computed, a finished or unknown one nothing; marks belong to those who run."""
    alive = {request.request_id for request in requests if not request.is_finished}
    for owned in (state.holdings, state.chains, state.usages):
        strangers = set(owned) - alive
        assert not strangers, f"requests {sorted(strangers)} own something but have ended or are unknown"
    for request in requests:
        holding = state.holdings.get(request.request_id)
        if holding is None:
            continue
        num_blocks = len(holding.blocks)
        usage = state.usages[request.request_id]
        assert num_blocks <= sum(usage), f"{request} holds {num_blocks} blocks and took {usage} in all"
        num_computed = -(-request.num_computed_tokens // state.tokens_per_block)
        assert num_blocks >= num_computed, f"{request} holds {num_blocks} blocks and computed {num_computed}"
        assert holding.num_settled <= num_blocks, f"{request}: {holding.num_settled} blocks settled of {num_blocks}"
    marks: set[tuple[bytes, int]] = set()
    for request_id, holding in state.holdings.items():
        if holding.num_marked > holding.num_settled:
            keys = state.chains[request_id].keys[holding.num_settled : holding.num_marked]
            marks |= {(BlockHash(key.block_hash), request_id) for key in keys}
    for block_hash, request_id in state.index.pending():
        assert (block_hash, request_id) in marks, f"request {request_id} marks {block_hash.hex()} but does not run it"
