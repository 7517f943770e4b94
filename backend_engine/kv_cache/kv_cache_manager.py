"""``KVCacheManager``: which blocks each request holds, and what of a new request is cached already.

Owned by the executor thread. Answers the scheduler's questions (``KvCapacity``) and carries out its plans. The only
writer of blocks, ref counts, block tables and hashes; it never touches requests or tensors.
"""

from collections.abc import Iterable, Set

import numpy as np

from backend_engine.core.batch import ScheduledRequest, SchedulerOutput
from backend_engine.core.outputs import KvUsage
from backend_engine.core.protocols import PrefixMatch
from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.block import KVCacheBlock
from backend_engine.kv_cache.block_pool import BlockPool
from backend_engine.kv_cache.integrity import CacheState, check_cache
from backend_engine.kv_cache.prefix_index import HashChain, Place, PrefixIndex
from backend_engine.kv_cache.request_blocks import BlockTable, RequestBlocks

_NO_USAGE = KvUsage(0, 0)


class KVCacheManager:
    """Accounting of ``num_blocks`` blocks of ``tokens_per_block`` tokens; implements ``KvCapacity``.

    ``max_blocks_per_request`` and ``max_batch_size`` bound the block table. With ``enable_block_reuse`` off nothing is
    hashed, nothing matches and no request waits for another.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        max_blocks_per_request: int,
        max_batch_size: int,
        enable_block_reuse: bool = True,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_total_blocks = num_blocks
        self.max_blocks_per_request = max_blocks_per_request
        self.num_reused_blocks_total = 0
        """Blocks that requests found in the cache instead of computing them, since the start."""
        self._enable_block_reuse = enable_block_reuse
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, self._index)
        self._table = BlockTable(max_batch_size, max_blocks_per_request)
        self._holdings: dict[int, RequestBlocks] = {}
        self._chains: dict[int, HashChain] = {}
        self._usages: dict[int, KvUsage] = {}

    # Questions (KvCapacity and gauges); asking changes nothing that anybody can see.

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, the ones kept for reuse included."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold; a shared one counts once."""
        return self.num_total_blocks - self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that are kept for reuse."""
        return self._pool.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.tokens_per_block)

    def num_blocks_of(self, request_id: int) -> int:
        """Blocks that a request holds now; 0 for one the cache does not know."""
        holding = self._holdings.get(request_id)
        return 0 if holding is None else len(holding.blocks)

    def num_releasable_blocks(self, request_id: int) -> int:
        """Blocks that would become free if this request let go (those it shares with nobody)."""
        holding = self._holdings.get(request_id)
        return 0 if holding is None else sum(block.ref_count == 1 for block in holding.blocks)

    def match_prefix(self, request: LlmRequest, claimed: Set[bytes] = frozenset()) -> PrefixMatch:
        """Look the beginning of a waiting request up; at least its last token is left to compute.

        Nothing matches for a request that gives back its prompt's logits: every token has to be computed for them, and
        it waits for nobody, but others may wait for it.
        """
        if not self._enable_block_reuse:
            return PrefixMatch(0, 0, False)
        # The last token's logits are wanted: a block that ends with it cannot be taken, neither now nor later.
        max_reused = (request.num_tokens - 1) // self.tokens_per_block
        num_full = request.num_tokens // self.tokens_per_block
        keys = self._chain(request).extend(request, num_full)
        place: Place = request.cache_salt
        num_reused = num_held = 0
        for key in keys[:max_reused]:
            entry = self._index.find(key, place)
            if entry is None:
                break
            num_reused += 1
            num_held += entry.block.ref_count > 0
            place = entry.content_id
        next_block = keys[num_reused].block_hash if num_reused < num_full else None
        if request.sampling_params.return_context_logits:
            return PrefixMatch(0, 0, False, next_block)
        is_pending = (
            next_block is not None
            and num_reused < max_reused
            and (next_block in claimed or self._index.is_pending(next_block, request.request_id))
        )
        return PrefixMatch(num_reused * self.tokens_per_block, num_held, is_pending, next_block)

    def usage(self, request_id: int) -> KvUsage:
        """Blocks a request took over its life so far, those given up in pauses included; none for one the cache does
        not know. Known until ``free_resources``.
        """
        return self._usages.get(request_id, _NO_USAGE)

    def block_ids(self, request_id: int) -> list[int]:
        """Ids of the blocks a request holds, in the order of its text; empty for one the cache does not know."""
        holding = self._holdings.get(request_id)
        return [] if holding is None else [block.block_id for block in holding.blocks]

    def block_tables(self, output: SchedulerOutput) -> np.ndarray:
        """Block ids of each row's request: int32 ``[batch_size, max_blocks_used]``, filled up with 0. A fresh array."""
        holdings = self._holdings
        of_rows = [holdings[row.request.request_id] for row in output.rows]
        num_blocks = max([len(holding.blocks) for holding in of_rows], default=0)
        return self._table.gather([holding.slot for holding in of_rows], num_blocks)

    # Verbs: the three of a step, in this order.

    def prepare_resources(self, output: SchedulerOutput) -> None:
        """Give every row the blocks for its tokens; called before the requests advance.

        Paused requests let go first, then reused blocks are taken, and only then new ones: a new block may evict a
        cached one, which must not be one that the same step reuses. Cannot fail if the plan respected ``KvCapacity``.
        """
        for request in output.paused:
            self._release(request.request_id)
        holdings, tokens_per_block = self._holdings, self.tokens_per_block
        for row in output.context:
            if row.request.request_id not in holdings:
                self._begin(row)
        for request, start, num_tokens, _, _ in output.rows:
            if num_tokens == 1 and start % tokens_per_block:
                continue  # the usual generation row, whose token goes where the one before it went
            holding = holdings[request.request_id]
            num_new = -(-(start + num_tokens) // tokens_per_block) - len(holding.blocks)
            if num_new > 0:
                assert num_new <= self._pool.num_free, (
                    f"{request} needs {num_new} more blocks, {self._pool.num_free} of {self.num_total_blocks} free"
                )
                self._table.append(holding, [self._pool.allocate() for _ in range(num_new)])
                self._note_usage(request.request_id, num_new, 0)

    def update_resources(self, output: SchedulerOutput) -> None:
        """Index the blocks that this step filled, once its tokens are appended; requests that ended are passed over."""
        if not self._enable_block_reuse:
            return
        tokens_per_block = self.tokens_per_block
        for request, start, num_tokens, _, _ in output.rows:
            end = start + num_tokens
            if num_tokens == 1 and end % tokens_per_block:
                continue  # the usual generation row, which fills no block
            holding = self._holdings.get(request.request_id)
            # What this step computed and not what has been launched since; and only tokens that are known.
            num_full = min(end, request.num_tokens) // tokens_per_block
            if holding is not None and num_full > holding.num_settled:
                self._settle(request, holding, num_full)

    def free_resources(self, request: LlmRequest) -> None:
        """Let go of all a request has, if anything. Its indexed blocks stay reusable until they are evicted."""
        self._release(request.request_id)
        self._chains.pop(request.request_id, None)
        self._usages.pop(request.request_id, None)

    def check_integrity(self, requests: Iterable[LlmRequest]) -> None:
        """Recompute everything from scratch; ``AssertionError`` with numbers on the first contradiction.

        ``requests``: all that wait or run, and any that have ended.
        """
        check_cache(
            CacheState(
                self.tokens_per_block,
                self._pool,
                self._index,
                self._table,
                self._holdings,
                self._chains,
                self._usages,
            ),
            list(requests),
        )

    # The parts of the verbs.

    def _chain(self, request: LlmRequest) -> HashChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = HashChain(request.cache_salt, self.tokens_per_block)
        return chain

    def _begin(self, row: ScheduledRequest) -> None:
        """Open the books of a request that gets its first row: reused blocks, and marks on what it will compute."""
        request = row.request
        assert row.start == row.num_reused_tokens, f"first row of {request} starts at {row.start}"
        num_reused = row.num_reused_tokens // self.tokens_per_block
        holding = self._table.open(request.cache_salt)
        self._holdings[request.request_id] = holding
        if not self._enable_block_reuse:
            assert num_reused == 0, f"{num_reused} blocks to be reused for {request}, but reuse is off"
            return
        num_full = request.num_tokens // self.tokens_per_block
        keys = self._chain(request).extend(request, num_full)
        reused: list[KVCacheBlock] = []
        for key in keys[:num_reused]:
            assert holding.place is not None
            entry = self._index.find(key, holding.place)
            assert entry is not None, f"block {len(reused)} of {num_reused} to be reused for {request} is gone"
            self._pool.share(entry.block)
            reused.append(entry.block)
            holding.place = entry.content_id
        self._table.append(holding, reused)
        holding.num_settled = num_reused
        holding.num_marked = num_full
        for key in keys[num_reused:num_full]:
            self._index.mark_pending(key.block_hash, request.request_id)
        self.num_reused_blocks_total += num_reused
        self._note_usage(request.request_id, 0, num_reused)

    def _note_usage(self, request_id: int, num_allocated: int, num_reused: int) -> None:
        before = self._usages.get(request_id, _NO_USAGE)
        self._usages[request_id] = KvUsage(
            before.num_allocated_blocks + num_allocated, before.num_reused_blocks + num_reused
        )

    def _settle(self, request: LlmRequest, holding: RequestBlocks, num_full: int) -> None:
        """Index the blocks up to ``num_full``, which are computed now; they are pending no more."""
        keys = self._chain(request).extend(request, num_full)
        for i in range(holding.num_settled, num_full):
            self._index.clear_pending(keys[i].block_hash, request.request_id)
            # Without a place the chain is broken by a hash collision: what comes after it cannot be found either.
            if holding.place is not None:
                holding.place = self._index.insert(keys[i], holding.place, holding.blocks[i])
        holding.num_settled = num_full

    def _release(self, request_id: int) -> None:
        holding = self._holdings.pop(request_id, None)
        if holding is None:
            return
        if holding.num_marked > holding.num_settled:
            for key in self._chains[request_id].keys[holding.num_settled : holding.num_marked]:
                self._index.clear_pending(key.block_hash, request_id)
        self._table.close(holding)
        self._pool.release(holding.blocks)
