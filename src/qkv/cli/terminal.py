"""Standard output and standard error: who may write what, and what to do when they cannot take it.

Standard output carries answers and tables and nothing else; errors, progress and timings go to standard error.
Text that comes from a model or a model's file is never trusted to be free of a terminal's control sequences.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO

from qkv.errors import QkvError

termios: Any
try:
    import termios
except ImportError:  # Windows: its console shows what is typed when it is read
    termios = None

_KEPT = "\t\n"
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]  # C0, DEL, C1
_VISIBLE = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in _KEPT}
_ONE_LINE = {**_VISIBLE, ord("\t"): " ", ord("\n"): " "}

DIM, RESET = "\x1b[2m", "\x1b[0m"


class OutputClosed(Exception):  # noqa: N818 - not an error: the reader has had enough
    """Whoever reads standard output has closed it (`qkv run … | head -c 10`)."""


def prepare_streams() -> None:
    """Make both streams usable: a closed one writes nowhere, and one that is not UTF-8 writes `?` for the rest."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(text: str) -> None:
    """Write to standard output at once. Raises `OutputClosed` when its reader has gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        # Windows reports a closed pipe as EINVAL.
        if error.errno == errno.EPIPE or (sys.platform == "win32" and error.errno == errno.EINVAL):
            raise OutputClosed from None
        raise QkvError(f"standard output cannot be written: {error.strerror}") from None


def note(text: str) -> None:
    """Write a line to standard error; if nobody reads it, it is lost."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def print_error(message: str) -> None:
    """`qkv: <message>`, one line, whatever the message holds."""
    note("qkv: " + message.translate(_ONE_LINE))


def discard(stream: TextIO) -> None:
    """Send what is still buffered nowhere, so that the interpreter's last flush does not fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # not a real file: nothing is buffered below it
        pass


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person looks at the stream."""
    return stream is not None and not stream.closed and stream.isatty()


def has_colour(stream: IO[str]) -> bool:
    """Whether the stream understands dim text; `NO_COLOR` and `TERM=dumb` say no."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    # An old Windows console prints escape sequences as they are; Windows Terminal and others set these.
    return sys.platform != "win32" or bool(os.environ.get("WT_SESSION") or os.environ.get("TERM"))


@contextmanager
def typing_unseen() -> Iterator[None]:
    """Keep what a person types meanwhile from the screen; it waits for the next prompt.

    However the block ends, also by a signal that ends the process, the terminal shows again what is typed.
    """
    if not is_terminal(sys.stdin) or termios is None:
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def restore(number: int = 0, frame: object = None) -> None:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        if number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handlers = {number: signal.signal(number, restore) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
        yield
    finally:
        restore()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def visible(text: str) -> str:
    """The text with every control character but tab and line feed spelled out: ESC becomes the four letters \\x1b."""
    return text.translate(_VISIBLE)


def for_output(text: str) -> str:
    """Text of a model or a file as standard output may have it: visible on a terminal, untouched elsewhere."""
    return visible(text) if is_terminal(sys.stdout) else text


def bytes_text(count: int) -> str:
    """1536 -> "1.5 kB" (powers of 1000, as disks and networks count)."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def count_text(number: int, noun: str) -> str:
    """ "1 token", "1,234 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
