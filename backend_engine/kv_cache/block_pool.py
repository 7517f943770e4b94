"""``BlockPool``: all blocks, and who may have one. Owns ref counts and the order in which free blocks are used.

Called by ``KVCacheManager`` only. Knows neither requests nor scheduling. Each block is either held (``ref_count`` > 0)
or in the free queue; a free block that is still indexed is reusable until somebody needs it for something new.
"""

from collections.abc import Sequence

from backend_engine.kv_cache.block import FreeBlockQueue, KVCacheBlock
from backend_engine.kv_cache.prefix_index import PrefixIndex


class BlockPool:
    """``num_blocks`` blocks with ids from 0. Free order: blocks without content first, then least recently used."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue()
        for block in self.blocks:
            self.free_queue.push_back(block)
        self._index = index
        self.num_cached = 0
        """Free blocks that are kept for reuse."""

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, reusable ones included."""
        return len(self.free_queue)

    def allocate(self) -> KVCacheBlock:
        """Take the free block that is missed least, evicting what it held; its ``ref_count`` becomes 1."""
        block = self.free_queue.pop_front()
        assert block.ref_count == 0, f"{block} was free"
        if block.block_hash is not None:
            self._index.remove(block)
            self.num_cached -= 1
        block.ref_count = 1
        return block

    def share(self, block: KVCacheBlock) -> None:
        """Hold an indexed block once more; it leaves the free queue if nobody held it."""
        assert block.block_hash is not None, f"{block} is shared but not indexed"
        if block.ref_count == 0:
            self.free_queue.remove(block)
            self.num_cached -= 1
        block.ref_count += 1

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let go of a request's blocks, given in the order of its text.

        The last are put into the free queue first: the beginning of a text is what others are likeliest to share.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is released but not held"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:
                self.free_queue.push_front(block)
            else:
                self.free_queue.push_back(block)
                self.num_cached += 1
