"""Tables and plots made of characters, in the terminal's own colours, so that they read on light and dark alike."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing NumPy takes longer than printing a table
    from numpy.typing import NDArray

    Numbers = Sequence[float] | NDArray[Any]


def paragraph(text: str, width: int) -> str:
    """Text as lines of at most `width` characters, and an empty line."""
    return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False) + "\n\n"


def table(
    rows: Sequence[Sequence[str]], left: int = 1, groups: Sequence[tuple[str, int]] = (), rule: bool = True
) -> str:
    """Rows as lines; the first `left` columns start together, the others end together.

    groups: titles above the first row and how many columns each spans. rule: whether a line is under the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    lines = [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "─" * max(map(len, lines)))
    if groups:
        titles, first = [], 0
        for title, span in groups:
            room = sum(widths[first : first + span]) + 2 * (span - 1)
            titles.append(f" {title} ".center(room, "─" if title else " "))
            first += span
        lines.insert(0, "  ".join(titles).rstrip())
    return "".join(line + "\n" for line in lines)


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


def bars(
    labels: Sequence[str], values: Numbers, width: int, *, text: Sequence[str] | None = None, log: bool = False
) -> str:
    """One bar a line, in eighths of a character; `text` (the value) stands behind it.

    A bar begins at 0, and one of a negative value is empty. On a logarithmic scale it begins at a tenth of the smallest
    positive value.
    """
    text = text or [f"{value:.3g}" for value in values]
    label_width = max(map(len, labels))
    room = width - label_width - max(map(len, text)) - 3
    least = min((value for value in values if value > 0), default=1.0)
    shown = [value if value > 0 else 0.0 for value in values]  # NaN too is empty
    lengths = [math.log10(10 * value / least) if log and value else value for value in shown]
    largest = max(*lengths, 1e-300)
    lines = []
    for label, length, behind in zip(labels, lengths, text, strict=True):
        whole, eighths = divmod(round(length / largest * room * 8), 8)
        bar = "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")
        lines.append(f"{label:>{label_width}} ▕{bar} {behind}\n")
    return "".join(lines)


def bars_beside(titles: Sequence[str], labels: Sequence[str], columns: Sequence[Numbers], width: int) -> str:
    """A column of bars for each title, all on one logarithmic scale."""
    n, values = len(labels), [float(value) for column in columns for value in column]
    lines = bars([*labels] * len(titles), values, (width + 3) // len(titles) - 3, log=True).splitlines()
    return beside([(title, lines[i * n : (i + 1) * n]) for i, title in enumerate(titles)], width)


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
    bands: list[list[list[str]]] = []
    for title, lines in panels:
        size = max(map(len, [title, *lines]))
        if not bands or sum(len(panel[0]) + 3 for panel in bands[-1]) + size > width:
            bands.append([])
        bands[-1].append([line.ljust(size) for line in [title, *lines]])
    text = ""
    for band in bands:
        height = max(map(len, band))
        filled = [panel + [" " * len(panel[0])] * (height - len(panel)) for panel in band]
        text += "".join("   ".join(parts).rstrip() + "\n" for parts in zip(*filled, strict=True)) + "\n"
    return text
