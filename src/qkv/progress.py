"""How long work reports itself: a function called with what is being done, how far it is and how far it goes."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """`progress(what, done, total, unit)`; `total` is None while unknown. `done == total` ends the bar."""

    def __call__(self, what: str, done: int, total: int | None, unit: str = "bytes") -> None: ...


def silent(what: str, done: int, total: int | None, unit: str = "bytes") -> None:
    """Report nothing."""
