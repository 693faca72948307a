"""The team: the process's compute threads, shared by all models.

A `Program` is a step (see `spmd`) with its arrays and its number of threads; `team().run(program)` runs it once on
all of them. The calling thread is thread 0 and works too, so `n` threads keep `n` cores busy and nobody waits for a
hand-off back. The others stay inside compiled code between steps, polling a word of memory, and block in Python when
no step came for 20 ms: in a busy phase no step waits for the GIL.

How the compiled model uses it:

    @kernel
    def step(tid, n, sync, command, arena, ...):   # command: int64 array that changes between steps
        ...claim, barrier: see spmd

    program = Program(step, (command, arena, ...), threads=available_cores())
    program.compile()                              # in the warm-up
    command[...] = ...
    team().run(program)                            # reads what command says now
    team().forget(program)                         # when the model is closed

The arrays of a program never change, only their content does: between runs, by whoever calls `run`.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from qkv.errors import ParameterError
from qkv.runtime import spmd
from qkv.runtime.cores import allowed_cpus

MAX_THREADS = 512
SPINS_OF_A_FREE_CORE = 200


class StepCancelledError(Exception):
    """The step was left before its end by `Team.abort` or `Team.close`; what it was writing is unfinished."""


class StepFailedError(RuntimeError):
    """A thread of the team failed during the step: a defect. Its own exception is the cause."""


class Program:
    """A step, its arrays and how many threads run it.

    step: kernel `step(tid, n, sync, *arrays)` without a way to raise (tests/purity.py checks it).
    arrays: NumPy arrays or numbers; the compiled code is one per combination of their types.
    threads: 1…MAX_THREADS. Raises ParameterError.
    """

    _numbers = itertools.count(1)

    def __init__(self, step: Callable[..., Any], arrays: tuple[Any, ...], threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ParameterError(f"threads: {threads} is not between 1 and {MAX_THREADS}")
        self.number = next(self._numbers)
        self.threads = threads
        self.arrays = arrays
        self.entry = spmd.program_of(step)

    def compile(self) -> None:
        """Compile for these arrays' types, or load from the disk, without running."""
        int64, sync = numba.int64, numba.int64[::1]
        arrays = numba.typeof(self.arrays)  # type: ignore[no-untyped-call]
        if hasattr(self.entry, "compile"):
            self.entry.compile((int64, int64, int64, sync, arrays))
            spmd.set_mailbox.compile((sync, int64, int64))
            spmd.stand_down.compile((sync, int64))
            spmd.park.compile((sync, int64))


class _Queue:
    """A lock that threads get in the order in which they asked for it, so that no model starves another."""

    def __init__(self) -> None:
        self._owner = 0
        self._mutex = threading.Lock()
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def enter(self, ticket: threading.Lock) -> None:
        """Wait with `ticket`, a new lock, for one's turn. Raises RuntimeError if this thread is having its turn."""
        if self._owner == threading.get_ident():
            raise RuntimeError("the team was called from a signal handler in the middle of its own step")
        ticket.acquire()
        with self._mutex:
            self._waiting.append(ticket)
            if self._waiting[0] is ticket:
                ticket.release()
        ticket.acquire()
        self._owner = threading.get_ident()

    def leave(self, ticket: threading.Lock) -> None:
        """Give up one's turn or one's place in the queue, if there is one."""
        with self._mutex:
            if ticket not in self._waiting:
                return
            first = self._waiting[0] is ticket
            self._waiting.remove(ticket)
            if first:
                self._owner = 0
            if first and self._waiting:
                self._waiting[0].release()


class Team:
    """Threads that run one program at a time. Any thread may call any method."""

    def __init__(self) -> None:
        self._finished = False
        self._reset()

    def _reset(self) -> None:
        size = spmd.sync_size(MAX_THREADS)
        memory = np.zeros(size + spmd.LINE, np.int64)
        shift = -memory.ctypes.data // 8 % spmd.LINE
        self._sync = memory[shift : shift + size]
        self._queue = _Queue()
        self._state = threading.Lock()  # guards _running together with sync[ABORT]
        self._running: Program | None = None
        self._current: Program | None = None
        self._threads: list[threading.Thread] = []
        self._doors: list[threading.Lock] = []
        self._failure: BaseException | None = None
        self._unclean = False
        self._stopping = False
        self._cpus = len(allowed_cpus())

    def run(self, program: Program) -> None:
        """Run `program` once. Calls from several threads take turns, first come first served.

        Raises StepCancelledError, StepFailedError, KeyboardInterrupt (in the main thread, when the step is over; see
        `aside`), and RuntimeError at interpreter exit. After each of these no thread touches the arrays any more, and
        the team can run again.
        """
        ticket = threading.Lock()
        try:
            self._queue.enter(ticket)
            self._run(program)
        finally:
            self._queue.leave(ticket)

    def abort(self, program: Program | None = None) -> None:
        """Make the step that is running leave at its next barrier, if it is of `program` (None: of any)."""
        with self._state:
            if self._running is not None and (program is None or program is self._running):
                self._sync[spmd.ABORT] = 1

    def forget(self, program: Program) -> None:
        """Drop the team's references to the arrays of `program` (a worker lets go within its 20 ms of polling)."""
        ticket = threading.Lock()
        try:
            self._queue.enter(ticket)
            if self._current is program:
                self._current = None
        finally:
            self._queue.leave(ticket)

    def close(self) -> None:
        """Abort the running step and end all threads; the next `run` starts them again."""
        self.abort()
        ticket = threading.Lock()
        try:
            self._queue.enter(ticket)
            self._stop_threads()
        finally:
            self._queue.leave(ticket)

    def _run(self, program: Program) -> None:
        if self._finished:
            raise RuntimeError("the interpreter is exiting: no step can run any more")
        if self._stopping:  # Ctrl-C broke off a `close`
            self._stop_threads()
        if self._unclean:  # a second Ctrl-C broke off the cleaning up after the first
            self._recover()
        self._unclean = True
        try:
            outcome = self._run_step(program)
        except BaseException:
            self._recover()
            self._raise_failure()
            raise
        self._unclean = False
        self._raise_failure()
        if outcome != spmd.DONE:
            raise StepCancelledError("the step was cancelled before its end")

    def _run_step(self, program: Program) -> int:
        sync, n = self._sync, program.threads
        self._start_threads(n)
        self._current = program
        sync[spmd.SPINS] = SPINS_OF_A_FREE_CORE if n <= self._cpus else 0
        with self._state:
            sync[spmd.ABORT] = 0
            self._running = program
        while (outcome := program.entry(0, n, program.number, sync, program.arrays)) > 0:
            self._wake(outcome)
        with self._state:
            self._running = None
        return int(outcome)

    def _recover(self) -> None:
        """After an exception anywhere in `_run_step`: get everyone out and make the next run possible.

        The exception may have struck between marking a worker as called and opening its door, so all doors are opened:
        a worker that finds nothing to do goes back to its own.
        """
        self.abort()
        spmd.stand_down(self._sync, len(self._threads) + 1)
        for tid in range(1, len(self._threads) + 1):
            self._open(tid)
        with self._state:
            self._running = None
        self._unclean = False

    def _raise_failure(self) -> None:
        """If a worker failed, end the threads (the next run has new ones) and say so."""
        failure = self._failure
        if failure is not None:
            self._stop_threads()
            raise StepFailedError(f"a compute thread failed: {type(failure).__name__}: {failure}") from failure

    def _start_threads(self, n: int) -> None:
        """Have workers 1…n-1. A new one waits at its door."""
        for tid in range(len(self._threads) + 1, n):
            door = threading.Lock()
            door.acquire()
            spmd.set_mailbox(self._sync, tid, spmd.PARKED)
            worker = threading.Thread(target=self._work, args=(tid, door), name=f"qkv-team-{tid}", daemon=True)
            try:
                worker.start()
            except RuntimeError as error:
                raise StepFailedError(f"could not start compute thread {tid + 1} of {n} ({error})") from error
            self._doors.append(door)
            self._threads.append(worker)

    def _wake(self, tid: int) -> None:
        spmd.set_mailbox(self._sync, tid, spmd.CALLED)
        self._open(tid)

    def _open(self, tid: int) -> None:
        door = self._doors[tid - 1]
        if door.locked():
            door.release()

    def _stop_threads(self) -> None:
        self._stopping = True
        for tid, worker in enumerate(self._threads, start=1):
            mailbox = spmd.MAILBOXES + tid * spmd.LINE
            before = spmd.set_mailbox(self._sync, tid, spmd.STOP)
            if before in (spmd.DEAD, spmd.GONE):
                spmd.set_mailbox(self._sync, tid, before)
            self._open(tid)
            while self._sync[mailbox] == spmd.STOP:  # `join` forgets that it was not done when Ctrl-C breaks it off
                time.sleep(0.0001)
            worker.join()
        self._threads, self._doors, self._failure, self._current = [], [], None, None
        self._stopping = False

    def _work(self, tid: int, door: threading.Lock) -> None:
        """A worker's life: at its door until there is work, then in the compiled loop until there is none."""
        try:
            outcome = spmd.PARKED
            while outcome != spmd.STOP:
                if outcome == spmd.PARKED:
                    door.acquire()
                outcome = self._serve(tid)
            spmd.set_mailbox(self._sync, tid, spmd.GONE)
        except BaseException as error:  # the others wait for this thread: they must hear of it, whatever it was
            self._failure = error
            spmd.set_mailbox(self._sync, tid, spmd.DEAD)
            self.abort()

    def _serve(self, tid: int) -> int:
        program = self._current
        if program is None:
            return int(spmd.park(self._sync, tid))
        return int(program.entry(tid, program.threads, program.number, self._sync, program.arrays))


_team = Team()


def team() -> Team:
    """The one team of this process."""
    return _team


def _at_exit() -> None:
    _team._finished = True
    _team.close()


def _after_fork() -> None:
    """In a forked child none of the threads exist: begin anew."""
    _team._reset()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
