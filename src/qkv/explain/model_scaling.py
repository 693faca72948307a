"""Why scores are divided by √d, on a model's own q and k, layer by layer; `scaling` has the same on random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.explain.charts import bars_beside, paragraph, si, table
from qkv.explain.figures import COLOURS, GREY, legend_below
from qkv.explain.scaling import Softmax, draw_softmax, softmax_report, softmaxes
from qkv.explain.trace import Heads
from qkv.model.attention import Array, future


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
    """What q and k of `tokens` tokens are like at each step, and what the softmax makes of them."""

    head_dim: int
    tokens: int
    stages: list[Stage]  # projected, (normed,) rotated
    softmax: Softmax  # [layers, scales], of rows with at least 2 keys


def compute(layers: Sequence[Heads]) -> ModelScaling:
    """Look at the q and k that a `Traced` decoder has seen."""
    steps = {
        "projected": [(x.q_projected, x.k_projected) for x in layers],
        "after q/k norm": [(x.q_normed, x.k_normed) for x in layers if x.q_normed is not x.q_projected],
        "after RoPE": [(x.q, x.k) for x in layers],
    }
    stages = [Stage(name, *np.array([_dots_of(q, k) for q, k in heads]).T) for name, heads in steps.items() if heads]
    T, _, d = layers[0].q.shape
    return ModelScaling(d, T, stages, softmaxes((d, _causal_rows(layer)) for layer in layers))


def _dots_of(q: Array, k: Array) -> tuple[float, ...]:
    """The numbers of a `Stage` for one layer: means over the query heads."""
    T, heads, d = q.shape
    q, k = q.astype(np.float64), _for_each_query_head(k, heads)
    past = ~future(T, T)

    def squares_and_dots(q: Array, k: Array) -> tuple[Array, Array, Array]:
        dots = np.array([(q[:, h] @ k[:, h].T)[past] for h in range(heads)])
        return np.mean(q * q, axis=(0, 2)), np.mean(k * k, axis=(0, 2)), dots

    square_q, square_k, dots = squares_and_dots(q, k)
    own_q, own_k, own_dots = squares_and_dots(q - q.mean(axis=0), k - k.mean(axis=0))
    own = own_dots.var(axis=1).mean() / (d * (own_q * own_k).mean())
    sigmas, predicted = (np.sqrt(square_q).mean(), np.sqrt(square_k).mean()), d * (square_q * square_k).mean()
    return *sigmas, predicted, dots.var(axis=1).mean(), dots.mean(), own


def _causal_rows(layer: Heads) -> list[Array]:
    """The scores, not yet scaled, of each position but the first: [heads, keys it sees]."""
    q = layer.q.astype(np.float64)
    scores = np.einsum("ihd,jhd->ihj", q, _for_each_query_head(layer.k, q.shape[1]))
    return [scores[i, :, : i + 1] for i in range(1, len(q))]


def _for_each_query_head(k: Array, heads: int) -> Array:
    """[T, H_kv, d] → [T, H, d] float64."""
    return np.repeat(k.astype(np.float64), heads // k.shape[1], axis=1)


def report(result: ModelScaling, name: str, width: int) -> str:
    """Text, tables and plots for a terminal."""
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
    layers = range(len(result.stages[0].variance))
    for stage in result.stages:
        rows = [("layer", "σ_q", "σ_k", "d·σ_q²·σ_k²", "Var<q,k>", "ratio", "own", "mean", "mean in √d·σ_q·σ_k")]
        for layer in layers:
            predicted, mean = stage.predicted[layer], stage.mean[layer]
            first = f"{layer}", f"{stage.rms_q[layer]:.3g}", f"{stage.rms_k[layer]:.3g}"
            variances = si(predicted), si(stage.variance[layer]), f"{stage.ratio[layer]:.2f}"
            own = "" if stage is result.stages[-1] else f"{stage.own[layer]:.2f}"
            means = f"{round(mean, 1) + 0.0:.1f}", f"{mean / math.sqrt(predicted):+.2f}"
            rows.append((*first, *variances, own, *means))
        text += f"{stage.name}\n{table(rows)}\n"
    text += "Var<q,k> / (d·σ_q²·σ_k²) by layer, bars on a logarithmic scale\n"
    names, ratios = [stage.name for stage in result.stages], [stage.ratio for stage in result.stages]
    text += bars_beside(names, [f"{layer}" for layer in layers], ratios, width)
    text += "What the softmax makes of them (entropy as a share of ln n for n keys)\n"
    return text + softmax_report([f"layer {layer}" for layer in layers], result.softmax, width)


def draw(result: ModelScaling, name: str, figure: Any) -> None:
    """The ratio to the prediction, the largest weight and the gradient, layer by layer."""
    ratio, *others = figure.subplots(1, 3)
    layers = np.arange(len(result.stages[0].variance))
    ratio.axhline(1, color=GREY, linewidth=1)
    for stage, colour, mark in zip(result.stages, COLOURS, "osD", strict=False):
        ratio.semilogy(layers, stage.ratio, mark + "-", color=colour, label=stage.name, markersize=4)
    ratio.set(title="Var⟨q,k⟩ / (d·σ_q²·σ_k²)", xlabel="layer")
    figure.suptitle(name)
    draw_softmax(others, layers, result.softmax, "layer")
    for axes in (ratio, *others):
        legend_below(axes)
