"""Progress on standard error: bars on a terminal, a line for each long piece of work elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any

from qkv.cli import terminal

LONG_SECONDS = 2.0


class Bars:
    """A `qkv.progress.Progress` that shows a bar for the work at hand; it is gone when the work is done.

    Work comes one piece after the other, so a new piece takes the bar of the last. Use it as a context manager:
    whatever happens, the terminal is left as it was.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._on_terminal = terminal.is_terminal(sys.stderr)
        self._bars: Any = None  # rich.progress.Progress, imported when the first bar is needed
        self._task: Any = None  # rich's id of the bar on screen
        self._what: str | None = None  # what that bar shows
        self._since: dict[str, float] = {}  # when a piece of work was first heard of; infinity once it is announced
        self._lock = threading.Lock()  # downloads report from several threads

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        """Take the bar away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._what = None

    def __call__(self, what: str, done: int, total: int | None, unit: str = "bytes") -> None:
        """Show that `done` of `total` units of `what` are done."""
        if self._quiet:
            return
        with self._lock:
            if not self._on_terminal:
                self._announce(what, total, unit)
            elif total is not None and done >= total:
                self._finish()
            else:
                self._show(what, done, total, unit)

    def _announce(self, what: str, total: int | None, unit: str) -> None:
        """Say once what is being done, when it has taken long enough for someone to wonder."""
        now = time.monotonic()
        if now - self._since.setdefault(what, now) >= LONG_SECONDS:
            self._since[what] = math.inf
            size = "" if total is None else f" ({_amount(total, None, unit)})"
            terminal.note(terminal.visible(what) + size)

    def _show(self, what: str, done: int, total: int | None, unit: str) -> None:
        if self._bars is None:
            self._bars = _rich_progress()
            self._bars.start()
        if what != self._what:
            self._finish()
            self._task = self._bars.add_task(terminal.visible(what), total=total, amount="")
            self._what = what
        self._bars.update(self._task, completed=done, total=total, amount=_amount(done, total, unit))

    def _finish(self) -> None:
        if self._what is not None:
            self._bars.remove_task(self._task)
            self._what = None


def _amount(done: int, total: int | None, unit: str) -> str:
    """ "1.2 GB/1.5 GB", "12/311 tensors", "3 files"."""
    counts = [done] if total is None else [done, total]
    if unit == "bytes":
        return "/".join(map(terminal.bytes_text, counts))
    return f"{'/'.join(map(str, counts))} {unit}"


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
