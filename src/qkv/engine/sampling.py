"""From a row of logits to the next token.

The order is fixed: logit_bias, penalties, what may not come now, temperature, min_p, top_k, top_p, one random number.
Temperature comes before min_p and top_p, so that these see the probabilities that are sampled from. Randomness is keyed
by (seed, choice, position): a request's text does not depend on what runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.engine.logprobs import log_normalizer, shortlist, top_logprobs
from qkv.engine.params import SamplingParams
from qkv.engine.penalties import Penalties
from qkv.errors import ParameterError

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDENDS = np.where(_BITS.view(np.bool_), np.float32(-0.0), np.float32(-np.inf))
"""What a byte of a mask adds to the logits of its eight tokens. x + -0.0 is x, whatever its sign."""


class Choice(NamedTuple):
    """A chosen token. Log-probabilities are the model's own (see `logprobs`), None and empty unless asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this place and their log-probabilities, likeliest first."""


class Sampler:
    """Chooses the tokens of one running answer, and counts them for the penalties and min_tokens.

    `params` have a seed; `choice` says which of the request's n answers this is.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        choice: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Iterable[int],
    ) -> None:
        self.params, self.choice = params, choice
        self._penalties = Penalties(params, prompt_ids)
        self._ending = np.array([i for i in params.ending_ids(end_ids) if i < vocab_size], np.int64)
        self._count = 0

    def choose(
        self,
        logits: NDArray[np.float32],
        *,
        position: int,
        allowed: NDArray[np.uint32] | None = None,
        likeliest: int | None = None,
    ) -> Choice:
        """The next token, from finite logits [vocab], which stay as they are. `position` is its place in the text.

        likeliest: the id of the largest logit, the lowest of equals, for those who know it already.

        allowed: what a guide lets through, bit t % 32 of word t // 32 for token t; tokens beyond its end are not
        allowed. Raises `ParameterError` when nothing is left to choose; the answer cannot go on then.
        """
        row = self.adjusted(logits, allowed)
        if row is not logits and row.max() == -np.inf:
            raise ParameterError(self._why_nothing_is_left(allowed is not None))
        if row is logits and likeliest is not None and not self.params.temperature:
            token = likeliest
        else:
            token = sample(row, self.params, position=position, choice=self.choice)
        self._penalties.count(token)
        self._count += 1
        if not self.params.logprobs:
            return Choice(token)
        normalizer = log_normalizer(logits)
        top = top_logprobs(logits, self.params.top_logprobs, normalizer) if self.params.top_logprobs else ()
        return Choice(token, float(logits[token]) - normalizer, top)

    def adjusted(self, logits: NDArray[np.float32], allowed: NDArray[np.uint32] | None = None) -> NDArray[np.float32]:
        """The logits of the next token after all that comes before the temperature; themselves when nothing does."""
        too_early = self._count < self.params.min_tokens and len(self._ending) > 0
        if allowed is None and not too_early and not self._penalties.active:
            return logits
        row = logits.copy() if allowed is None else only(logits, allowed)
        if self._penalties.active:
            self._penalties.apply(row)
        if too_early:
            row[self._ending] = -np.inf
        return row

    def _why_nothing_is_left(self, guided: bool) -> str:
        if self._count < self.params.min_tokens:
            return f"min_tokens: no token may follow the first {self._count} but one that ends the answer"
        if guided:
            return "logit_bias: it forbids every token that the grammar or the choices allow here"
        return "logit_bias: it forbids every token"


def only(logits: NDArray[np.float32], allowed: NDArray[np.uint32]) -> NDArray[np.float32]:
    """A row of finite logits with -inf in place of what is not allowed; the others keep their bits.

    Adding takes as long for any mask, and a fraction of choosing between two values.
    """
    octets = allowed.astype("<u4", copy=False).view(np.uint8)[: -(-len(logits) // 8)]
    row = _ADDENDS.take(octets, axis=0).ravel()[: len(logits)]
    row += logits[: len(row)]
    return row if len(row) == len(logits) else np.append(row, np.full(len(logits) - len(row), -np.inf, np.float32))


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
    # Rounding may put `drawn` on the very end of the last bin that is not empty.
    last = np.searchsorted(cumulative, cumulative[-1], side="left")
    return int(ids[min(np.searchsorted(cumulative, drawn, side="right"), last)])


def candidates(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, and their probabilities before renormalizing.

    The likeliest come first, unless no number limits them: then they are in the order of their ids.
    """
    top_k = min(params.top_k, len(logits)) if params.top_k and params.top_k > 0 else len(logits)
    top_p = 1.0 if params.top_p is None else params.top_p
    if top_p < 1 and top_k == len(logits):
        return _nucleus(logits, params, top_p)
    ids, e = _weights(logits, params, shortlist(logits, top_k))
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
    """top_p alone: sort only the tokens above a bound low enough to leave top_p of the probability above it."""
    ids, e = _weights(logits, params, shortlist(logits, len(logits)))
    total = e.sum()
    enough = top_p * total * (1 + 1e-9)  # a sum in another order must not lose the last of them
    bound, likely = 1.0, e >= 1.0  # the likeliest has e = 1
    while e[likely].sum() < enough and bound > 0:
        bound /= 16
        likely = e >= bound
    ids, e = _ranked(ids[likely], e[likely], len(ids))
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


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its three keys only (Philox, a counter-based generator)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, choice], counter=position))
    return float(generator.random())
