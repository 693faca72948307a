"""How the future is hidden: -∞ before the softmax, and what the alternatives give, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.explain.charts import beside, paragraph, shades, table
from qkv.explain.figures import GREY
from qkv.model.attention import Array, attention_scores, future, softmax

POSITIONS, HEAD_DIM, SEED = 8, 16, 0
LOW = -20_000.0  # a score below -1e4, as a head that drifted can have
BEFORE = {"-∞ before": -np.inf, "-1e9 before": -1e9, "-1e4 before": -1e4}
WAYS: dict[str, float | None] = {**BEFORE, "0 afterwards": None}
"""Ways of hiding: what hidden scores become before the softmax, or None where hidden weights become 0 after it."""

Difference = tuple[int, int, float, float]


@dataclass(frozen=True)
class Variant:
    """One way of hiding, and what comes of it."""

    name: str
    weights: Array  # [T, T]
    outputs: Array  # [T, d]
    hidden_weight: float  # the largest weight on a hidden position; NaN if there is a NaN
    first_difference: Difference | None  # (position, coordinate, with -∞, here) of the outputs; None: equal bits

    @property
    def row_sums(self) -> Array:
        """Σ_j A_ij [T]."""
        return self.weights.sum(axis=-1)


@dataclass(frozen=True)
class Case:
    """The same scores, hidden in different ways. The first variant is -∞ before the softmax."""

    title: str
    hidden: NDArray[np.bool_]  # [T, T]
    scores: Array  # [T, T]
    variants: list[Variant]


def random_heads(seed: int = SEED) -> tuple[Array, Array, Array]:
    """q, k and v [POSITIONS, HEAD_DIM] of independent normal components, float32."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, POSITIONS, HEAD_DIM)).astype(np.float32)
    return q, k, v


def compute(q: Array, k: Array, v: Array) -> list[Case]:
    """Hide the future of q, k and v [T, d] float32 in every way.

    Three cases: the scores as they are; all of them moved down so that the first is -20,000, below -1e4 (their order
    and their softmax stay); and the first position hidden too, as padding is, so that the first row has nothing left.
    """
    scores = attention_scores(q, k)
    causal = future(*scores.shape)
    padded = causal.copy()
    padded[:, 0] = True
    low = scores + (np.float32(LOW) - scores[0, 0])
    return [
        _case("the scores as they are", scores, causal, v, WAYS),
        _case(f"all scores moved down alike, the first to {LOW:,.0f}", low, causal, v, BEFORE),
        _case("position 0 hidden too: row 0 has nothing left", scores, padded, v, WAYS),
    ]


def _weights(scores: Array, hidden: NDArray[np.bool_], fill: float | None) -> Array:
    """Hidden scores become `fill` before the softmax. With None hidden weights become 0 after it: its denominator
    still counts them."""
    if fill is None:
        return np.where(hidden, scores.dtype.type(0), softmax(scores))
    return softmax(np.where(hidden, scores.dtype.type(fill), scores))


def _case(title: str, scores: Array, hidden: NDArray[np.bool_], v: Array, ways: Mapping[str, float | None]) -> Case:
    variants: list[Variant] = []
    with np.errstate(invalid="ignore"):  # -∞ - -∞, where a row has nothing left: that is what is shown
        for name, fill in ways.items():
            weights = _weights(scores, hidden, fill)
            outputs, leaked = weights @ v, float(np.max(weights, where=hidden, initial=0))
            difference = first_difference(variants[0].outputs, outputs) if variants else None
            variants.append(Variant(name, weights, outputs, leaked, difference))
    return Case(title, hidden, scores, variants)


def first_difference(expected: Array, found: Array) -> Difference | None:
    """The first value of two matrices whose bits differ, row by row; NaN equals NaN."""
    different = np.argwhere((expected != found) & ~(np.isnan(expected) & np.isnan(found)))
    if not len(different):
        return None
    i, c = (int(x) for x in different[0])
    return i, c, float(expected[i, c]), float(found[i, c])


def report(cases: list[Case], name: str, width: int) -> str:
    """Text, tables and the weights as shades for a terminal."""
    T = len(cases[0].scores)
    text = paragraph(
        f"""Position i may look at positions j ≤ i. The scaled scores <q, k>/√d of the others become -∞, before the
        softmax: e^-∞ is exactly 0, so hidden weights are exactly 0 and each row sums to 1. Below, the same {T}
        positions ({name}, float32) hidden in other ways, compared with -∞ bit by bit.""",
        width,
    )
    for number, case in enumerate(cases, 1):
        rows = [("", "row sums", "hidden weight", "first output that differs")]
        rows += [(x.name, _span(x.row_sums), _text(x.hidden_weight, ".4f"), _difference(x)) for x in case.variants]
        text += f"{number}. {case.title}\n\n{table(rows, left=4)}\n"
        text += beside([_panel(variant) for variant in case.variants], width)
        text += paragraph(_comment(case), width)
    return text


def _span(sums: Array) -> str:
    """The smallest and the largest, or NaN and the largest of the others."""
    if np.isnan(sums).any():
        return f"NaN … {np.nanmax(sums):.4f}"
    return f"{sums.min():.4f} … {sums.max():.4f}" if np.ptp(sums) > 1e-6 else f"{sums[0]:.4f}"


def _difference(variant: Variant) -> str:
    if variant.first_difference is None:
        return "none: equal bits"
    i, c, expected, found = variant.first_difference
    return f"o[{i},{c}]: {_text(found, '.6g')} for {_text(expected, '.6g')}"


def _text(number: float, how: str) -> str:
    return "NaN" if np.isnan(number) else format(number, how)


def _panel(variant: Variant) -> tuple[str, list[str]]:
    """The weights, and each row's sum."""
    lines = shades(variant.weights.tolist())
    return variant.name, [f"{line} {_text(total, '.2f')}" for line, total in zip(lines, variant.row_sums, strict=True)]


def _comment(case: Case) -> str:
    """What the numbers of a case say; put together from the numbers."""
    short = "rows that sum to less than 1, since the denominator still counts what was hidden; outputs too small"
    says = {
        "the same bits as -∞ (e to that power is 0 in float32)": [
            x for x in case.variants[1:] if x.first_difference is None
        ],
        "weight on hidden positions": [x for x in case.variants if x.hidden_weight > 0],
        short: [x for x in case.variants if x.row_sums.min() < 0.999],
        "NaN where a row has nothing left (-∞ minus -∞): such a row must not be asked for": [
            x for x in case.variants if np.isnan(x.weights).any()
        ],
    }
    return " ".join(f"{', '.join(x.name for x in found)}: {what}." for what, found in says.items() if found)


def draw(cases: list[Case], name: str, figure: Any) -> None:
    """The weights of every variant of every case."""
    figure.suptitle(name)
    grid = figure.subplots(len(cases), max(len(case.variants) for case in cases), squeeze=False)
    for row, case in zip(grid, cases, strict=True):
        for axes in row[len(case.variants) :]:
            axes.set_axis_off()
        for axes, variant in zip(row, case.variants, strict=False):
            axes.imshow(np.ma.masked_invalid(variant.weights), vmin=0, vmax=1, cmap="Blues")
            axes.set_facecolor("#f4c7c3")  # NaN
            axes.set_title(variant.name, fontsize=9)
            axes.set_xticks([])
            T = len(variant.weights)
            axes.set_yticks(range(T), [f"Σ = {_text(total, '.2f')}" for total in variant.row_sums], fontsize=6)
            stairs = np.repeat(np.arange(T), 2)
            axes.plot([-0.5, *stairs + 0.5], [*stairs - 0.5, T - 0.5], color=GREY)
        row[0].set_ylabel(case.title.replace(": ", ":\n").replace(", ", ",\n"), fontsize=8)
