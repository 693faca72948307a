"""Outputs are convex combinations of values: inside their range, and as large as they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.explain.charts import bars, paragraph, table
from qkv.explain.figures import COLOURS, GREY
from qkv.model.attention import Array, attention

POSITIONS, HEADS, KV_HEADS, HEAD_DIM, SEED = 32, 4, 2, 64, 0
FACTORS = (0.1, 1.0, 10.0, 100.0)
BINS = 20


@dataclass(frozen=True)
class Convex:
    """Where the outputs of positions 1 … T-1 lie among the values they are made of, and how they follow V."""

    places: Array  # [T-1, H, d]: (o - min v)/(max v - min v), over the j ≤ i; 0 is the smallest value, 1 the largest
    outside: NDArray[np.int64]  # [H]: coordinates outside min … max by more than rounding
    overshoot: float  # the farthest that any coordinate is outside, in units in the last place of the largest value
    weight: Array  # [T-1, H]: the largest weight of each row
    factors: tuple[float, ...]
    norms: Array  # [factors, H]: mean ‖o_i‖ with V multiplied by each factor


def random_heads(seed: int = SEED) -> tuple[Array, Array, Array]:
    """q [T, H, d], k and v [T, H_kv, d] of independent normal components, float32; q of another size in each head."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((POSITIONS, HEADS, HEAD_DIM)) * np.array([0.1, 1, 3, 10])[:, None]
    k, v = rng.standard_normal((2, POSITIONS, KV_HEADS, HEAD_DIM))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def compute(q: Array, k: Array, v: Array) -> Convex:
    """Attention of q [T, H, d], k and v [T, H_kv, d], and where its outputs lie. T ≥ 2."""
    T, heads, _ = q.shape
    o = _outputs(q, k, v)[1:]
    values = np.repeat(v, heads // v.shape[1], axis=1)
    low, high = (ufunc.accumulate(values, axis=0)[1:] for ufunc in (np.minimum, np.maximum))
    ulps = np.maximum(low - o, o - high) / np.spacing(np.maximum(np.abs(low), np.abs(high)))
    # A sum of i + 1 rounded products of weights whose own sum is 1 within rounding.
    slack = 4 * np.sqrt(np.arange(2, T + 1))[:, None, None]
    span = np.where(high > low, high - low, 1)
    norms = [np.linalg.norm(_outputs(q, k, v * v.dtype.type(f)), axis=-1).mean(axis=0) for f in FACTORS]
    return Convex(
        places=(o.astype(np.float64) - low) / span,
        outside=np.sum(ulps > slack, axis=(0, 2)),
        overshoot=float(max(ulps.max(), 0)),
        weight=_largest_weights(q, k)[1:],
        factors=FACTORS,
        norms=np.array(norms),
    )


def _outputs(q: Array, k: Array, v: Array) -> Array:
    """[T, H, d]"""
    return attention(q, k, v).reshape(q.shape)


def _largest_weights(q: Array, k: Array) -> Array:
    """[T, H]: attention to one-hot values gives the weights themselves."""
    T, heads, _ = q.shape
    identity = np.repeat(np.eye(T, dtype=q.dtype)[:, None], k.shape[1], axis=1)
    return attention(q, k, identity).reshape(T, heads, T).max(axis=-1)


def report(result: Convex, name: str, width: int) -> str:
    """Text, tables and a histogram for a terminal."""
    rows_seen, heads, _ = result.places.shape
    text = paragraph(
        f"""An output o_i = Σ_j A_ij·v_j has weights A_ij ≥ 0 that sum to 1: each of its coordinates lies between the
        smallest and the largest of that coordinate among the values v_j, j ≤ i. Here for positions 1 to {rows_seen}
        ({name}): 0 is the smallest value, 1 the largest. A head that looks at one position copies its value, which
        may lie anywhere; a head that looks at all of them averages, and averages lie in the middle.""",
        width,
    )
    rows = [["head", "largest weight", "lowest", "5 %", "median", "95 %", "highest", "outside"]]
    for h in range(heads):
        quantiles = np.quantile(result.places[:, h], [0, 0.05, 0.5, 0.95, 1])
        shown = [result.weight[:, h].mean(), *quantiles]
        rows.append([f"{h}", *(f"{x:.3f}" for x in shown), f"{result.outside[h]}"])
    total = result.places.size
    text += table(rows) + "\n"
    text += paragraph(
        f"""{result.outside.sum()} of {total:,} coordinates are outside by more than rounding; the farthest is
        {result.overshoot:.1f} units in the last place beyond.""",
        width,
    )
    counts, edges = np.histogram(np.clip(result.places, 0, 1), bins=BINS, range=(0, 1))
    labels = [f"{low:.2f}-{high:.2f}" for low, high in pairwise(edges)]
    text += "where the coordinates lie between the smallest value and the largest\n"
    text += bars(labels, counts, width, text=[f"{100 * n / total:.1f} %" for n in counts]) + "\n"
    text += paragraph("Weights come from q and k alone, so ‖o‖ follows the scale of V. Multiply V and see:", width)
    times = [("V times", "mean ‖o‖", "times that of 1")]
    one = result.norms[result.factors.index(1.0)]
    for factor, norms in zip(result.factors, result.norms, strict=True):
        times.append((f"{factor:g}", f"{norms.mean():.6g}", f"{np.mean(norms / one):.6f}"))
    return text + table(times)


def draw(result: Convex, name: str, figure: Any) -> None:
    """Places by head, and ‖o‖ against the factor of V."""
    figure.suptitle(name)
    places, norms = figure.subplots(1, 2, width_ratios=(2, 1))
    heads = result.places.shape[1]
    by_head = [result.places[:, h].ravel() for h in range(heads)]
    parts = places.violinplot(by_head, positions=range(heads), showextrema=True, showmedians=True, widths=0.9)
    for body in parts["bodies"]:
        body.set_facecolor(COLOURS[0])
    for edge in (0, 1):
        places.axhline(edge, color=GREY, linewidth=1, linestyle="--")
    places.set(title="outputs between the smallest value (0) and the largest (1)", xlabel="head", ylim=(-0.05, 1.05))
    places.set_xticks(range(0, heads, 1 + heads // 16))
    norms.loglog(result.factors, result.norms.mean(axis=1), "o-", color=COLOURS[1])
    norms.set(title="mean ‖o‖ follows V", xlabel="V times")
