"""Tokens per second over depth, one line for each engine, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import HOME, Row
from qkv.errors import QkvError

FILE = "compare.png"
Lines = dict[str, dict[str, list[tuple[int, float]]]]


def lines(rows: list[Row]) -> Lines:
    """For each model and engine the (depth, tokens per second) of its decode points, f16 caches unless said."""
    found: Lines = {}
    for row in sorted(rows, key=lambda row: row.point):
        if row.point.kind != "decode":
            continue
        model = found.setdefault(row.model, {})
        model.setdefault(f"{HOME}, {row.cache} cache", []).append((row.point.n, row.rate))
        for name, (rate, _) in row.peers.items():
            label = f"{name}, f16 cache" if row.cache == "f16" else f"{name}, its fastest cache"
            model.setdefault(label, []).append((row.point.n, rate))
    return found


def save(rows: list[Row], folder: Path) -> str:
    """Draw it into the folder; a line for people: where it is, or why there is none. Raises QkvError."""
    drawn = lines(rows)
    if not drawn:
        return "no plot: no decode points"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    figure: Any = Figure(figsize=(6 * len(drawn), 4.5), layout="constrained")
    for axes, (model, engines) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for name, points in engines.items():
            depths, rates = zip(*points, strict=True)
            style = "-" if name.startswith(f"{HOME}, f16") or name.startswith(f"{HOME}, int8") else "--"
            axes.plot(depths, rates, style, marker="o", label=name)
        axes.set_xscale("log", base=2)
        ticks = sorted({depth for points in engines.values() for depth, _ in points})
        axes.set_xticks(ticks, [str(depth) for depth in ticks])
        axes.set_ylim(bottom=0)
        axes.set(title=model, xlabel="tokens in the cache", ylabel="tokens per second")
        axes.grid(alpha=0.3)
        axes.legend()
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise QkvError(f"--out: {path} cannot be written: {error.strerror}") from None
    return f"plot: {path}"
