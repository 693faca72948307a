"""Sets of tokens as bits: bit t % 32 of word t // 32 is token t."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]


def mask_of(ids: Iterable[int], vocab_size: int) -> Mask:
    """The mask of some tokens; ids that the vocabulary does not have are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[[id for id in ids if 0 <= id < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def ids_of(mask: Mask) -> list[int]:
    """The tokens of a mask, in order."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits)]
