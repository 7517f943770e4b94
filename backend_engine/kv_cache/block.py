"""``KVCacheBlock``: the book entry of one block, and ``FreeBlockQueue``: the blocks nobody holds, in order of use.

Used by ``BlockPool`` only. Numbers and links; the keys and values themselves are tensors elsewhere.
"""

from collections.abc import Iterator


class KVCacheBlock:
    """One block of ``tokens_per_block`` tokens.

    ``ref_count``: block tables that hold it. ``block_hash`` and ``tokens`` (packed) are set while the prefix index
    knows it. ``prev_free`` and ``next_free`` belong to ``FreeBlockQueue``.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count", "tokens")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.tokens: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, cached={self.block_hash is not None})"


class FreeBlockQueue:
    """Doubly linked list through the blocks; every operation but iteration is O(1).

    A block must not be pushed while it is in the queue, nor removed while it is not; the pool's ref counts see to it.
    """

    def __init__(self) -> None:
        self._first: KVCacheBlock | None = None
        self._last: KVCacheBlock | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From the first to be used to the last."""
        block = self._first
        while block is not None:
            yield block
            block = block.next_free

    def push_front(self, block: KVCacheBlock) -> None:
        """Make ``block`` the next to be used."""
        block.next_free = self._first
        if self._first is None:
            self._last = block
        else:
            self._first.prev_free = block
        self._first = block
        self._length += 1

    def push_back(self, block: KVCacheBlock) -> None:
        """Make ``block`` the last to be used."""
        block.prev_free = self._last
        if self._last is None:
            self._first = block
        else:
            self._last.next_free = block
        self._last = block
        self._length += 1

    def pop_front(self) -> KVCacheBlock:
        """Take out the block to be used next."""
        block = self._first
        assert block is not None, "no free block left"
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out from wherever it stands."""
        before, after = block.prev_free, block.next_free
        if before is None:
            self._first = after
        else:
            before.next_free = after
        if after is None:
            self._last = before
        else:
            after.prev_free = before
        block.prev_free = block.next_free = None
        self._length -= 1
