"""Why scores are divided by √d: how large <q, k> is, and what the softmax makes of it.

If the components of q and k are independent, with mean 0 and variance σ², then E<q,k> = 0 and Var<q,k> = d·σ⁴.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.explain.charts import bars_beside, paragraph, si, table
from qkv.explain.figures import COLOURS, GREY, legend_below
from qkv.explain.trace import Heads
from qkv.model.attention import Array, future, softmax

SIZES = (16, 32, 64, 128, 256, 512, 1024)
SIGMAS = (0.5, 1.0, 2.0)
SCALES = ("1", "1/√d", "1/d")
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
    dots = np.empty((len(sizes), len(sigmas), 4))
    spread = np.empty((len(sizes), len(SCALES), 3))
    for i, d in enumerate(sizes):
        for j, sigma in enumerate(sigmas):
            q, k = rng.normal(0, sigma, (2, VECTORS, d))
            scores = q @ k.T
            dots[i, j] = scores.mean(), scores.var(), scores.min(), scores.max()
        q, k = rng.standard_normal((VECTORS, d)), rng.standard_normal((KEYS, d))
        spread[i] = [_softmax_of([softmax(scale * (q @ k.T))]) for scale in scales(d)]
    mean, variance, lowest, highest = np.moveaxis(dots, -1, 0)
    return Scaling(tuple(sizes), tuple(sigmas), mean, variance, lowest, highest, Softmax(*np.moveaxis(spread, -1, 0)))


def scales(d: int) -> tuple[float, float, float]:
    """The factors of `SCALES`."""
    return 1.0, 1 / math.sqrt(d), 1 / d


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


def _softmax_of(weights: Sequence[Array]) -> tuple[float, float, float]:
    """The three numbers of `Softmax` over the rows of several matrices of weights, with as many keys as each has."""
    shares = np.concatenate([entropy(p) / np.log(p.shape[-1]) for p in weights])
    largest = np.concatenate([p.max(axis=-1) for p in weights])
    gradient = np.concatenate([gradient_norm(p) for p in weights])
    return float(shares.mean()), float(largest.mean()), float(np.median(gradient))


# ------------------------------------------------------------------------------------------ a real model


@dataclass(frozen=True)
class Stage:
    """q and k of every layer at one step, [layers]; means over the heads."""

    name: str
    rms_q: Array  # σ_q: root of the mean square of q's components
    rms_k: Array
    predicted: Array  # d·σ_q²·σ_k²
    variance: Array  # of <q_i, k_j>, j ≤ i, within a head
    mean: Array  # of <q_i, k_j>
    own: Array  # variance / predicted after the means over the positions are taken out of q and k

    @property
    def ratio(self) -> Array:
        """1 where components are independent with mean 0."""
        return self.variance / self.predicted


@dataclass(frozen=True)
class ModelScaling:
    """The same on a model's own q and k, layer by layer."""

    head_dim: int
    tokens: int
    stages: list[Stage]  # projected, (normed,) rotated
    softmax: Softmax  # [layers, scales], of rows with at least 2 keys


def compute_model(layers: Sequence[Heads]) -> ModelScaling:
    """Look at the q and k that a `Traced` decoder has seen."""
    first = layers[0]
    normed = any(layer.q_normed is not layer.q_projected for layer in layers)
    stages = [_stage("projected", [(x.q_projected, x.k_projected) for x in layers])]
    if normed:
        stages.append(_stage("after q/k norm", [(x.q_normed, x.k_normed) for x in layers]))
    stages.append(_stage("after RoPE", [(x.q, x.k) for x in layers]))
    T, _, d = first.q.shape
    spread = np.array([[_softmax_of(_causal_rows(layer, scale)) for scale in scales(d)] for layer in layers])
    return ModelScaling(d, T, stages, Softmax(*np.moveaxis(spread, -1, 0)))


def _stage(name: str, layers: Sequence[tuple[Array, Array]]) -> Stage:
    return Stage(name, *np.array([_dots_of(q, k) for q, k in layers]).T)


def _dots_of(q: Array, k: Array) -> tuple[float, ...]:
    """The numbers of a `Stage` for one layer: means over the query heads."""
    T, heads, d = q.shape
    q, k = q.astype(np.float64), np.repeat(k.astype(np.float64), heads // k.shape[1], axis=1)
    past = ~future(T, T)

    def squares_and_dots(q: Array, k: Array) -> tuple[Array, Array, Array]:
        dots = np.array([(q[:, h] @ k[:, h].T)[past] for h in range(heads)])
        return np.mean(q * q, axis=(0, 2)), np.mean(k * k, axis=(0, 2)), dots

    square_q, square_k, dots = squares_and_dots(q, k)
    own_q, own_k, own_dots = squares_and_dots(q - q.mean(axis=0), k - k.mean(axis=0))
    numbers = (
        np.sqrt(square_q).mean(),
        np.sqrt(square_k).mean(),
        d * (square_q * square_k).mean(),
        dots.var(axis=1).mean(),
        dots.mean(),
        own_dots.var(axis=1).mean() / (d * (own_q * own_k).mean()),
    )
    return tuple(map(float, numbers))


def _causal_rows(layer: Heads, scale: float) -> list[Array]:
    """The weights of each position but the first, [heads, keys it sees], under one scale."""
    q = layer.q.astype(np.float64)
    k = np.repeat(layer.k.astype(np.float64), q.shape[1] // layer.k.shape[1], axis=1)
    scores = np.einsum("ihd,jhd->ihj", q, k) * scale
    return [softmax(scores[i, :, : i + 1]) for i in range(1, len(q))]


# ------------------------------------------------------------------------------------------ to look at


def report(result: Scaling, width: int) -> str:
    """Text, tables and plots for a terminal."""
    pairs = VECTORS * VECTORS
    text = paragraph(
        f"""A score is <q, k>, a sum of d products. If the components of q and k are independent with mean 0 and
        variance σ², each product has mean 0 and variance σ⁴, and the sum has d times that: Var<q,k> = d·σ⁴. Measured on
        {pairs:,} pairs for each d and σ:""",
        width,
    )
    rows = [("σ", "d", "mean", "variance", "d·σ⁴", "ratio", "deviation", "√d·σ²", "smallest", "largest")]
    for j, sigma in enumerate(result.sigmas):
        for i, d in enumerate(result.sizes):
            variance, predicted = result.variance[i, j], result.predicted[i, j]
            rows.append(
                (
                    f"{sigma:g}",
                    f"{d}",
                    f"{round(result.mean[i, j], 3) + 0.0:.3f}",
                    f"{variance:,.4g}" if variance < 1000 else f"{variance:,.0f}",
                    f"{predicted:,.4g}" if predicted < 1000 else f"{predicted:,.0f}",
                    f"{variance / predicted:.3f}",
                    f"{math.sqrt(variance):.2f}",
                    f"{math.sqrt(predicted):.2f}",
                    f"{result.lowest[i, j]:.1f}",
                    f"{result.highest[i, j]:.1f}",
                )
            )
    text += table(rows) + "\n"
    text += "Var<q,k> by d, bars on a logarithmic scale\n"
    titles, labels = [f"σ = {sigma:g}" for sigma in result.sigmas], [f"{d}" for d in result.sizes]
    text += bars_beside(titles, labels, list(result.variance.T), width)
    text += paragraph(
        f"""What the softmax of {KEYS} such scores (σ = 1) does. Unscaled, the scores spread with √d: the largest takes
        everything, and the gradient ‖∂p/∂s‖ of most rows dies. 1/√d keeps the spread at 1 whatever d is. 1/d takes too
        much: every key gets the same, 1/{KEYS} = {1 / KEYS:.4f}. Entropy is a share of ln {KEYS}; the gradient is the
        median over {VECTORS:,} rows.""",
        width,
    )
    return text + _softmax([f"d = {d}" for d in result.sizes], result.softmax, width)


def report_model(result: ModelScaling, name: str, width: int) -> str:
    """The same for a model's own q and k."""
    text = paragraph(
        f"""{name}: q and k of {result.tokens} tokens, d = {result.head_dim}. σ is the root mean square of the
        components. If they were independent with mean 0, the variance would be d·σ_q²·σ_k² (ratio 1) and the mean 0.
        Random weights give that in layer 0. Deeper down the ratio falls below 1, with training or without: every layer
        adds nearly the same average of values to all positions, so they come to share a part of q and of k. The dot
        of these two parts is the same for all pairs: it adds to the prediction and to the mean, not to the variance.
        The column "own" is the ratio after the means over the positions are taken out of q and k. With random weights
        it stays near 1 at every depth. Training lifts it above 1: components that vary together. (RoPE turns the
        shared part by another angle at each position, so behind it there is no such column.)""",
        width,
    )
    for stage in result.stages:
        rows = [("layer", "σ_q", "σ_k", "d·σ_q²·σ_k²", "Var<q,k>", "ratio", "own", "mean", "mean in √d·σ_q·σ_k")]
        rows += [
            (
                f"{layer}",
                f"{stage.rms_q[layer]:.3g}",
                f"{stage.rms_k[layer]:.3g}",
                si(stage.predicted[layer]),
                si(stage.variance[layer]),
                f"{stage.ratio[layer]:.2f}",
                "" if stage is result.stages[-1] else f"{stage.own[layer]:.2f}",
                f"{round(stage.mean[layer], 1) + 0.0:.1f}",
                f"{stage.mean[layer] / math.sqrt(stage.predicted[layer]):+.2f}",
            )
            for layer in range(len(stage.variance))
        ]
        text += f"{stage.name}\n{table(rows)}\n"
    layers = [f"{layer}" for layer in range(len(result.stages[0].variance))]
    text += "Var<q,k> / (d·σ_q²·σ_k²) by layer, bars on a logarithmic scale\n"
    text += bars_beside([stage.name for stage in result.stages], layers, [x.ratio for x in result.stages], width)
    text += "What the softmax makes of them (entropy as a share of ln n for n keys)\n"
    return text + _softmax([f"layer {layer}" for layer in layers], result.softmax, width)


def _softmax(labels: Sequence[str], result: Softmax, width: int) -> str:
    """The table, and the gradients as bars."""
    groups = (("entropy", result.entropy), ("largest weight", result.largest), ("gradient", result.gradient))
    rows = [("scale", *(scale for _ in groups for scale in SCALES))]
    for i, label in enumerate(labels):
        cells = [
            f"{value:.3f}" if value >= 0.0005 or value == 0 else f"{value:.0e}" for _, x in groups for value in x[i]
        ]
        rows.append((label, *cells))
    text = table(rows, groups=[("", 1), *((name, len(SCALES)) for name, _ in groups)]) + "\n"
    text += "‖∂p/∂s‖, median over rows, bars on a logarithmic scale\n"
    return text + bars_beside([f"scale {scale}" for scale in SCALES], labels, list(result.gradient.T), width)


def draw(result: Scaling, figure: Any) -> None:
    """Variance, largest weight and gradient against d."""
    variance, largest, gradient = figure.subplots(1, 3)
    for j, sigma in enumerate(result.sigmas):
        variance.loglog(result.sizes, result.predicted[:, j], color=COLOURS[j], linewidth=1)
        variance.loglog(result.sizes, result.variance[:, j], "o", color=COLOURS[j], label=f"σ = {sigma:g}")
    variance.set(title="Var⟨q,k⟩ (points) and d·σ⁴ (lines)", xlabel="d")
    _draw_softmax(largest, gradient, result.sizes, result.softmax, "d")
    for axes in (variance, largest, gradient):
        axes.set_xscale("log", base=2)
        axes.set_xticks(result.sizes, [str(d) for d in result.sizes])
        legend_below(axes)


def draw_model(result: ModelScaling, name: str, figure: Any) -> None:
    """The ratio to the prediction, the largest weight and the gradient, layer by layer."""
    ratio, largest, gradient = figure.subplots(1, 3)
    layers = np.arange(len(result.stages[0].variance))
    ratio.axhline(1, color=GREY, linewidth=1)
    for stage, colour, mark in zip(result.stages, COLOURS, "osD", strict=False):
        ratio.semilogy(layers, stage.ratio, mark + "-", color=colour, label=stage.name, markersize=4)
    ratio.set(title="Var⟨q,k⟩ / (d·σ_q²·σ_k²)", xlabel="layer")
    figure.suptitle(name)
    _draw_softmax(largest, gradient, layers, result.softmax, "layer")
    for axes in (ratio, largest, gradient):
        legend_below(axes)


def _draw_softmax(largest: Any, gradient: Any, x: Sequence[int] | NDArray[Any], result: Softmax, x_name: str) -> None:
    for j, (scale, mark) in enumerate(zip(SCALES, "osD", strict=True)):
        style = {"color": COLOURS[j], "label": f"scale {scale}", "marker": mark, "markersize": 4}
        largest.plot(x, result.largest[:, j], **style)
        gradient.semilogy(x, result.gradient[:, j], **style)
    largest.set(title="largest weight, mean", xlabel=x_name, ylim=(0, 1.05))
    gradient.set(title="gradient ‖∂p/∂s‖, median", xlabel=x_name)
