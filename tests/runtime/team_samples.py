"""Small steps that the tests of the team run, here and in child processes."""

from __future__ import annotations

import numpy as np

from qkv.runtime.atomics import fetch_add, float_control, load, microseconds, set_float_control
from qkv.runtime.jit import kernel
from qkv.runtime.spmd import ABORT, barrier, claim

CHUNK = 16


@kernel
def three_phases(tid, n, sync, command, x, squares, sums, result):
    """command[0] times: squares = x², sums of blocks of CHUNK squares, result[0] = sum of the sums in index order."""
    blocks = (x.shape[0] + CHUNK - 1) // CHUNK
    for _ in range(command[0]):
        while True:
            first = claim(sync, 0, CHUNK)
            if first >= x.shape[0]:
                break
            for i in range(first, min(first + CHUNK, x.shape[0])):
                squares[i] = x[i] * x[i]
        barrier(sync, n)
        while True:
            block = claim(sync, 0, 1)
            if block >= blocks:
                break
            total = 0.0
            for i in range(block * CHUNK, min((block + 1) * CHUNK, x.shape[0])):
                total += squares[i]
            sums[block] = total
        barrier(sync, n)
        if claim(sync, 1, 1) == 0:
            total = 0.0
            for block in range(blocks):
                total += sums[block]
            result[0] = total
        barrier(sync, n)


@kernel
def endless(tid, n, sync, started):
    """Barriers without end; started[0] counts the threads that began."""
    fetch_add(started, 0, 1)
    while load(sync, ABORT) == 0:
        barrier(sync, n)


@kernel
def busy(tid, n, sync, milliseconds):
    """A phase that looks at no flag for so many milliseconds, then a barrier."""
    until = microseconds() + milliseconds[0] * 1000
    while microseconds() < until:
        pass
    barrier(sync, n)


@kernel
def failing(tid, n, sync, culprit):
    """Raises in thread culprit[0], which no real step does, while the others wait for it."""
    if tid == load(culprit, 0):
        raise ValueError("forced")
    barrier(sync, n)


@kernel
def allocating(tid, n, sync, out):
    """Makes an array, which no real step does."""
    made = np.arange(out[0])
    for i in range(made.shape[0]):
        out[i] = made[i]


@kernel
def tally(tid, n, sync, counts, log, turn):
    """Each thread counts its runs and thread 0 appends turn[0] to the log (log[0] is its length)."""
    counts[tid] += 1
    barrier(sync, n)
    if tid == 0:
        log[0] += 1
        log[log[0]] = turn[0]


@kernel
def denormals(tid, n, sync, x, y):
    """y[tid] = x[0] · 0.5 under the rules of the thread."""
    y[tid] = x[0] * np.float32(0.5)


@kernel
def swap_float_control(value):
    """Set this thread's MXCSR and give the old one."""
    old = float_control()
    set_float_control(np.int32(value))
    return old
