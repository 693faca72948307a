"""From a row of logits to the next token: temperature, min_p, top_k, top_p, and one random number.

The order is fixed (docs: decisions): temperature first, so that min_p and top_p see the probabilities that are
sampled from. Randomness is keyed by (seed, choice, position): a request's text does not depend on what runs beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.engine.params import SamplingParams


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
    """The tokens that may be drawn, most likely first, and their probabilities before renormalizing."""
    ids = np.arange(len(logits))
    # The maximum goes out before the division: a tiny temperature then gives 0 and -inf, never NaN.
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - float(logits.max())) / float(params.temperature or 1)
    if params.min_p:
        ids = ids[scaled >= np.log(params.min_p)]
    if params.top_k is not None and 0 < params.top_k < len(ids):
        ids = _top(ids, scaled, params.top_k)
    e = np.exp(scaled[ids])
    probabilities = e / e.sum()
    order = np.lexsort((ids, -probabilities))
    ids, probabilities = ids[order], probabilities[order]
    if params.top_p is not None and params.top_p < 1:
        # A token stays while the ones before it have not yet reached top_p; the first always does.
        before = np.cumsum(probabilities) - probabilities
        kept = max(1, int(np.count_nonzero(before < params.top_p)))
        ids, probabilities = ids[:kept], probabilities[:kept]
    return ids, probabilities


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its three keys only (Philox, a counter-based generator)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, choice], counter=position))
    return float(generator.random())


def _top(ids: NDArray[Any], scaled: NDArray[np.float64], k: int) -> NDArray[Any]:
    """The k ids of the largest scores; of those that tie for the last places, the lowest ids."""
    values = scaled[ids]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = ids[values > threshold]
    tied = ids[values == threshold][: k - len(above)]
    return np.concatenate([above, tied])
