"""Ctrl-C in the middle of a step.

Python runs a signal's handler only when the main thread is back from compiled code. But the moment a signal arrives,
Python also writes its number to the "wakeup" descriptor: a thread that sleeps on the other end can raise the abort flag
of the step, which makes the main thread come back.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

_FLUSH, _END = b"\xfe", b"\xff"  # no signal has these numbers


class InterruptWatch:
    """Calls `on_interrupt()` in a thread of its own when Ctrl-C arrives while armed.

    Does nothing where it would be wrong: off the main thread (the step's caller gets no KeyboardInterrupt there), when
    the program handles SIGINT itself (its handler runs after the step), or when somebody else (asyncio) is using the
    wakeup descriptor.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self._on_interrupt = on_interrupt
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._flushed = threading.Event()
        self._armed = False

    def arm(self) -> None:
        """Watch from now on."""
        if self._armed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        if self._ends is None:
            self._start()
        assert self._ends is not None
        try:
            previous = signal.set_wakeup_fd(self._ends[0].fileno(), warn_on_full_buffer=False)
        except ValueError:  # a subinterpreter: signals are not its business
            return
        if previous == -1:
            self._armed = True
        else:
            signal.set_wakeup_fd(previous)

    def disarm(self) -> None:
        """Stop watching."""
        if self._armed:
            self._armed = False
            signal.set_wakeup_fd(-1)

    def flush(self) -> None:
        """Return when nothing that arrived so far can still call `on_interrupt`."""
        if self._ends is not None:
            self._flushed.clear()
            self._ends[0].send(_FLUSH)
            self._flushed.wait(timeout=10)

    def close(self) -> None:
        """End the thread."""
        if self._ends is not None and self._thread is not None:
            self._ends[0].send(_END)
            self._thread.join(timeout=10)
            for end in self._ends:
                end.close()
            self._ends = self._thread = None

    def forget(self) -> None:
        """In a forked child, where the thread does not exist: let go of what belongs to the parent."""
        if self._armed and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        for end in self._ends or ():
            end.close()

    def _start(self) -> None:
        self._ends = socket.socketpair()
        self._ends[0].setblocking(False)
        self._thread = threading.Thread(target=self._watch, args=(self._ends[1],), name="qkv-interrupt", daemon=True)
        self._thread.start()

    def _watch(self, end: socket.socket) -> None:
        interrupt = bytes([signal.SIGINT])
        while received := end.recv(1):
            if received == interrupt:
                self._on_interrupt()
            elif received == _FLUSH:
                self._flushed.set()
            elif received == _END:
                return
