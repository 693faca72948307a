"""Tables and plots made of characters, in the terminal's own colours, so that they read on light and dark alike."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[Any]


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
