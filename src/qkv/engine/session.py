"""A decoder and its cache for one user alone: measuring, scoring, tests. The engine is for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.engine.blocks import BlockPool
from qkv.model.feed import Feed, PagedCache

if TYPE_CHECKING:
    from qkv.model.readback import Tapped


class StepRunner(Protocol):
    """What the engine asks of a decoder."""

    blocks: int
    """How many blocks its cache has."""
    step_tokens: int
    """The most tokens of a step."""
    outputs: int
    """The most rows of logits of a step."""

    def step(self, feeds: Sequence[Feed], *, copy: bool = True) -> NDArray[np.float32]:
        """Run the feeds, whose caches have the blocks they need and grow by them; rows of logits, in their order.

        Without `copy` the rows are overwritten by the next step. If it raises, the caches are as they were;
        `StepAbortedError` means that it may be run again, `CacheOverflowError` without the feeds it names.
        """

    def likeliest(self) -> NDArray[np.int64]:
        """The id of the largest logit of each of the last step's rows, the lowest of equals; -1: one is not finite."""

    def tapped(self, feeds: Sequence[Feed], number: int) -> Tapped:
        """What the layers in `taps` of a feed had: of the last step's feeds the one of this number."""

    def abort(self) -> None:
        """Make a step that is running in another thread raise `StepAbortedError` soon."""


class Session:
    """Steps of a decoder that nobody else uses. Its sequences are caches: begin with an empty `PagedCache()`."""

    def __init__(self, decoder: StepRunner) -> None:
        self.decoder, self.pool = decoder, BlockPool(decoder.blocks)

    def step(self, feeds: Sequence[Feed], *, copy: bool = True) -> NDArray[np.float32]:
        """A step of the decoder on caches that first get the blocks they lack. Raises `CacheFullError` besides."""
        for feed in feeds:
            self.pool.grow(feed.cache, feed.cache.length + len(feed.ids))
        return self.decoder.step(feeds, copy=copy)

    def run(self, ids: Sequence[int], cache: PagedCache) -> NDArray[np.float32]:
        """Compute the next tokens of one sequence, in as many steps as it takes; the last one's logits [vocab]."""
        size = self.decoder.step_tokens
        for start in range(0, len(ids), size):
            last = start + size >= len(ids)
            logits = self.step([Feed(cache, ids[start : start + size], "last" if last else "none")])
        return logits[0]

    def release(self, cache: PagedCache) -> None:
        """Take a sequence's blocks back; it is empty afterwards."""
        self.pool.release(cache)
