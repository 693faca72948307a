"""The largest of many logits, found without sorting them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RUN = 64  # tokens that share a maximum


def shortlist(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits and some more, in their order, but for those that are -inf.

    Of any `count` tokens the smallest logit is a lower bound of the wanted ones. Taking each run's largest, the runs
    with the `count` largest give a bound that few tokens reach.
    """
    if count * RUN >= len(logits):
        return np.flatnonzero(logits > -np.inf)
    whole = len(logits) // RUN * RUN
    largest = logits[:whole].reshape(-1, RUN).max(axis=1)
    bound = np.partition(largest, len(largest) - count)[len(largest) - count]
    return np.flatnonzero(logits >= bound) if bound > -np.inf else np.flatnonzero(logits > bound)
