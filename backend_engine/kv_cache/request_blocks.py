"""``RequestBlocks``: what one request holds, and ``BlockTable``: the same as an array that attention can read.

Used by ``KVCacheManager`` only. The array is written when a block is added, so a step that adds none costs nothing.
"""

from dataclasses import dataclass, field

import numpy as np

from backend_engine.kv_cache.block import KVCacheBlock
from backend_engine.kv_cache.prefix_index import Place


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of a request that has begun, in the order of its text.

    slot: its row in the block table. num_settled: leading blocks that are full, computed and dealt with by the prefix
    index. place: what comes before block ``num_settled`` there; ``None`` = unknown to the index. num_marked: blocks
    from ``num_settled`` up to here are marked as being computed by this request.
    """

    slot: int
    place: Place | None
    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_settled: int = 0
    num_marked: int = 0


class BlockTable:
    """Persistent int32 ``[max_batch_size, max_blocks_per_request]``, a row for each request that holds blocks."""

    def __init__(self, max_batch_size: int, max_blocks_per_request: int) -> None:
        self.array = np.zeros((max_batch_size, max_blocks_per_request), dtype=np.int32)
        self.free_slots = list(range(max_batch_size))

    def open(self, salt: str) -> RequestBlocks:
        """A free row, for a request whose first block is computed under ``salt``."""
        assert self.free_slots, f"all {len(self.array)} rows of the block table are taken"
        return RequestBlocks(self.free_slots.pop(), salt)

    def append(self, holding: RequestBlocks, blocks: list[KVCacheBlock]) -> None:
        """Add blocks to the end of a request's text."""
        begin = len(holding.blocks)
        end = begin + len(blocks)
        assert end <= self.array.shape[1], f"{end} blocks for one request, {self.array.shape[1]} allowed"
        holding.blocks += blocks
        if len(blocks) == 1:  # as in generation, where building an array from a list would cost more than all the rest
            self.array[holding.slot, begin] = blocks[0].block_id
        else:
            self.array[holding.slot, begin:end] = [block.block_id for block in blocks]

    def close(self, holding: RequestBlocks) -> None:
        """Give the row back, zeroed."""
        self.array[holding.slot, : len(holding.blocks)] = 0
        self.free_slots.append(holding.slot)

    def gather(self, slots: list[int], num_blocks: int) -> np.ndarray:
        """Copy of the first ``num_blocks`` columns of the given rows: int32 ``[len(slots), num_blocks]``."""
        return self.array[np.asarray(slots, dtype=np.intp), :num_blocks]
