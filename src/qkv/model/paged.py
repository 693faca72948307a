"""Which blocks of the KV cache belong to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkv.errors import QkvError


class CacheFullError(QkvError):
    """No block is left: too many positions are held at once."""


@dataclass(eq=False)
class PagedCache:
    """One sequence's part of the cache: its blocks of 32 positions in order, and how many positions are complete."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class BlockPool:
    """The free blocks. What was given back last is given out first, so that the memory in use stays small."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many blocks are left."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks, whatever they hold. Raises `CacheFullError`, and takes none, if there are fewer."""
        if count > len(self._free):
            raise CacheFullError(
                f"the KV cache is full: {self.size} blocks of 32 positions, {len(self._free)} free, {count} needed; "
                "end other requests, or load the model with a smaller context"
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that nobody reads any more."""
        self._free.extend(reversed(blocks))
