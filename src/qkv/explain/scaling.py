"""Why scores are divided by √d: how large <q, k> is, and what the softmax makes of it.

If the components of q and k are independent, with mean 0 and variance σ², then E<q,k> = 0 and Var<q,k> = d·σ⁴.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.explain.charts import bars_beside, paragraph, table
from qkv.explain.figures import COLOURS, legend_below
from qkv.model.attention import Array, softmax

SIZES = (16, 32, 64, 128, 256, 512, 1024)
SIGMAS = (0.5, 1.0, 2.0)
SCALES = {"1": 0.0, "1/√d": -0.5, "1/d": -1.0}  # powers of d
VECTORS = 1000  # queries and keys whose dots are looked at: a million pairs
KEYS = 64  # of one softmax
SEED = 0


@dataclass(frozen=True)
class Softmax:
    """What the softmax makes of scores under each of `SCALES` (the last axis)."""

    entropy: Array  # mean over rows of -Σ p ln p, as a share of the largest possible, ln(number of keys)
    largest: Array  # mean over rows of the largest weight
    gradient: Array  # median over rows of ‖∂p/∂s‖


@dataclass(frozen=True)
class Scaling:
    """Statistics of <q, k> [sizes, sigmas], and of the softmax [sizes, scales] for σ = 1."""

    sizes: tuple[int, ...]
    sigmas: tuple[float, ...]
    mean: Array
    variance: Array
    lowest: Array  # the smallest and the largest of a million dots
    highest: Array
    softmax: Softmax

    @property
    def predicted(self) -> Array:
        """d·σ⁴ [sizes, sigmas]."""
        return np.array(self.sizes)[:, None] * np.array(self.sigmas) ** 4


def compute(sizes: Sequence[int] = SIZES, sigmas: Sequence[float] = SIGMAS, seed: int = SEED) -> Scaling:
    """Draw q and k with independent normal components and look at their dots."""
    rng = np.random.default_rng(seed)
    dots = np.empty((4, len(sizes), len(sigmas)))
    scores = []
    for i, d in enumerate(sizes):
        for j, sigma in enumerate(sigmas):
            q, k = rng.normal(0, sigma, (2, VECTORS, d))
            every = q @ k.T
            dots[:, i, j] = every.mean(), every.var(), every.min(), every.max()
        q, k = rng.standard_normal((VECTORS, d)), rng.standard_normal((KEYS, d))
        scores.append((d, [q @ k.T]))
    mean, variance, lowest, highest = dots
    return Scaling(tuple(sizes), tuple(sigmas), mean, variance, lowest, highest, softmaxes(scores))


def softmaxes(cases: Iterable[tuple[int, Sequence[Array]]]) -> Softmax:
    """The softmax of each case's scores: d, and matrices of rows, each with as many keys as it has columns."""
    found = []
    for d, scores in cases:
        for power in SCALES.values():
            weights = [softmax(rows * d**power) for rows in scores]
            shares = np.concatenate([entropy(p) / np.log(p.shape[-1]) for p in weights])
            largest = np.concatenate([p.max(axis=-1) for p in weights])
            gradient = np.concatenate([gradient_norm(p) for p in weights])
            found.append((shares.mean(), largest.mean(), np.median(gradient)))
    return Softmax(*np.array(found).T.reshape(3, -1, len(SCALES)))


def entropy(p: Array) -> Array:
    """-Σ p ln p along the last axis, with 0 ln 0 = 0."""
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)


def gradient_norm(p: Array) -> Array:
    """‖∂p/∂s‖ of p = softmax(s), along the last axis: the root of the sum of the squares of diag(p) - p pᵀ.

    On the diagonal p_i·(1 - p_i), beside it -p_i·p_j. Summed without subtracting numbers that are nearly equal, so that
    a p that is almost one-hot has a small gradient and not rounding errors.
    """
    p = -np.sort(-p, axis=-1)
    squares = p * p
    rest = 1 - p
    rest[..., 0] = p[..., 1:].sum(axis=-1)  # of the largest
    after = np.flip(np.cumsum(np.flip(squares, -1), -1), -1)[..., 1:]  # Σ p_j² over the j after i
    return np.sqrt(np.sum(squares * rest * rest, axis=-1) + 2 * np.sum(squares[..., :-1] * after, axis=-1))


def report(result: Scaling, name: str, width: int) -> str:
    """Text, tables and plots for a terminal."""
    text = paragraph(
        f"""A score is <q, k>, a sum of d products. If the components of q and k are independent with mean 0 and
        variance σ², each product has mean 0 and variance σ⁴, and the sum has d times that: Var<q,k> = d·σ⁴. Measured on
        {VECTORS**2:,} pairs of {name} for each d and σ:""",
        width,
    )
    rows: list[tuple[str, ...]] = [
        ("σ", "d", "mean", "variance", "d·σ⁴", "ratio", "deviation", "√d·σ²", "smallest", "largest")
    ]
    for j, sigma in enumerate(result.sigmas):
        columns = (x[:, j] for x in (result.mean, result.variance, result.predicted, result.lowest, result.highest))
        for d, mean, variance, predicted, lowest, highest in zip(result.sizes, *columns, strict=True):
            both = [f"{x:,.4g}" if x < 1000 else f"{x:,.0f}" for x in (variance, predicted)]
            ratio, roots = f"{variance / predicted:.3f}", [f"{math.sqrt(x):.2f}" for x in (variance, predicted)]
            first = f"{sigma:g}", f"{d}", f"{round(mean, 3) + 0.0:.3f}"
            rows.append((*first, *both, ratio, *roots, f"{lowest:.1f}", f"{highest:.1f}"))
    text += f"{table(rows)}\nVar<q,k> by d, bars on a logarithmic scale\n"
    titles, labels = [f"σ = {sigma:g}" for sigma in result.sigmas], [f"{d}" for d in result.sizes]
    text += bars_beside(titles, labels, list(result.variance.T), width)
    text += paragraph(
        f"""What the softmax of {KEYS} such scores (σ = 1) does. Unscaled, the scores spread with √d: the largest takes
        everything, and the gradient ‖∂p/∂s‖ of most rows dies. 1/√d keeps the spread at 1 whatever d is. 1/d takes too
        much: every key gets the same, 1/{KEYS} = {1 / KEYS:.4f}. Entropy is a share of ln {KEYS}; the gradient is the
        median over {VECTORS:,} rows.""",
        width,
    )
    return text + softmax_report([f"d = {label}" for label in labels], result.softmax, width)


def softmax_report(labels: Sequence[str], result: Softmax, width: int) -> str:
    """The table, and the gradients as bars."""
    groups = {"entropy": result.entropy, "largest weight": result.largest, "gradient": result.gradient}
    rows = [("scale", *(scale for _ in groups for scale in SCALES))]
    for label, *found in zip(labels, *groups.values(), strict=True):
        values = [value for group in found for value in group]
        rows.append((label, *(f"{x:.3f}" if x >= 0.0005 or x == 0 else f"{x:.0e}" for x in values)))
    text = table(rows, groups=[("", 1), *((name, len(SCALES)) for name in groups)])
    text += "\n‖∂p/∂s‖, median over rows, bars on a logarithmic scale\n"
    return text + bars_beside([f"scale {scale}" for scale in SCALES], labels, list(result.gradient.T), width)


def draw(result: Scaling, name: str, figure: Any) -> None:
    """Variance, largest weight and gradient against d."""
    variance, *others = figure.subplots(1, 3)
    for j, sigma in enumerate(result.sigmas):
        variance.loglog(result.sizes, result.predicted[:, j], color=COLOURS[j], linewidth=1)
        variance.loglog(result.sizes, result.variance[:, j], "o", color=COLOURS[j], label=f"σ = {sigma:g}")
    variance.set(title="Var⟨q,k⟩ (points) and d·σ⁴ (lines)", xlabel="d")
    figure.suptitle(name)
    draw_softmax(others, result.sizes, result.softmax, "d")
    for axes in (variance, *others):
        axes.set_xscale("log", base=2)
        axes.set_xticks(result.sizes, [str(d) for d in result.sizes])
        legend_below(axes)


def draw_softmax(axes: Sequence[Any], x: Sequence[int] | NDArray[Any], result: Softmax, x_name: str) -> None:
    """The largest weight and the gradient, on two axes."""
    largest, gradient = axes
    for j, (scale, mark) in enumerate(zip(SCALES, "osD", strict=True)):
        style = {"color": COLOURS[j], "label": f"scale {scale}", "marker": mark, "markersize": 4}
        largest.plot(x, result.largest[:, j], **style)
        gradient.semilogy(x, result.gradient[:, j], **style)
    largest.set(title="largest weight, mean", xlabel=x_name, ylim=(0, 1.05))
    gradient.set(title="gradient ‖∂p/∂s‖, median", xlabel=x_name)
