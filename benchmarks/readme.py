"""The table of README.md and of its Chinese page, from what was just measured."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.peers import Peer
from benchmarks.report import Row
from benchmarks.workers import ROOT
from qkv.errors import QkvError

READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
BEGIN, END = "<!-- speed: written by python -m benchmarks.compare --write-readme -->", "<!-- end of speed -->"
KINDS = {"decode": "decode at {}", "prefill": "prefill of {}", "batch": "{} sequences at 128, total"}


def update(
    rows: list[Row], about: dict[str, Any], threads: int, peers: list[Peer], paths: Sequence[Path] = READMES
) -> str:
    """Replace what is between the markers of each file; a line for people.

    Raises QkvError. No file changes if one of them has no markers.
    """
    table = block(rows, about, threads, peers)
    texts = {path: _with_table(path, table) for path in paths}
    for path, text in texts.items():
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise QkvError(f"{path} cannot be written: {error.strerror}") from None
    return f"written into {' and '.join(map(str, paths))}"


def _with_table(path: Path, table: str) -> str:
    """A file's text with this table between its markers."""
    try:
        before, found, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    except OSError as error:
        raise QkvError(f"{path} cannot be read: {error.strerror}") from None
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise QkvError(f"{path} has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def block(rows: list[Row], about: dict[str, Any], threads: int, peers: list[Peer]) -> str:
    """The table and what it was measured on, as Markdown."""
    names = [peer.name for peer in peers if any(peer.name in row.peers for row in rows)]
    titles = {model.key: model.title for model in MODELS}
    cells = [["tokens/s", "qkv", *(text for name in names for text in (name, "ratio"))]]
    cells.append(["---"] * len(cells[0]))
    for model in dict.fromkeys(row.model for row in rows):
        cells.append([f"**{titles.get(model, model)}**"] + [""] * (len(cells[0]) - 1))
        cells += [_cells(row, names) for row in rows if row.model == model and _shown(row)]
    lines = [f"| {' | '.join(row)} |\n" for row in cells]
    versions = ", ".join(f"{peer.name} ({peer.version})" for peer in peers if peer.name in names)
    about_it = (
        f"{about['processor']}, {threads} threads, {about['date']}: qkv {about['qkv']}"
        f"{f' beside {versions}' if versions else ''}. Caches are f16, except where int8 is named: there the peer has "
        "whichever kind makes it fastest; llama.cpp's flash attention is on or off, whichever is faster. "
        "[How to read and repeat this](docs/performance.md#measuring)."
    )
    return "\n" + "".join(lines) + "\n" + textwrap.fill(about_it, 119, break_long_words=False) + "\n\n"


def _shown(row: Row) -> bool:
    """The int8 cache matters where there is much in it."""
    return row.cache == "f16" or (row.point.kind == "decode" and row.point.n >= 2048)


def _cells(row: Row, names: list[str]) -> list[str]:
    what = KINDS[row.point.kind].format(f"{row.point.n:,}") + (", int8 cache" if row.cache == "int8" else "")
    cells = [what, _rate(row.rate)]
    for name in names:
        cells += [_rate(row.peers[name][0]), f"{row.ratios[name]:.1f}×"] if name in row.peers else ["", ""]
    return cells


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.1f}"
