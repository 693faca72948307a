"""Terminals and pipes for tests: a process on a pseudo-terminal of its own, and streams for this process."""

from __future__ import annotations

import io
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import pytest

if sys.platform != "win32":
    import fcntl
    import pty
    import termios

PATIENCE = 60.0  # seconds until a test that waits for something fails


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let standard input be a pipe with this content."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


class Screen:
    """Runs `python arguments…` on a terminal of 80 columns; kills it at the end."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        if sys.platform == "win32":
            pytest.skip("needs a pseudo-terminal")
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
            env={**os.environ, "TERM": "xterm", **(env or {})},
        )
        os.close(slave)
        self.seen = ""

    def send(self, text: str) -> None:
        """Type."""
        os.write(self.master, text.encode())

    def expect(self, text: str) -> str:
        """Wait until `text` is on the screen; returns what came before it and forgets both."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            if not self._read(deadline):
                state = self.process.poll()
                pytest.fail(f"{text!r} never came; the rest of the screen: {self.seen!r}; exit code: {state}")
        before, _, self.seen = self.seen.partition(text)
        return before

    def insist(self, key: str, text: str) -> None:
        """Press a key until `text` is on the screen: CPython's line editor misses Ctrl-C while it draws a line."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen and time.monotonic() < deadline:
            time.sleep(0.2)
            self.send(key)
            patience = time.monotonic() + 5
            while text not in self.seen and self._read(patience):
                pass
        self.expect(text)

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed by itself, without the program."""
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)

    def end(self) -> int:
        """Wait for the end; returns the exit code. What was still printed is in `seen`."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self.process.wait(timeout=PATIENCE)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other end is gone
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
