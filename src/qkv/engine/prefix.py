"""The prefix cache: blocks that were computed once are found again by the tokens they stand for.

The key of a full block is a cryptographic hash of its tokens and of the key before it, so it stands for the whole
beginning of the text: two texts share a block only if they are equal up to its end. Keys and values of a position
depend on nothing but the tokens up to it, bit for bit, so a block that is found is what would have been computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from qkv.engine.blocks import BlockPool
from qkv.engine.request import Answer
from qkv.kernels.sizes import BLOCK


@dataclass(frozen=True)
class CacheStats:
    """What the cache holds, and how often it helped since the start."""

    queries: int
    """Answers whose prompts were looked up."""
    hits: int
    """Those that found at least one block."""
    tokens_reused: int
    evictions: int
    """Blocks overwritten although they could have been found."""
    blocks: int
    free_blocks: int
    """Blocks that no running request uses; kept ones are among them."""
    kept_blocks: int


def extend_keys(keys: list[bytes], ids: Sequence[int], blocks: int) -> None:
    """Grow `keys` to those of the first `blocks` full blocks of `ids`."""
    for start in range(len(keys) * BLOCK, blocks * BLOCK, BLOCK):
        content = array("q", ids[start : start + BLOCK]).tobytes()
        keys.append(hashlib.blake2b((keys[-1] if keys else b"") + content, digest_size=32).digest())


class PrefixCache:
    """Lets answers share the blocks of a pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.queries = self.hits = self.tokens_reused = 0

    def stats(self) -> CacheStats:
        """The counters now."""
        pool = self.pool
        return CacheStats(
            self.queries, self.hits, self.tokens_reused, pool.evictions, pool.size, pool.free, pool.kept
        )  # fmt: skip

    def adopt(self, answer: Answer) -> None:
        """Go on with the blocks that somebody has computed by now. At least one token is left to run."""
        while (key := self.next_key(answer)) is not None and self.pool.adopt(answer.cache, key):
            answer.reused += 0 if answer.token_ids else BLOCK

    def next_key(self, answer: Answer) -> bytes | None:
        """The key of the block that comes next, if that is a full one and not the text's last token is in it."""
        at, rest = divmod(answer.cache.length, BLOCK)
        if rest or answer.remaining <= BLOCK or not answer.adopts:
            return None
        extend_keys(answer.keys, answer.ids, at + 1)
        return answer.keys[at]

    def keys_to_come(self, answer: Answer) -> list[bytes]:
        """The keys of the full blocks that it still has to compute, and others may then find."""
        if answer.edits is not None:
            return []
        full = len(answer.ids) // BLOCK
        extend_keys(answer.keys, answer.ids, full)
        return answer.keys[answer.cache.length // BLOCK : full]

    def shared_blocks(self, answer: Answer) -> int:
        """How many blocks it could adopt that are in use anyway."""
        if not answer.adopts:
            return 0
        full = (len(answer.ids) - 1) // BLOCK
        extend_keys(answer.keys, answer.ids, full)
        shared = 0
        for key in answer.keys[:full]:
            block = self.pool.find(key)
            if block is None:
                break
            shared += self.pool.in_use(block)
        return shared

    def publish(self, answer: Answer) -> None:
        """Let the blocks that are complete by now be found. Those of edits are its own."""
        if answer.edits is not None:
            return
        full = answer.cache.length // BLOCK
        extend_keys(answer.keys, answer.ids, full)
        for at in range(answer.looked_at, full):
            block, key = answer.cache.blocks[at], answer.keys[at]
            if self.pool.publish(block, key):
                answer.published.append((block, key))
        answer.looked_at = full

    def count(self, answer: Answer) -> None:
        """Note, when its first token is there, how much of its prompt was found."""
        self.queries += 1
        self.hits += answer.reused > 0
        self.tokens_reused += answer.reused

    def withdraw(self, answer: Answer) -> None:
        """Let none of the blocks that it published be found again."""
        for block, key in answer.published:
            self.pool.withdraw(block, key)
        answer.published.clear()
