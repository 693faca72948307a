"""Attention, as the book has it: scores, causal mask, softmax, the convex sum of values, heads.

This is the definition. The compiled kernels compute the same thing faster, and are tested against it.

    T    positions being computed now          H     query heads
    S    positions known in all (S ≥ T)        H_kv  key/value heads, H_kv divides H
    d    size of a head (`head_dim`)

The T new positions are the last T of the S known ones: new position i is position S - T + i of the sequence.
With no cache S = T.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # float32 or float64, the same for every argument of a call


def attention(q: Array, k: Array, v: Array) -> Array:
    """All heads, concatenated: q [T, H, d], k and v [S, H_kv, d] → [T, H·d].

    Query head h reads key/value head h // (H / H_kv): neighbours share (grouped-query attention).
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    outputs = [attention_head(q[:, h], k[:, h // group], v[:, h // group]) for h in range(heads)]
    return np.concatenate(outputs, axis=-1)


def attention_head(q: Array, k: Array, v: Array) -> Array:
    """One head: q [T, d], k and v [S, d] → o [T, d], o_i = Σ_j A_ij v_j.

    Each row of A is ≥ 0 and sums to 1, so o_i is a convex combination of the values v_j with j ≤ i.
    """
    return attention_weights(q, k) @ v


def attention_weights(q: Array, k: Array) -> Array:
    """A [T, S]: how much position i takes from position j. Exactly 0 for j > i; each row sums to 1."""
    scores = attention_scores(q, k)
    scores[future(*scores.shape)] = -np.inf  # before the softmax: afterwards the denominator would be wrong
    return softmax(scores)


def attention_scores(q: Array, k: Array) -> Array:
    """s_ij = <q_i, k_j> / √d, for q [T, d] and k [S, d] → [T, S].

    Independent components of mean 0 and variance σ² give <q, k> the variance d·σ⁴. Dividing by √d takes d out, and
    keeps the softmax from saturating into one-hot rows whose gradient is almost 0.
    """
    d = q.shape[-1]
    return (q @ k.T) * q.dtype.type(1 / math.sqrt(d))


def future(T: int, S: int) -> NDArray[np.bool_]:
    """[T, S], true where j > i: position j comes after the i-th of the T newest positions."""
    i = np.arange(S - T, S)[:, None]
    j = np.arange(S)[None, :]
    return j > i


def softmax(scores: Array) -> Array:
    """e^s / Σ e^s along the last axis. The row's maximum goes out first, so that nothing overflows."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
