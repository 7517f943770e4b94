"""Free queue, pool and prefix index on their own."""

import random

import pytest

from backend_engine.kv_cache.block import FreeBlockQueue, KVCacheBlock
from backend_engine.kv_cache.block_pool import BlockPool
from backend_engine.kv_cache.prefix_index import (
    BlockHash,
    BlockKey,
    HashChain,
    PrefixIndex,
    hash_block,
    pack_tokens,
    root_hash,
)
from tests.support.scheduling_driver import make_request


def test_free_queue_against_a_plain_list() -> None:
    rng = random.Random(3)
    blocks = [KVCacheBlock(i) for i in range(12)]
    queue, model = FreeBlockQueue(), []
    for _ in range(2000):
        outside = [block for block in blocks if block not in model]
        choice = rng.randrange(4)
        if choice == 0 and outside:
            queue.push_back(block := rng.choice(outside))
            model.append(block)
        elif choice == 1 and outside:
            queue.push_front(block := rng.choice(outside))
            model.insert(0, block)
        elif choice == 2 and model:
            queue.remove(block := rng.choice(model))
            model.remove(block)
        elif choice == 3 and model:
            assert queue.pop_front() is model.pop(0)
        assert list(queue) == model and len(queue) == len(model)
        assert all(b.prev_free is None and b.next_free is None for b in blocks if b not in model)


def test_an_empty_free_queue_says_so() -> None:
    with pytest.raises(AssertionError, match="no free block left"):
        FreeBlockQueue().pop_front()


def _key(*token_ids: int) -> BlockKey:
    root = root_hash("")
    tokens = pack_tokens(token_ids)
    return BlockKey(hash_block(root, tokens), root, tokens)


def test_pool_uses_empty_blocks_first_then_the_least_recently_used() -> None:
    index = PrefixIndex()
    pool = BlockPool(6, index)
    first, second, third = ([pool.allocate() for _ in range(2)] for _ in range(3))
    for i, block in enumerate([*first, *second]):
        index.insert(_key(i, i), "", block)
    pool.release(second)
    pool.release(third)
    pool.release(first)
    assert pool.num_cached == 4 and pool.num_free == 6
    # Of each request the last block goes first.
    assert [block.block_id for block in pool.free_queue] == [4, 5, 3, 2, 1, 0]
    pool.share(second[0])
    pool.release([second[0]])
    assert [block.block_id for block in pool.free_queue] == [4, 5, 3, 1, 0, 2]
    taken = [pool.allocate() for _ in range(4)]
    assert [block.block_id for block in taken] == [4, 5, 3, 1]
    assert pool.num_cached == len(index) == 2 and all(block.block_hash is None for block in taken)


def test_pool_counts_references() -> None:
    index = PrefixIndex()
    pool = BlockPool(1, index)
    block = pool.allocate()
    index.insert(_key(1), "", block)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0 and block.ref_count == 1
    pool.release([block])
    assert pool.num_free == pool.num_cached == 1
    with pytest.raises(AssertionError, match="released but not held"):
        pool.release([block])


def test_only_indexed_blocks_are_shared() -> None:
    pool = BlockPool(1, PrefixIndex())
    with pytest.raises(AssertionError, match="shared but not indexed"):
        pool.share(pool.allocate())


def _hash(parent: BlockHash, *token_ids: int) -> BlockHash:
    return hash_block(parent, pack_tokens(token_ids))


def test_hashes_depend_on_salt_parent_and_tokens() -> None:
    root = root_hash("")
    hashes = {
        _hash(root, 1, 2), _hash(root, 2, 1), _hash(root, 1, 2, 3),
        _hash(root_hash("a"), 1, 2), _hash(_hash(root, 1, 2), 1, 2), root, root_hash("a"),
    }  # fmt: skip
    assert len(hashes) == 7
    assert pack_tokens([1, 2]) == pack_tokens((1, 2)) != pack_tokens((1, 2 + 2**32))
    assert root_hash("\ud800") != root_hash("?"), "any string the client sends is a salt"


def test_chain_computes_each_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "backend_engine.kv_cache.prefix_index.hash_block", lambda *args: calls.append(args) or hash_block(*args)
    )
    request = make_request(0, 11)
    chain = HashChain("", 4)
    assert len(chain.extend(request, 1)) == 1
    keys = chain.extend(request, 2)
    assert chain.extend(request, 2) is keys and len(calls) == 2
    assert [key.tokens for key in keys] == [pack_tokens((0, 1, 2, 3)), pack_tokens((4, 5, 6, 7))]
    assert keys[1].parent_hash == keys[0].block_hash
    with pytest.raises(AssertionError, match="3 blocks of 4 tokens asked"):
        chain.extend(request, 3)


def test_index_keeps_the_first_of_two_equal_blocks() -> None:
    index = PrefixIndex()
    first, second = KVCacheBlock(0), KVCacheBlock(1)
    content_id = index.insert(_key(1, 2), "", first)
    assert index.insert(_key(1, 2), "", second) == content_id
    found = index.find(_key(1, 2), "")
    assert found is not None and found.block is first and second.block_hash is None
    index.remove(first)
    assert index.find(_key(1, 2), "") is None and len(index) == 0
    assert index.insert(_key(1, 2), "", second) != content_id, "an id is never used for another content"


def test_index_compares_tokens_and_place() -> None:
    index = PrefixIndex()
    key = _key(1, 2)
    content_id = index.insert(key, "", KVCacheBlock(0))
    assert content_id is not None
    assert index.find(key._replace(tokens=pack_tokens((1, 3))), "") is None
    for place in ("salt", content_id, 7):
        assert index.find(key, place) is None
        assert index.insert(key, place, KVCacheBlock(1)) is None
    assert index.find(key, "") is not None


def test_pending_marks_belong_to_the_first() -> None:
    index = PrefixIndex()
    block_hash = _key(1).block_hash
    index.mark_pending(block_hash, 1)
    index.mark_pending(block_hash, 2)
    assert index.is_pending(block_hash, 2) and not index.is_pending(block_hash, 1)
    index.clear_pending(block_hash, 2)
    assert index.is_pending(block_hash, 3)
    index.clear_pending(block_hash, 1)
    assert not index.is_pending(block_hash, 3) and not list(index.pending())
