"""What a step of the decoder is given, and how it can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from qkv.errors import QkvError

if TYPE_CHECKING:  # it loads Numba, and planning needs none
    from qkv.model.probe import Edits


class StepAbortedError(QkvError):
    """The step was broken off. The sequences are as they were before it."""


class CacheOverflowError(QkvError):
    """Keys or values of some feeds are too large for an f16 cache. All sequences are as they were before the step.

    feeds: which, counted in the order of the step's. A step without these is computed as if they had not been there.
    """

    def __init__(self, feeds: Sequence[int]) -> None:
        super().__init__(
            "keys or values of this text are beyond 65,504, which is too large for an f16 cache; "
            'load the model with cache="f32" or cache="int8"'
        )
        self.feeds = tuple(feeds)


@dataclass(eq=False)
class PagedCache:
    """One sequence's part of the cache: its blocks of 32 positions in order, and how many positions are complete."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Feed(NamedTuple):
    """New tokens of one sequence, and whose logits are wanted: of none, of the last or of all of them.

    The cache has the blocks for them already: a step only reads which they are.
    """

    cache: PagedCache
    ids: Sequence[int]
    outputs: Literal["none", "last", "all"] = "last"
    taps: Sequence[int] = ()
    """Layers whose numbers `tapped` gives after the step."""
    edits: Edits | None = None
    """What is changed on the way; the same object in all steps of a sequence."""
