"""Several requests at once, and all their completions in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qkv.completion import Completion, Request
from qkv.engine.mailbox import Mailbox
from qkv.engine.request import Handle
from qkv.errors import QueueFullError
from qkv.progress import Progress, silent


class Requests:
    """Starts as many requests as the engine's queue takes, and the others when there is room again."""

    def __init__(self, requests: Sequence[Request], progress: Progress = silent) -> None:
        self._requests, self._progress = requests, progress
        self._mailbox = Mailbox()
        self._running: dict[Handle, int] = {}
        self._started = 0
        self._done: dict[int, Completion] = {}
        self._given_up = False

    def run(self) -> list[Completion]:
        """The completions in the order of the requests. The first error, and Ctrl-C, cancels those that still run."""
        try:
            while self._fill():
                self._take(self._mailbox.get())
        finally:
            self._give_up()
        return [self._done[at] for at in range(len(self._requests))]

    async def arun(self) -> list[Completion]:
        """Like `run`, for coroutines. Requests are started in another thread: that takes a while for long prompts."""
        try:
            while await asyncio.to_thread(self._fill):
                self._take(await self._mailbox.aget())
        finally:
            self._give_up()
        return [self._done[at] for at in range(len(self._requests))]

    def _fill(self) -> bool:
        """Start what can be started; whether anything runs."""
        try:
            while self._started < len(self._requests) and not self._given_up:
                handle = self._requests[self._started].start(self._mailbox, chunks=False)
                self._running[handle] = self._started
                self._started += 1
                if self._given_up:  # while it was starting, so that nobody else cancels it
                    handle.cancel()
        except QueueFullError:
            if not self._running:  # it is others that fill the queue
                raise
        return bool(self._running)

    def _take(self, handle: Handle) -> None:
        at = self._running.pop(handle)
        self._done[at] = self._requests[at].completion(handle)
        self._progress("generating", len(self._done), len(self._requests), "prompts")

    def _give_up(self) -> None:
        """Cancel what still runs, and start nothing more."""
        self._given_up = True
        for handle in list(self._running):
            handle.cancel()
