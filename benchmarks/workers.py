"""The other end of `worker`: engines as processes that are asked one thing at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(Exception):
    """An engine that could not do what it was asked, with its reason in one line."""


@dataclass(frozen=True)
class Launch:
    """How an engine is started: a name for people, a Python, a module of `benchmarks`, changes to the environment.

    root: the checkout that the module is taken from.
    """

    name: str
    python: str
    module: str
    environment: dict[str, str] = field(default_factory=dict)
    root: Path = ROOT


class Worker:
    """A running engine. Raises WorkerError from every method but `close`."""

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `close`
        try:
            self._process = subprocess.Popen(
                [launch.python, "-m", launch.module],
                cwd=launch.root,
                env={**os.environ, **launch.environment},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
            )
        except OSError as error:
            self._complaints.close()
            raise WorkerError(f"{launch.python} cannot be started: {error.strerror}") from None

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Send an order and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far, in steps of 10 ms; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._complaints.seek(0)
        lines = [line.strip() for line in self._complaints.read().splitlines() if line.strip()]
        return f"ended with code {code}: {lines[-1]}" if lines else f"ended with code {code}"
