"""``PrefixIndex``: which block holds the keys and values of which beginning of a text.

Used by ``KVCacheManager`` and, for evictions, ``BlockPool``. Blocks are found by a chain of hashes, but a hash alone
is never believed: the tokens and the place in the chain are compared too. Nothing here counts references.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NewType

from backend_engine.core.request import LlmRequest
from backend_engine.kv_cache.block import KVCacheBlock

BlockHash = NewType("BlockHash", bytes)

BYTES_PER_TOKEN = 8

_HASH_BYTES = 16


def root_hash(salt: str) -> BlockHash:
    """The parent hash of every first block computed under ``salt``."""
    return BlockHash(
        hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES, person=b"cache_salt").digest()
    )


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as ``BYTES_PER_TOKEN`` each: to be hashed, and compared at once, without an object for each token."""
    return array("q", token_ids).tobytes()


def hash_block(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Hash (blake2b) of a full block: that of the block before it, and its own packed tokens."""
    return BlockHash(hashlib.blake2b(parent + tokens, digest_size=_HASH_BYTES).digest())


class BlockKey(NamedTuple):
    """What a full block of a text looks like: its hash, the hash before it and its packed tokens."""

    block_hash: BlockHash
    parent_hash: BlockHash
    tokens: bytes


class HashChain:
    """The keys of one request's full blocks, computed once each, as far as anybody asked."""

    __slots__ = ("_tokens_per_block", "keys", "salt")

    def __init__(self, salt: str, tokens_per_block: int) -> None:
        self.salt = salt
        self.keys: list[BlockKey] = []
        self._tokens_per_block = tokens_per_block

    def extend(self, request: LlmRequest, num_blocks: int) -> list[BlockKey]:
        """All keys computed so far, at least ``num_blocks`` of them; the request must know that many tokens."""
        keys, size = self.keys, self._tokens_per_block
        assert num_blocks * size <= request.num_tokens, f"{num_blocks} blocks of {size} tokens asked of {request}"
        num_known = len(keys)
        if num_known >= num_blocks:
            return keys
        parent = keys[-1].block_hash if keys else root_hash(self.salt)
        packed = pack_tokens(request.token_ids(num_known * size, num_blocks * size))
        block_bytes = size * BYTES_PER_TOKEN
        for begin in range(0, len(packed), block_bytes):
            tokens = packed[begin : begin + block_bytes]
            block_hash = hash_block(parent, tokens)
            keys.append(BlockKey(block_hash, parent, tokens))
            parent = block_hash
        return keys


Place = int | str
"""What comes before a block, exactly: the ``content_id`` of the block before it, or the salt for a first block."""


class CachedBlock(NamedTuple):
    """An indexed block. ``content_id`` names this content at this place and is never used again for another."""

    block: KVCacheBlock
    parent_hash: BlockHash
    place: Place
    content_id: int


class PrefixIndex:
    """Hash to indexed block, and hash to the request that is computing such a block right now.

    Why places: two texts may hold the same tokens in block 5 after different beginnings. If their hashes collided,
    comparing tokens alone would hand one text's block to the other. Equal tokens after the same ``content_id`` (for a
    first block: under the same salt) are the same text, by induction, whatever the hashes are.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, CachedBlock] = {}
        self._pending: dict[bytes, int] = {}
        self._next_content_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterable[tuple[bytes, CachedBlock]]:
        """All (hash, indexed block); for the integrity check."""
        return self._entries.items()

    def pending(self) -> Iterable[tuple[bytes, int]]:
        """All (hash, id of the request that computes it); for the integrity check."""
        return self._pending.items()

    def find(self, key: BlockKey, place: Place) -> CachedBlock | None:
        """The block that holds exactly ``key.tokens`` at ``place``, if there is one."""
        entry = self._entries.get(key.block_hash)
        if entry is None or entry.place != place or entry.block.tokens != key.tokens:
            return None
        return entry

    def insert(self, key: BlockKey, place: Place, block: KVCacheBlock) -> int | None:
        """Index ``block``; return the content id of this content.

        If another block is indexed with the same content already, that one stays and its id is returned; if the hash
        belongs to another content, nothing is indexed and ``None`` is returned.
        """
        entry = self._entries.get(key.block_hash)
        if entry is not None:
            return entry.content_id if self.find(key, place) is not None else None
        content_id = self._next_content_id
        self._next_content_id += 1
        self._entries[key.block_hash] = CachedBlock(block, key.parent_hash, place, content_id)
        block.block_hash = key.block_hash
        block.tokens = key.tokens
        return content_id

    def remove(self, block: KVCacheBlock) -> None:
        """Forget an indexed block, because it is about to be written."""
        assert block.block_hash is not None, f"{block} is not indexed"
        entry = self._entries.pop(block.block_hash)
        assert entry.block is block, f"{block} has the hash of {entry.block}"
        block.block_hash = None
        block.tokens = None

    def mark_pending(self, block_hash: BlockHash, request_id: int) -> None:
        """Note that ``request_id`` is going to compute this block; the first to say so counts."""
        self._pending.setdefault(block_hash, request_id)

    def clear_pending(self, block_hash: BlockHash, request_id: int) -> None:
        """Take the mark back if it is this request's."""
        if self._pending.get(block_hash) == request_id:
            del self._pending[block_hash]

    def is_pending(self, block_hash: BlockHash, request_id: int) -> bool:
        """True if a request other than ``request_id`` is computing this block."""
        return self._pending.get(block_hash, request_id) != request_id
