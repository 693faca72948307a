"""A look for a terminal and for files: all heads, one head's weights, and what the last token takes most from."""

from __future__ import annotations

from typing import IO, Any

import numpy as np
from rich.cells import cell_len, set_cell_size

from qkv.look import names
from qkv.look.look import Look
from qkv.look.view import LETTERS, label

SHADES = " ·░▒▓█"
_BOUNDS = (0.01, 0.05, 0.2, 0.4, 0.7)
LABEL = 12
"""Columns of a token's label beside the map."""
LETTERS_DOWN = 6
"""Lines of the labels above it."""

LABELLED = 64
"""A plot of up to so many tokens has labels."""


def heads(look: Look) -> str:
    """Layers × heads: a letter for what a head does, or else how spread its weights are."""
    statistics = look.statistics
    lines = ["layer  " + " ".join(f"{head:>2}" for head in look.heads)]
    for layer, kinds, shares in zip(look.layers, statistics.kinds(), statistics.share, strict=True):
        marks = [LETTERS[kind] if kind else _spread(share) for kind, share in zip(kinds, shares, strict=True)]
        lines.append(f"{layer:>5}  " + " ".join(f"{mark:>2}" for mark in marks))
    lines.append("F: mostly on the first token, P: on the previous, S: on itself, I: on what followed an earlier copy.")
    lines.append("Others: █ few tokens get all the weight, · all get the same (entropy as a share of its most).")
    return "\n".join(lines) + "\n"


def choose(look: Look, layer: int | None, head: int | None) -> tuple[int, int]:
    """A layer and a head of it: those given, the others so that the last token's strongest link is among them."""
    layers = look.layers if layer is None else names.numbers("layer", layer, max(look.layers) + 1)
    heads = look.heads if head is None else names.numbers("head", head, max(look.heads) + 1)
    return max(((at, one) for at in layers for one in heads), key=lambda place: _links(look, *place)[0][0])


def links(look: Look, count: int = 10) -> str:
    """The largest weights in the last token's rows over all heads, but for those on the first token and on itself."""
    found = [link for layer in look.layers for head in look.heads for link in _links(look, layer, head)]
    found, last = sorted(found, reverse=True), len(look) - 1
    lines = [f"What the last token, {label(look.tokens[-1])}, takes most from:"]
    for weight, layer, head, at in found[:count]:
        if weight > 0:
            place = f"layer {layer:>2}, head {head:>2}"
            lines.append(f"  {weight:.2f}  {place}  {label(look.tokens[at])}  ({last - at} before it)")
    return "\n".join(lines) + "\n"


def _links(look: Look, layer: int, head: int, count: int = 10) -> list[tuple[float, int, int, int]]:
    """(weight, layer, head, position), the largest first; a text too short to have any gives one of weight 0."""
    weights = look.row(layer, head, -1)[1:-1]
    best = np.argsort(-weights, kind="stable")[:count]
    return [(float(weights[j]), layer, head, int(j) + 1) for j in best] or [(0.0, layer, head, 0)]


def heat_map(look: Look, layer: int, head: int, width: int) -> str:
    """The weights between the newest tokens that `width` columns have room for; a row is what its token takes."""
    shown = range(max(0, len(look) - (width - LABEL - 5) // 2), len(look))
    labels = [label(look.tokens[i]) for i in shown]
    lines = [f"Layer {layer}, head {head}: what each token (left) takes from those above."]
    if shown.start:
        lines[0] += f" … are the {shown.start:,} before these."
    for i in range(min(LETTERS_DOWN, max(map(len, labels)))):
        lines.append(" " * (LABEL + 1) + ("… " if shown.start else "") + "".join(_letter(text, i) for text in labels))
    for i, text in zip(shown, labels, strict=True):
        weights = look.row(layer, head, i)
        cells = [float(weights[: shown.start].sum())] * bool(shown.start) + weights[shown.start :].tolist()
        lines.append(set_cell_size(text, LABEL) + " " + "".join(2 * _shade(weight) for weight in cells))
    bounds = ", ".join(f"{shade} {bound:.0%}" for shade, bound in zip(SHADES[1:], _BOUNDS, strict=True))
    return "\n".join([*lines, f"From: {bounds}."]) + "\n"


def draw(look: Look, layer: int, head: int, figure: Any) -> None:
    """Plot a head's weights on a matplotlib figure."""
    figure.set_size_inches(9, 8)
    axes = figure.subplots()
    image = axes.imshow(look.pattern(layer, head), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    axes.set(title=f"layer {layer}, head {head}: what each row takes", xlabel="from", ylabel="token")
    if len(look) <= LABELLED:
        labels = [label(token) for token in look.tokens]
        axes.set_xticks(range(len(look)), labels, rotation=90, fontsize=7)
        axes.set_yticks(range(len(look)), labels, fontsize=7)
    figure.colorbar(image)


def write_arrays(look: Look, layer: int, head: int, file: IO[bytes]) -> None:
    """Write a .npz: ids, tokens, layers and heads, all heads' statistics, and one head's q, k, v, z and pattern."""
    arrays: dict[str, Any] = {"tokens": np.array(look.tokens), "layer": layer, "head": head, **vars(look.statistics)}
    arrays |= {name: getattr(look, name)(layer, head) for name in ("q", "k", "v", "z", "pattern")}
    np.savez_compressed(file, ids=look.ids, layers=look.layers, heads=look.heads, **arrays)


def _shade(weight: float) -> str:
    return SHADES[int(np.searchsorted(_BOUNDS, weight, side="right"))]


def _spread(share: float) -> str:
    return "█▓▒░·"[min(4, int(5 * share))]


def _letter(text: str, i: int) -> str:
    """The i-th character of a label, two columns wide."""
    letter = text[i] if i < len(text) else " "
    return letter + " " * (2 - cell_len(letter))
