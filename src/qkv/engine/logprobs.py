"""Log-probabilities: the natural logarithm of the softmax of a row of logits, in float64.

They are those of the model's own distribution, before temperature, penalties and bans. Logits are finite, and so are
their log-probabilities: none is ever -inf.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qkv.engine.shortlist import shortlist


def log_normalizer(logits: NDArray[np.float32]) -> float:
    """log Σ e^logit of a row: a logit minus this is its log-probability."""
    largest = float(logits.max())
    e = logits.astype(np.float64)
    e -= largest
    return largest + float(np.log(np.exp(e, out=e).sum()))


def token_logprobs(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of rows of logits [n, vocab] and one token id for each [n]: the ids' log-probabilities, float64 [n].

    A row at a time: the bits do not depend on how many rows come together, and no second table of logits is made.
    """
    return np.array([float(row[token]) - log_normalizer(row) for row, token in zip(logits, ids, strict=True)])


def top_logprobs(logits: NDArray[np.float32], count: int, normalizer: float) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens of a row and their log-probabilities, likeliest first; ties go to the lowest id."""
    ids = shortlist(logits, count)
    order = np.lexsort((ids, -logits[ids]))[:count]
    return tuple((int(token), float(logits[token]) - normalizer) for token in ids[order])
