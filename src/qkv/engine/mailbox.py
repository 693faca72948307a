"""From the engine's thread to one reader, which may be a thread or a coroutine.

Writing never waits for the reader, so the engine doesn't either: how much is generated does not depend on who reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


class Mailbox:
    """A queue with one reader. `put` may be called from anywhere, destructors and signal handlers included."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Callable[[], Any] | None = None

    def put(self, item: Any) -> None:
        """Leave something for the reader."""
        self._items.put(item)
        wake, self._wake = self._wake, None
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the reader is gone, and needs no call
                wake()

    def get(self) -> Any:
        """The next item; the calling thread waits for it. Ctrl-C breaks the waiting off."""
        if sys.platform != "win32":
            return self._items.get()
        while True:  # on Windows nothing interrupts a thread that waits without a time limit
            with contextlib.suppress(queue.Empty):
                return self._items.get(timeout=0.1)

    def get_nowait(self) -> Any:
        """The next item, or None if there is none."""
        with contextlib.suppress(queue.Empty):
            return self._items.get_nowait()
        return None

    async def aget(self) -> Any:
        """The next item; the calling coroutine waits for it."""
        loop = asyncio.get_running_loop()
        while True:
            arrived = loop.create_future()
            self._wake = partial(loop.call_soon_threadsafe, _resolve, arrived)
            try:
                return self._items.get_nowait()
            except queue.Empty:
                await arrived


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
