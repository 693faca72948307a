"""Log-probabilities: the natural logarithm of the softmax of a row of logits, in float64.

They are relative to the tokens of the vocabulary: rows of the head that no token has are left out of the sum. They
are those of the model's own distribution, before temperature, penalties and bans. A token's logit is finite, and so is
its log-probability: none that is reported is ever -inf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RUN = 64
"""Neighbouring tokens that share a maximum in `shortlist`."""


def log_normalizer(logits: NDArray[np.float32]) -> float:
    """log Σ e^logit of a row: a logit minus this is its log-probability."""
    largest = float(logits.max())
    e = logits.astype(np.float64)
    e -= largest
    return largest + float(np.log(np.exp(e, out=e).sum()))


def log_normalizers(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """`log_normalizer` of each row of logits [n, vocab], float64 [n].

    A row at a time: the bits do not depend on how many rows come together, and no second table of logits is made.
    """
    return np.array([log_normalizer(row) for row in logits])


def token_logprobs(
    logits: NDArray[np.float32], ids: NDArray[np.int64], normalizers: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Of rows of logits [n, vocab] and one token id for each [n]: the ids' log-probabilities, float64 [n].

    normalizers: `log_normalizers` of the rows, if they are known.
    """
    chosen = logits[np.arange(len(ids)), ids].astype(np.float64)
    return chosen - (log_normalizers(logits) if normalizers is None else normalizers)


def divergences(
    p: NDArray[np.float32],
    q: NDArray[np.float32],
    p_normalizers: NDArray[np.float64],
    q_normalizers: NDArray[np.float64],
) -> NDArray[np.float64]:
    """KL(p ‖ q) = Σ p (log p - log q) of each pair of rows of logits [n, vocab], in nats, float64 [n].

    Not negative but for rounding, and exactly 0 for equal rows. Logits of -inf are of ids that no token has: the same
    ones in all rows, and no terms of the sum.
    """
    result = np.empty(len(p))
    unused = np.flatnonzero(p[0] == -np.inf)
    log_p, difference = np.empty(p.shape[1]), np.empty(p.shape[1])  # for all rows: taking memory anew takes longer
    for i in range(len(p)):
        log_p[:], difference[:] = p[i], q[i]
        log_p -= p_normalizers[i]
        difference -= q_normalizers[i]
        log_p[unused] = difference[unused] = 0  # so that their difference is 0
        np.subtract(log_p, difference, out=difference)
        result[i] = np.multiply(np.exp(log_p, out=log_p), difference, out=difference).sum()
    return result


def top_logprobs(logits: NDArray[np.float32], count: int, normalizer: float) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens of a row and their log-probabilities, likeliest first; ties go to the lowest id."""
    ids = shortlist(logits, count)
    order = np.lexsort((ids, -logits[ids]))[:count]
    return tuple((int(token), float(logits[token]) - normalizer) for token in ids[order])


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
