"""Blocks are given out once, come back once, and are never in two hands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders import compiled, packed
from qkv.errors import QkvError
from qkv.model.compiled import Chunk
from qkv.model.paged import BlockPool, CacheFullError, PagedCache
from tiny import random_tensors, tiny_config


@given(st.lists(st.integers(0, 12), max_size=40), st.randoms(use_true_random=False))
def test_no_block_is_in_two_hands(sizes, random):
    pool, held = BlockPool(20), []
    for size in sizes:
        free = pool.free
        if size > free:
            with pytest.raises(CacheFullError, match=f"20 blocks .*{free} free, {size} needed"):
                pool.take(size)
            assert pool.free == free  # none was taken
        else:
            held.append(pool.take(size))
            assert len(held[-1]) == size
        if held and random.random() < 0.5:
            pool.give_back(held.pop(random.randrange(len(held))))
        blocks = [block for taken in held for block in taken]
        assert len(blocks) == len(set(blocks)) == 20 - pool.free
        assert set(blocks) <= set(range(20))


def test_memory_in_use_stays_small():
    """What came back last goes out first, in the same order."""
    pool = BlockPool(100)
    first = pool.take(5)
    pool.give_back(first)
    assert pool.take(5) == first


def test_a_full_cache_is_one_clear_line():
    error = CacheFullError("x")
    assert isinstance(error, QkvError)
    with pytest.raises(CacheFullError) as caught:
        BlockPool(2).take(3)
    assert "smaller context" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sequences_are_told_apart_by_identity():
    assert PagedCache() != PagedCache()
    assert PagedCache().blocks is not PagedCache().blocks


@pytest.fixture(scope="module")
def decoder():
    config = tiny_config(num_hidden_layers=1)
    return compiled(config, packed(config, random_tensors(config)), context=128)


def test_a_sequence_takes_a_block_for_each_32_positions(decoder):
    cache = decoder.new_cache()
    start = decoder.pool.free
    for length, blocks in ((1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 4)):
        decoder.step([Chunk(cache, [3] * (length - cache.length), "none")])
        assert (cache.length, len(cache.blocks), start - decoder.pool.free) == (length, blocks, blocks)
    decoder.release(cache)
    assert (cache.length, cache.blocks, decoder.pool.free) == (0, [], start)
    decoder.release(cache)  # nothing is given back twice
    assert decoder.pool.free == start


def test_a_step_that_finds_no_block_leaves_the_sequences_as_they_were(decoder):
    """Two sequences fill the cache; a third does not get in, and the others go on to the same bits."""
    start = decoder.pool.free
    ids = list(range(100, 228))
    lonely = decoder.new_cache()
    expected = decoder.step([Chunk(lonely, ids, "last")])
    decoder.release(lonely)
    caches = [decoder.new_cache() for _ in range(start // 4)]
    for cache in caches:
        decoder.step([Chunk(cache, ids[:127], "none")])
    rest = decoder.pool.take(decoder.pool.free)
    late = decoder.new_cache()
    with pytest.raises(CacheFullError):
        decoder.step([Chunk(late, [1])])
    assert late.length == 0
    assert all(cache.length == 127 for cache in caches)
    for cache in caches:
        assert (decoder.step([Chunk(cache, ids[127:], "last")]) == expected).all()
        decoder.release(cache)
    decoder.release(late)
    decoder.pool.give_back(rest)
    assert decoder.pool.free == start


# ------------------------------------------------------------------------------------------ blocks that can be found


def test_a_published_block_is_kept_and_found_until_it_is_needed():
    pool = BlockPool(3)
    a, b = pool.take(2)
    assert pool.publish(a, b"a")
    assert not pool.publish(b, b"a")  # one block for a key
    assert not pool.publish(a, b"b")  # and one key for a block
    pool.give_back([a, b])
    assert (pool.free, pool.kept, pool.find(b"a")) == (3, 1, a)
    assert sorted(pool.take(2)) == sorted({0, 1, 2} - {a})  # what nobody can find goes first
    assert (pool.take(1), pool.evictions, pool.find(b"a")) == ([a], 1, None)


def test_a_shared_block_is_free_when_the_last_user_has_given_it_back():
    pool = BlockPool(2)
    (a,) = pool.take(1)
    pool.publish(a, b"a")
    pool.share(a)
    pool.give_back([a])
    assert pool.in_use(a)
    assert pool.free == 1
    pool.give_back([a])
    assert not pool.in_use(a)
    pool.share(a)  # out of those that are kept
    assert (pool.free, pool.kept) == (1, 0)
    pool.give_back([a])
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back([a])


def test_the_block_unused_for_longest_goes_first_and_of_one_sequence_the_last():
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    for i, block in enumerate([*first, *second]):
        pool.publish(block, bytes([i]))
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(4) == [second[1], second[0], first[1], first[0]]


def test_what_is_withdrawn_is_found_no_more_but_stays_with_its_users():
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.give_back([b])
    pool.withdraw(a, b"a")
    pool.withdraw(b, b"b")
    pool.withdraw(b, b"b")
    assert pool.find(b"a") is pool.find(b"b") is None
    assert (pool.in_use(a), pool.free, pool.kept) == (True, 1, 0)
    pool.publish(a, b"c")
    pool.withdraw(a, b"a")  # an old name of it
    assert pool.find(b"c") == a


def test_a_reset_takes_everything_back():
    pool = BlockPool(3)
    pool.publish(pool.take(2)[0], b"a")
    pool.reset()
    assert (pool.free, pool.kept, pool.find(b"a")) == (3, 0, None)
    assert sorted(pool.take(3)) == [0, 1, 2]
