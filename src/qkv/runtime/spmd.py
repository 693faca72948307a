"""One program, many threads: what a step calls to share its work, and the loop that a team's threads stay in.

A *step* is a kernel `step(tid, n, sync, *arrays)` that `n` threads run at the same time, each with its own `tid` in
0…n-1. It divides each phase with `claim` and ends it with `barrier`:

    while (first := claim(sync, 0, 8)) < rows:
        ...rows first … first+7...
    barrier(sync, n)

An aborted step drains by itself: from then on `claim` finds nothing left and `barrier` does not wait, so each thread
runs through the remaining phases in no time and touches nothing in them.

`sync` is one int64 array that all threads share, laid out below; lines are 128 bytes apart, since x86 fetches two cache
lines together. Nobody polls a line that others are writing to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from qkv.runtime.atomics import (
    FLOAT_CONTROL_DEFAULT,
    compare_exchange,
    exchange,
    fetch_add,
    float_control,
    load,
    microseconds,
    pause,
    set_float_control,
    store,
    yield_thread,
)
from qkv.runtime.jit import kernel

LINE = 16
"""int64 elements in two cache lines."""

# Where things are in `sync`. The first three are read in every barrier and almost never written.
GENERATION = 0  # of the barrier: grows by one whenever all have arrived
ABORT = 1  # not 0: the step drains
SPINS = 2  # how many pauses before a waiting thread begins to yield its core
ARRIVED = 1 * LINE  # threads waiting at the barrier
COUNTERS = 2 * LINE  # next item of each `claim` counter
PROGRAM = 3 * LINE  # which program the posted step belongs to
MAILBOXES = 4 * LINE  # one line per thread: what it does now
N_COUNTERS = 8

NOTHING_LEFT = 1 << 40
"""What `claim` gives in an aborted step: more items than any phase has, and far from where an int64 ends."""

# What a mailbox holds. A worker changes GO → IDLE and IDLE ↔ PARKED and ends as DEAD or GONE; the caller does the rest.
PARKED = 0  # blocked in Python; must be woken
IDLE = 1  # polling its mailbox; parks after a while
CALLED = 2  # a step is about to come: does not park
GO = 3  # runs the step
STOP = 4  # asked to end
DEAD = 5  # failed in Python
GONE = 6  # ended

# What a program returns: to the caller (tid 0) one of these or the number of a worker to wake, to a worker a mailbox
# state or ELSEWHERE.
DONE = 0
ABORTED = -1
BROKEN = -2
RUN = -3
ELSEWHERE = -4

IDLE_MICROSECONDS = 20_000
"""A worker without a step for this long blocks in Python, and waking it costs a turn of the GIL."""


def sync_size(threads: int) -> int:
    """Elements of `sync` for up to `threads` threads."""
    return MAILBOXES + threads * LINE


@kernel
def _wait(sync, polls):  # type: ignore[no-untyped-def]
    """One moment of waiting, the `polls`-th in a row: a pause at first, then the core is offered to others."""
    if polls < load(sync, SPINS):
        pause()
    else:
        yield_thread()


@kernel
def barrier(sync, n):  # type: ignore[no-untyped-def]
    """Wait until all `n` threads are here; claim counters restart from 0. Nobody waits once the step was aborted.

    What a thread wrote before the barrier, every thread sees after it.
    """
    if load(sync, ABORT) != 0:
        return
    generation = load(sync, GENERATION)
    if fetch_add(sync, ARRIVED, 1) == n - 1:
        store(sync, ARRIVED, 0)
        for slot in range(N_COUNTERS):
            store(sync, COUNTERS + slot, 0)
        store(sync, GENERATION, generation + 1)
    else:
        polls = 0
        while load(sync, GENERATION) == generation and load(sync, ABORT) == 0:
            _wait(sync, polls)
            polls += 1


@kernel
def claim(sync, slot, chunk):  # type: ignore[no-untyped-def]
    """The first of the next `chunk` unclaimed items of counter `slot` (0…N_COUNTERS-1), which restarts at a barrier.

    NOTHING_LEFT once the step was aborted.
    """
    first = fetch_add(sync, COUNTERS + slot, chunk)
    return first if load(sync, ABORT) == 0 else NOTHING_LEFT


@kernel
def first_share(sync, tid):  # type: ignore[no-untyped-def]
    """Thread `tid`'s first item of a phase that gives each thread one without a claim: `tid`, or NOTHING_LEFT."""
    return tid if load(sync, ABORT) == 0 else NOTHING_LEFT


@kernel
def post(sync, n, program):  # type: ignore[no-untyped-def]
    """The caller's beginning of a step: RUN once all workers have it, else the worker to wake, or BROKEN.

    No worker is told to go before every one of them is known to be awake, so a caller that gives up leaves nothing
    half begun.
    """
    for tid in range(1, n):
        mailbox = MAILBOXES + tid * LINE
        while load(sync, mailbox) != CALLED:
            if compare_exchange(sync, mailbox, IDLE, CALLED):
                break
            state = load(sync, mailbox)
            if state == PARKED:
                return tid
            if state in (STOP, DEAD, GONE):
                return BROKEN
    store(sync, ARRIVED, 0)
    for slot in range(N_COUNTERS):
        store(sync, COUNTERS + slot, 0)
    store(sync, PROGRAM, program)
    for tid in range(1, n):
        store(sync, MAILBOXES + tid * LINE, GO)
    return RUN


@kernel
def finish(sync, n):  # type: ignore[no-untyped-def]
    """The caller's end of a step: waits until every worker is out of it. DONE or ABORTED."""
    for tid in range(1, n):
        polls = 0
        while load(sync, MAILBOXES + tid * LINE) == GO:
            _wait(sync, polls)
            polls += 1
    return DONE if load(sync, ABORT) == 0 else ABORTED


@kernel
def stand_down(sync, n):  # type: ignore[no-untyped-def]
    """Clean up after a caller that gave up between waking the workers and the step: they may park again."""
    finish(sync, n)
    for tid in range(1, n):
        compare_exchange(sync, MAILBOXES + tid * LINE, CALLED, IDLE)


@kernel
def await_step(sync, tid, program):  # type: ignore[no-untyped-def]
    """A worker's wait: RUN for a step of its program; ELSEWHERE, PARKED or STOP take it back to Python."""
    mailbox = MAILBOXES + tid * LINE
    compare_exchange(sync, mailbox, PARKED, IDLE)  # woken without being called: see Team._recover
    polls = 0
    began = 0
    while True:
        state = load(sync, mailbox)
        if state == GO:
            return RUN if load(sync, PROGRAM) == program else ELSEWHERE
        if state == STOP:
            return STOP
        _wait(sync, polls)
        polls += 1
        if polls > load(sync, SPINS) and polls % 16 == 0:
            now = microseconds()
            if began == 0:
                began = now
            elif now - began > IDLE_MICROSECONDS and compare_exchange(sync, mailbox, IDLE, PARKED):
                return PARKED


@kernel
def park(sync, tid):  # type: ignore[no-untyped-def]
    """Let a worker that has nothing to poll for park; its mailbox's state afterwards."""
    compare_exchange(sync, MAILBOXES + tid * LINE, IDLE, PARKED)
    return load(sync, MAILBOXES + tid * LINE)


@kernel
def set_mailbox(sync, tid, state):  # type: ignore[no-untyped-def]
    """Put `state` into a worker's mailbox from Python, and give what was there."""
    return exchange(sync, MAILBOXES + tid * LINE, state)


@functools.cache
def program_of(step: Callable[..., Any]) -> Any:
    """The loop around `step` that all threads of a team run: `program(tid, n, number, sync, arrays) -> outcome`.

    Thread 0, the caller, posts the step, runs its share and waits for the others; a worker runs step after step and
    returns to Python when there is nothing to do. Every thread computes with the same float rules, whatever other
    libraries did to this one, and gets its own back afterwards.
    """

    @kernel
    def program(tid, n, number, sync, arrays):  # type: ignore[no-untyped-def]
        control = float_control()
        set_float_control(FLOAT_CONTROL_DEFAULT)
        outcome = post(sync, n, number) if tid == 0 else await_step(sync, tid, number)
        while outcome == RUN:
            step(tid, n, sync, *arrays)
            if tid == 0:
                outcome = finish(sync, n)
            else:
                store(sync, MAILBOXES + tid * LINE, IDLE)
                outcome = await_step(sync, tid, number)
        set_float_control(control)
        return outcome

    return program
