"""Several requests at once, and all their completions in order."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.completion import Completion, Job, Running
from qkv.engine.mailbox import Mailbox
from qkv.engine.request import Handle
from qkv.errors import QueueFullError
from qkv.progress import Progress, silent


class Batch:
    """Starts as many jobs as the engine's queue takes, and the others when there is room again."""

    def __init__(self, jobs: Sequence[Job], progress: Progress = silent) -> None:
        self._jobs, self._progress = jobs, progress
        self._mailbox = Mailbox()
        self._running: dict[Handle, tuple[int, Running]] = {}
        self._started = 0
        self._done: dict[int, Completion] = {}

    def run(self) -> list[Completion]:
        """The completions in the order of the jobs. The first error, and Ctrl-C, cancels those that still run."""
        try:
            while self._fill():
                self._take(self._mailbox.get())
        finally:
            self._cancel()
        return [self._done[at] for at in range(len(self._jobs))]

    async def arun(self) -> list[Completion]:
        """Like `run`, for coroutines."""
        try:
            while self._fill():
                self._take(await self._mailbox.aget())
        finally:
            self._cancel()
        return [self._done[at] for at in range(len(self._jobs))]

    def _fill(self) -> bool:
        """Start what can be started; whether anything runs."""
        try:
            while self._started < len(self._jobs):
                running = self._jobs[self._started].start(self._mailbox, chunks=False)
                self._running[running.handle] = self._started, running
                self._started += 1
        except QueueFullError:
            if not self._running:  # it is others that fill the queue
                raise
        return bool(self._running)

    def _take(self, handle: Handle) -> None:
        at, running = self._running.pop(handle)
        self._done[at] = running.completion()
        self._progress("generating", len(self._done), len(self._jobs), "prompts")

    def _cancel(self) -> None:
        for handle in self._running:
            handle.cancel()
