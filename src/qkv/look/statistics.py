"""What each head does on a text, in a few numbers. No head's T × T weights are ever there as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkv.runtime.cores import available_cores

Array = NDArray[Any]
Kind = Literal["first", "previous", "itself", "induction", ""]

BLOCK_NUMBERS = 1 << 19
"""Scores that are in memory at a time."""
MOSTLY = 0.5
INDUCTION = 0.4
"""From which mean weight on a head is called what it does."""


@dataclass(frozen=True)
class Statistics:
    """Means over positions 1, 2, … (position 0 has no choice), each [layers, heads] in the order of `Look`'s."""

    entropy: Array
    """Of a row of weights, in nats: 0 where one position gets all, log(i + 1) where all get the same."""
    share: Array
    """The entropy as a share of log(i + 1): 0 to 1."""
    first: Array
    """Weight on position 0: an attention sink has much of it."""
    previous: Array
    """Weight on position i - 1."""
    itself: Array
    """Weight on position i."""
    induction: Array
    """Weight on tokens that once came after the token at i, over the positions whose token was there before; 0 if none.
    """

    def kinds(self) -> list[list[Kind]]:
        """What each head is mostly, by its weights: "" for none of these."""
        bounds: tuple[tuple[Kind, Array, float], ...] = (
            ("induction", self.induction, INDUCTION), ("previous", self.previous, MOSTLY),
            ("itself", self.itself, MOSTLY), ("first", self.first, MOSTLY),
        )  # fmt: skip
        layers, heads = self.entropy.shape
        return [
            [next((kind for kind, means, most in bounds if means[i, j] > most), "") for j in range(heads)]
            for i in range(layers)
        ]


def measure(ids: Array, layers: Iterable[tuple[Array, Sequence[Array]]]) -> Statistics:
    """Statistics of the text `ids` [T], from each layer's q [T, heads, d] and the k [T, d] that each head reads."""
    with ThreadPoolExecutor(available_cores()) as pool:
        sums = np.stack([_layer(ids, q, keys, pool) for q, keys in layers], axis=1)
    choosing, repeated = max(1, len(ids) - 1), max(1, len(ids) - len(np.unique(ids)))
    means = np.vstack([sums[:5] / choosing, sums[5:] / repeated])
    return Statistics(*means)


def _layer(ids: Array, q: Array, keys: Sequence[Array], pool: Executor) -> Array:
    """[6, heads]: the sums of `_block` over all rows. Cores share the heads: NumPy's loops need no GIL."""
    sums, T = np.zeros((6, len(keys))), len(ids)
    rows = max(1, BLOCK_NUMBERS // T)
    for first in range(0, T, rows):
        end = min(T, first + rows)
        block = partial(_block, first=first, copies=_copies(ids[:end], first))
        sums += np.stack(list(pool.map(block, q[first:end].swapaxes(0, 1), (k[:end] for k in keys))), axis=1)
    return sums


def _copies(ids: Array, first: int) -> tuple[Array, Array]:
    """Rows i - first and columns j where j follows an earlier copy of the token at i: ids[j - 1] = ids[i], j ≤ i."""
    same = np.zeros((len(ids) - first, len(ids)), bool)
    same[:, 1:] = ids[first:, None] == ids[None, :-1]
    same[:, first:] &= np.tri(len(same), dtype=bool)
    rows, columns = np.divmod(np.flatnonzero(same), len(ids))
    return rows, columns


def _block(q: Array, k: Array, first: int, copies: tuple[Array, Array]) -> Array:
    """Sums over the rows first … of: entropy, its share, weights on 0, on i - 1, on i, and on `copies`."""
    rows = np.arange(len(q))
    i = first + rows
    scores = (q * np.float32(1 / math.sqrt(q.shape[1]))) @ k.T
    newest, future = scores[:, first:], ~np.tri(len(q), dtype=bool)
    newest[future] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    e = np.exp(scores)
    totals = e.sum(axis=1)
    newest[future] = 0  # 0 · -inf is not a number
    entropy = np.log(totals) - np.einsum("ij,ij->i", e, scores) / totals
    weights = e[:, 0], e[rows, np.maximum(i - 1, 0)], e[rows, i], np.bincount(copies[0], e[copies], len(q))
    means = np.stack([entropy, entropy / np.log(np.maximum(i, 1) + 1), *(weight / totals for weight in weights)])
    return means[:, i > 0].sum(axis=1, dtype=np.float64)
