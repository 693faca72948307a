"""Which blocks of the KV cache belong to whom.

A block holds 32 positions of one sequence, or of several that begin with the same tokens: it is free again when the
last of them gives it back. A block whose content is known by a key (`publish`) keeps it after that, and can be had
again (`find`) until the memory is needed: the one unused for longest goes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv.errors import QkvError
from qkv.kernels.sizes import BLOCK, blocks_for
from qkv.model.feed import PagedCache


class CacheFullError(QkvError):
    """No block is left: too many positions are held at once."""


class BlockPool:
    """All blocks. What was given back last is given out first, so that the memory in use stays small."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self.evictions = 0
        """How many published blocks were overwritten so far."""
        self._empty = list(range(blocks - 1, -1, -1))
        self._users = [0] * blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: dict[int, None] = {}  # published and without users; the one unused for longest comes first

    @property
    def free(self) -> int:
        """How many blocks can be taken: those without users."""
        return len(self._empty) + len(self._kept)

    @property
    def kept(self) -> int:
        """How many of the free blocks can still be found by their keys."""
        return len(self._kept)

    def grow(self, cache: PagedCache, positions: int) -> None:
        """Give a sequence the blocks that it lacks for so many positions.

        Raises `CacheFullError`, and gives none, if there are fewer.
        """
        count = blocks_for(positions) - len(cache.blocks)
        if count > self.free:
            raise CacheFullError(
                f"the KV cache is full: {self.size} blocks of 32 positions, {self.free} free, {count} needed; "
                "end other requests, or load the model with a smaller context"
            )
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._users[block] = 1
            cache.blocks.append(block)

    def release(self, cache: PagedCache) -> None:
        """Take a sequence's blocks back; it is empty afterwards."""
        self._give_back(cache.blocks)
        cache.blocks, cache.length = [], 0

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        self._forget(block)
        self.evictions += 1
        return block

    def _give_back(self, blocks: Sequence[int]) -> None:
        """End one use of each. Of a sequence's published blocks its last are the first to be overwritten."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, "a block was given back twice"
            if self._users[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._empty.append(block)

    def publish(self, block: int, key: bytes) -> bool:
        """Let a complete block be found by `key`, which stands for what it holds; False if either is taken already."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key], self._key_of[block] = block, key
        return True

    def withdraw(self, block: int, key: bytes) -> None:
        """Let the block no longer be found, if it still is the one of that key."""
        if self._block_of.get(key) == block:
            self._forget(block)
            if block in self._kept:
                del self._kept[block]
                self._empty.append(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def find(self, key: bytes) -> int | None:
        """The block that was published with this key, if it is still there."""
        return self._block_of.get(key)

    def in_use(self, block: int) -> bool:
        """Whether somebody uses the block."""
        return self._users[block] > 0

    def adopt(self, cache: PagedCache, key: bytes) -> bool:
        """Let a sequence that ends with a full block go on with the block of this key; False if there is none."""
        block = self._block_of.get(key)
        if block is None:
            return False
        self._users[block] += 1
        self._kept.pop(block, None)
        at = blocks_for(cache.length)
        spare, cache.blocks[at:] = cache.blocks[at:], [block]
        self._give_back(spare)
        cache.length += BLOCK
        return True
