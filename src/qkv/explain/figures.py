"""Plots as PNG files. Needs matplotlib, which nothing else does: `pip install 'qkv[plots]'`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from qkv.errors import QkvError

# Told apart with any colour vision (Okabe and Ito, 2008), on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
GREY = "#777777"


def new_figure() -> Any:
    """An empty matplotlib figure. Raises QkvError where matplotlib is missing."""
    try:
        backend = importlib.import_module("matplotlib.backends.backend_agg")
        figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
    except ImportError:
        raise QkvError("a PNG needs matplotlib, which is not installed: pip install 'qkv[plots]'") from None
    backend.FigureCanvasAgg(figure)
    return figure


def legend_below(axes: Any) -> None:
    """Put the legend under the plot, where it hides nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)


def check_target(path: Path) -> None:
    """Raise QkvError if no file could be written there, before anything is computed for it."""
    if path.is_dir():
        raise QkvError(f"{path} is a folder; name a file, such as {path / 'plot.png'}")
    if not path.parent.is_dir():
        raise QkvError(f"{path.parent}: no such folder")


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG: completely or not at all. Raises QkvError."""
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=144))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Have `write` write a file: completely or not at all. Raises QkvError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise QkvError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
