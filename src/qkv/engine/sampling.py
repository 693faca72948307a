"""From a row of logits to the next token: temperature, min_p, top_k, top_p, and one random number.

The order is fixed (docs: decisions): temperature first, so that min_p and top_p see the probabilities that are
sampled from. Randomness is keyed by (seed, choice, position): a request's text does not depend on what runs beside it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qkv.engine.params import SamplingParams

RUN = 64  # tokens that share a maximum in `_shortlist`


def sample(logits: NDArray[np.float32], params: SamplingParams, *, position: int, choice: int = 0) -> int:
    """The next token's id. `params` has temperature and seed set; `position` is the new token's place in the text.

    Ties, and the order in which top_k and top_p fill up, go to the lowest id.
    """
    if not params.temperature:
        return int(np.argmax(logits))
    assert params.seed is not None
    ids, probabilities = candidates(logits, params)
    cumulative = np.cumsum(probabilities)
    drawn = uniform(params.seed, choice, position) * cumulative[-1]
    # Rounding may put `drawn` on the very end of the last bin.
    return int(ids[min(np.searchsorted(cumulative, drawn, side="right"), len(ids) - 1)])


def candidates(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, and their probabilities before renormalizing.

    The likeliest come first, unless no number limits them: then they are in the order of their ids.
    """
    top_k = min(params.top_k, len(logits)) if params.top_k and params.top_k > 0 else len(logits)
    top_p = 1.0 if params.top_p is None else params.top_p
    if top_p < 1 and top_k == len(logits):
        return _nucleus(logits, params, top_p)
    ids, e = _weights(logits, params, _shortlist(logits, top_k))
    if top_k < len(logits):
        ids, e = _ranked(ids, e, top_k)
    probabilities = e / e.sum()
    return _cut(ids, probabilities, top_p) if top_p < 1 else (ids, probabilities)


def _weights(
    logits: NDArray[np.float32], params: SamplingParams, ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """e^((logit - largest) / temperature) of the ids that min_p leaves."""
    # The maximum goes out before the division: a tiny temperature then gives 0 and -inf, never NaN.
    with np.errstate(over="ignore"):
        scaled = (logits[ids].astype(np.float64) - float(logits.max())) / float(params.temperature or 1)
    if params.min_p:
        kept = scaled >= np.log(params.min_p)
        ids, scaled = ids[kept], scaled[kept]
    return ids, np.exp(scaled)


def _nucleus(
    logits: NDArray[np.float32], params: SamplingParams, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """top_p alone: sort only as many of the likeliest tokens as it takes to reach it."""
    total = _weights(logits, params, np.arange(len(logits)))[1].sum()
    count = 256
    while True:
        count = min(4 * count, len(logits))
        ids, e = _weights(logits, params, _shortlist(logits, count))
        ids, e = _ranked(ids, e, count)
        if count == len(logits) or e.sum() >= top_p * total:
            return _cut(ids, e / total, top_p)


def _cut(
    ids: NDArray[np.int64], probabilities: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of ranked tokens, those before which the sum has not yet reached top_p; the first always stays."""
    before = np.cumsum(probabilities) - probabilities
    kept = max(1, int(np.count_nonzero(before < top_p)))
    return ids[:kept], probabilities[:kept]


def _ranked(
    ids: NDArray[np.int64], e: NDArray[np.float64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The `count` likeliest, likeliest first; ties go to the lowest id."""
    order = np.lexsort((ids, -e))[:count]
    return ids[order], e[order]


def _shortlist(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits and some more, in their order: found without sorting.

    Of any `count` tokens the smallest logit is a lower bound of the wanted ones. Taking each run's largest, the runs
    with the `count` largest give a bound that few tokens reach.
    """
    if count * RUN >= len(logits):
        return np.arange(len(logits))
    whole = len(logits) // RUN * RUN
    largest = logits[:whole].reshape(-1, RUN).max(axis=1)
    bound = np.partition(largest, len(largest) - count)[len(largest) - count]
    return np.flatnonzero(logits >= bound)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its three keys only (Philox, a counter-based generator)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, choice], counter=position))
    return float(generator.random())
