"""Tables and plots made of characters, in the terminal's own colours, so that they read on light and dark alike."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[Any]
MARKS = "●○×+◆◇"


def paragraph(text: str, width: int) -> str:
    """Text as lines of at most `width` characters, and an empty line."""
    return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False) + "\n\n"


def table(rows: Sequence[Sequence[str]], left: int = 1, groups: Sequence[tuple[str, int]] = ()) -> str:
    """Rows as lines; the first `left` columns start together, the others end together. The first row is the header.

    groups: titles above the header and how many columns each spans, from the first column on.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "─" * max(map(len, lines)))
    if groups:
        titles, first = [], 0
        for title, span in groups:
            room = sum(widths[first : first + span]) + 2 * (span - 1)
            titles.append(f" {title} ".center(room, "─" if title else " "))
            first += span
        lines.insert(0, "  ".join(titles).rstrip())
    return "".join(line + "\n" for line in lines)


def plain(number: float) -> str:
    """Three digits without a power of 1000 where they can be read: 0.00325, 12.5, 16,384, else 3e-05."""
    if number != 0 and not 1e-4 <= abs(number) < 1e6:
        return f"{number:.0e}"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def si(number: float, unit: str = "") -> str:
    """Three digits and a power of 1000: 8.59 G, 114 k, 1.00, 250 m."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g} {unit}".strip()
    exponent = math.floor(math.log10(abs(number)) / 3)
    if abs(number) / 1000.0**exponent >= 999.5:
        exponent += 1
    if not -3 <= exponent <= 6:
        return f"{number:.2e} {unit}".strip()
    scaled = abs(number) / 1000.0**exponent
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{math.copysign(scaled, number):.{digits}f} {'nµm kMGTPE'[exponent + 3].strip()}{unit}".strip()


@dataclass(frozen=True)
class Series:
    """Points of a plot that share a mark, or a line of small dots."""

    name: str
    x: Numbers
    y: Numbers
    line: bool = False


def chart(
    series: Sequence[Series], width: int, *, height: int = 16, x_name: str, y_name: str, log: str = "xy", unit: str = ""
) -> str:
    """Points in a frame and a legend below. `log` names the logarithmic axes, `unit` is that of y.

    A line is drawn as dots; points are drawn over it. What is not finite (or not positive, on a logarithmic axis) is
    left out.
    """
    points = [
        [
            (math.log10(x) if "x" in log else x, math.log10(y) if "y" in log else y)
            for x, y in zip(one.x, one.y, strict=True)
            if _drawable(x, "x" in log) and _drawable(y, "y" in log)
        ]
        for one in series
    ]
    every = [point for some in points for point in some]
    margin = 9
    columns = width - margin - 2
    x0, x1 = _range([x for x, _ in every])
    y0, y1 = _range([y for _, y in every])
    cells = [[" "] * columns for _ in range(height)]

    def put(x: float, y: float, mark: str) -> None:
        column = round((x - x0) / (x1 - x0) * (columns - 1))
        row = round((y - y0) / (y1 - y0) * (height - 1))
        cells[height - 1 - row][column] = mark

    marks = _marks(series)
    for one, some in zip(series, points, strict=True):
        if one.line:
            for x, y in _dense(some, columns):
                put(x, y, "·")
    for mark, one, some in zip(marks, series, points, strict=True):
        if not one.line:
            for x, y in some:
                put(x, y, mark)
    lines = [f"{y_name} (logarithmic)" if "y" in log else y_name]
    for row, line in enumerate(cells):
        value = y1 - (y1 - y0) * row / (height - 1)
        number = 10**value if "y" in log else value
        label = (si(number, unit) if unit else plain(number)) if row % 5 == 0 else ""
        lines.append(
            f"{label:>{margin - 1}} ┤{''.join(line)}".rstrip() if label else f"{'':{margin}}│{''.join(line)}".rstrip()
        )
    lines.append(" " * margin + "└" + "─" * columns)
    lines.append(_x_labels(x0, x1, columns, margin, "x" in log, x_name))
    lines += _legend(list(dict.fromkeys(f"{mark} {one.name}" for mark, one in zip(marks, series, strict=True))), width)
    return "".join(line + "\n" for line in lines)


def bars(labels: Sequence[str], values: Numbers, width: int, *, text: Sequence[str] | None = None) -> str:
    """One bar a line, from 0, in eighths of a character; `text` stands behind it. Negative values are drawn as 0."""
    text = text or [f"{value:.3g}" for value in values]
    label_width = max(map(len, labels))
    room = width - label_width - max(map(len, text)) - 3
    largest = max(max(values), 1e-300)
    lines = []
    for label, value, shown in zip(labels, values, text, strict=True):
        whole, eighths = divmod(round(max(value, 0) / largest * room * 8), 8)
        bar = "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")
        lines.append(f"{label:>{label_width}} ▕{bar} {shown}\n")
    return "".join(lines)


def shades(matrix: Sequence[Numbers], largest: float = 1.0) -> list[str]:
    """A line for each row, two characters for each number: darker for larger, `·` for exactly 0, `?` for NaN."""
    lines = []
    for row in matrix:
        cells = []
        for value in row:
            level = 0 if math.isnan(value) else min(3, int(4 * value / largest))
            cells.append("??" if math.isnan(value) else "· " if value == 0 else "░▒▓█"[level] * 2)
        lines.append("".join(cells))
    return lines


def beside(panels: Sequence[tuple[str, Sequence[str]]], width: int) -> str:
    """Titled panels of lines next to each other, in as many bands as `width` asks for."""
    sized = [(max(map(len, [title, *lines])), title, lines) for title, lines in panels]
    text, band = "", list[tuple[int, str, Sequence[str]]]()
    for panel in [*sized, None]:
        if panel is None or sum(size + 3 for size, _, _ in band) + panel[0] > width:
            height = max((len(lines) for _, _, lines in band), default=0)
            for row in range(-1, height):
                cells = [
                    (title if row < 0 else lines[row] if row < len(lines) else "").ljust(size)
                    for size, title, lines in band
                ]
                text += "   ".join(cells).rstrip() + "\n"
            text += "\n" if band else ""
            band = []
        if panel is not None:
            band.append(panel)
    return text


def _drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (not log or value > 0)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _dense(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """Points between neighbours, close enough for a line."""
    dense = []
    for (xa, ya), (xb, yb) in pairwise(points):
        dense += [(xa + (xb - xa) * i / columns, ya + (yb - ya) * i / columns) for i in range(columns + 1)]
    return dense


def _marks(series: Sequence[Series]) -> list[str]:
    remaining = iter(MARKS)
    return ["·" if one.line else next(remaining) for one in series]


def _x_labels(x0: float, x1: float, columns: int, margin: int, log: bool, name: str) -> str:
    left, right = (plain(10**x if log else x) for x in (x0, x1))
    middle = f"{name}{' (logarithmic)' if log else ''}"
    return " " * (margin + 1) + left + middle.center(columns - len(left) - len(right)) + right


def _legend(entries: Sequence[str], width: int) -> list[str]:
    """The legend's entries, as many a line as fit."""
    lines, line = [], ""
    for entry in entries:
        if line and len(line) + 3 + len(entry) > width - 10:
            lines.append(" " * 10 + line)
            line = ""
        line = f"{line}   {entry}" if line else entry
    return [*lines, " " * 10 + line]
