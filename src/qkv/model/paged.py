"""Which blocks of the KV cache belong to whom.

A block holds 32 positions of one sequence, or of several that begin with the same tokens: it is free again when the
last of them gives it back. A block whose content is known by a key (`publish`) keeps it after that, and can be had
again (`find`) until the memory is needed: the one unused for longest goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from qkv.errors import QkvError
from qkv.kernels.sizes import BLOCK

if TYPE_CHECKING:  # it loads Numba, and planning needs none
    from qkv.model.probe import Edits


class CacheFullError(QkvError):
    """No block is left: too many positions are held at once."""


class StepAbortedError(QkvError):
    """The step was broken off. The sequences are as they were before it."""


class CacheOverflowError(QkvError):
    """Keys or values of some chunks are too large for an f16 cache. All sequences are as they were before the step.

    chunks: which, counted in the order of the step's. A step without these is computed as if they had not been there.
    """

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__(
            "keys or values of this text are beyond 65,504, which is too large for an f16 cache; "
            'load the model with cache="f32" or cache="int8"'
        )
        self.chunks = tuple(chunks)


@dataclass(eq=False)
class PagedCache:
    """One sequence's part of the cache: its blocks of 32 positions in order, and how many positions are complete."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Chunk(NamedTuple):
    """New tokens of one sequence, and whose logits are wanted: of none, of the last or of all of them."""

    cache: PagedCache
    ids: Sequence[int]
    outputs: Literal["none", "last", "all"] = "last"
    taps: Sequence[int] = ()
    """Layers whose numbers `tapped` gives after the step."""
    edits: Edits | None = None
    """What is changed on the way; the same object in all steps of a sequence."""


def blocks_for(positions: int) -> int:
    """How many blocks hold that many positions."""
    return -(-positions // BLOCK)


class BlockPool:
    """All blocks. What was given back last is given out first, so that the memory in use stays small."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self.evictions = 0
        """How many published blocks were overwritten so far."""
        self.reset()

    def reset(self) -> None:
        """Take every block from everybody, and forget all keys."""
        self._empty = list(range(self.size - 1, -1, -1))
        self._users = [0] * self.size
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

    def take(self, count: int) -> list[int]:
        """`count` blocks, whatever they hold. Raises `CacheFullError`, and takes none, if there are fewer."""
        if count > self.free:
            raise CacheFullError(
                f"the KV cache is full: {self.size} blocks of 32 positions, {self.free} free, {count} needed; "
                "end other requests, or load the model with a smaller context"
            )
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        self._forget(block)
        self.evictions += 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
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

    def share(self, block: int) -> None:
        """Use a block that was found; `give_back` ends it."""
        self._users[block] += 1
        self._kept.pop(block, None)
