"""Blocks are given out once, come back once, and are never in two hands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders import compiled, packed
from qkv.engine.blocks import BlockPool, CacheFullError
from qkv.engine.session import Session
from qkv.errors import QkvError
from qkv.model.feed import Feed, PagedCache
from tiny import random_tensors, tiny_config


def sequence(pool: BlockPool, blocks: int) -> PagedCache:
    """A sequence that has so many blocks, with nothing in them yet."""
    cache = PagedCache()
    pool.grow(cache, 32 * blocks)
    assert len(cache.blocks) == blocks
    return cache


@given(st.lists(st.integers(0, 12), max_size=40), st.randoms(use_true_random=False))
def test_no_block_is_in_two_hands(sizes, random):
    pool, held = BlockPool(20), []
    for size in sizes:
        free = pool.free
        cache = random.choice(held) if held and random.random() < 0.3 else PagedCache()
        before = list(cache.blocks)
        missing = max(0, size - len(before))
        positions = random.randint(32 * size - 31, 32 * size) if size else 0
        if missing > free:
            with pytest.raises(CacheFullError, match=f"20 blocks .*{free} free, {missing} needed"):
                pool.grow(cache, positions)
            assert (pool.free, cache.blocks) == (free, before)  # none was taken
        else:
            pool.grow(cache, positions)
            assert len(cache.blocks) == max(size, len(before)) and cache.blocks[: len(before)] == before
            if cache not in held:
                held.append(cache)
        if held and random.random() < 0.5:
            gone = held.pop(random.randrange(len(held)))
            pool.release(gone)
            assert (gone.blocks, gone.length) == ([], 0)
        blocks = [block for cache in held for block in cache.blocks]
        assert len(blocks) == len(set(blocks)) == 20 - pool.free
        assert set(blocks) <= set(range(20))


def test_memory_in_use_stays_small():
    """What came back last goes out first, in the same order."""
    pool = BlockPool(100)
    cache = sequence(pool, 5)
    first = cache.blocks
    pool.release(cache)
    assert sequence(pool, 5).blocks == first


def test_a_full_cache_is_one_clear_line():
    with pytest.raises(QkvError) as caught:
        sequence(BlockPool(2), 3)
    assert "smaller context" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sequences_are_told_apart_by_identity():
    assert PagedCache() != PagedCache()
    assert PagedCache().blocks is not PagedCache().blocks


@pytest.fixture(scope="module")
def session():
    config = tiny_config(num_hidden_layers=1)
    return Session(compiled(config, packed(config, random_tensors(config)), context=128))


def test_a_sequence_takes_a_block_for_each_32_positions(session):
    cache, start = PagedCache(), session.pool.free
    for length, blocks in ((1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 4)):
        session.step([Feed(cache, [3] * (length - cache.length), "none")])
        assert (cache.length, len(cache.blocks), start - session.pool.free) == (length, blocks, blocks)
    session.release(cache)
    assert (cache.length, cache.blocks, session.pool.free) == (0, [], start)
    session.release(cache)  # nothing is given back twice
    assert session.pool.free == start


def test_a_step_that_finds_no_block_leaves_the_sequences_as_they_were(session):
    """Two sequences fill the cache; a third does not get in, and the others go on to the same bits."""
    start = session.pool.free
    ids = list(range(100, 228))
    lonely = PagedCache()
    expected = session.step([Feed(lonely, ids, "last")])
    session.release(lonely)
    caches = [PagedCache() for _ in range(start // 4)]
    for cache in caches:
        session.step([Feed(cache, ids[:127], "none")])
    rest = sequence(session.pool, session.pool.free)
    late = PagedCache()
    with pytest.raises(CacheFullError):
        session.step([Feed(late, [1])])
    assert late.length == 0
    assert all(cache.length == 127 for cache in caches)
    for cache in caches:
        assert (session.step([Feed(cache, ids[127:], "last")]) == expected).all()
    for cache in (*caches, late, rest):
        session.release(cache)
    assert session.pool.free == start


def test_a_step_takes_no_blocks_itself(session):
    """Whoever feeds it has: a decoder that writes where nobody gave it room would write into somebody's words."""
    with pytest.raises(AssertionError, match="has taken the blocks"):
        session.decoder.step([Feed(PagedCache(), [1])])


# ------------------------------------------------------------------------------------------ blocks that can be found


def test_a_published_block_is_kept_and_found_until_it_is_needed():
    pool = BlockPool(3)
    cache = sequence(pool, 2)
    a, b = cache.blocks
    assert pool.publish(a, b"a")
    assert not pool.publish(b, b"a")  # one block for a key
    assert not pool.publish(a, b"b")  # and one key for a block
    pool.release(cache)
    assert (pool.free, pool.kept, pool.find(b"a")) == (3, 1, a)
    assert sorted(sequence(pool, 2).blocks) == sorted({0, 1, 2} - {a})  # what nobody can find goes first
    assert (sequence(pool, 1).blocks, pool.evictions, pool.find(b"a")) == ([a], 1, None)


def test_a_shared_block_is_free_when_the_last_user_has_given_it_back():
    pool = BlockPool(2)
    first, second, third = sequence(pool, 1), PagedCache(), PagedCache()
    (a,) = first.blocks
    pool.publish(a, b"a")
    assert pool.adopt(second, b"a")
    assert (second.blocks, second.length) == ([a], 32)
    stolen = PagedCache([a])
    pool.release(first)
    assert pool.in_use(a)
    assert pool.free == 1
    pool.release(second)
    assert not pool.in_use(a)
    assert pool.adopt(third, b"a")  # out of those that are kept
    assert (pool.free, pool.kept) == (1, 0)
    pool.release(third)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(stolen)


def test_what_is_found_takes_the_place_of_what_was_taken_to_compute_it():
    pool = BlockPool(4)
    first, second = sequence(pool, 1), sequence(pool, 2)
    pool.publish(first.blocks[0], b"a")
    assert not pool.adopt(second, b"b")
    assert (len(second.blocks), second.length, pool.free) == (2, 0, 1)
    assert pool.adopt(second, b"a")
    assert (second.blocks, second.length, pool.free) == (first.blocks, 32, 3)


def test_the_block_unused_for_longest_goes_first_and_of_one_sequence_the_last():
    pool = BlockPool(4)
    first, second = sequence(pool, 2), sequence(pool, 2)
    a, b, c, d = [*first.blocks, *second.blocks]
    for i, block in enumerate([a, b, c, d]):
        pool.publish(block, bytes([i]))
    pool.release(second)
    pool.release(first)
    assert sequence(pool, 4).blocks == [d, c, b, a]


def test_what_is_withdrawn_is_found_no_more_but_stays_with_its_users():
    pool = BlockPool(2)
    first, second = sequence(pool, 1), sequence(pool, 1)
    (a,), (b,) = first.blocks, second.blocks
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release(second)
    pool.withdraw(a, b"a")
    pool.withdraw(b, b"b")
    pool.withdraw(b, b"b")
    assert pool.find(b"a") is pool.find(b"b") is None
    assert (pool.in_use(a), pool.free, pool.kept) == (True, 1, 0)
    pool.publish(a, b"c")
    pool.withdraw(a, b"a")  # an old name of it
    assert pool.find(b"c") == a
