# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""How fast memory can be read here: the best of several ways of reading a large array once, on huge pages.

A way is how many places a thread reads at once, how large a piece it claims, and how far ahead it prefetches. Which way
is best depends on the processor's own prefetching, so all are tried. Decoding reads all weights once a step, so it
cannot be faster than this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qkv.checks import whole
from qkv.kernels.formats import new_arena
from qkv.kernels.memory import load, prefetch
from qkv.kernels.simd import splat, sum_lanes
from qkv.kernels.values import i32x8
from qkv.progress import Progress, silent
from qkv.runtime.jit import inlined, kernel
from qkv.runtime.spmd import barrier, claim
from qkv.runtime.team import MAX_THREADS, Program, team
from qkv.runtime.warmup import compile_in_child

BYTES = 1 << 29
LINE = 16  # int32 numbers of a cache line
VECTOR = 8
VECTORS = 8  # loaded in one pass of the loop, for all streams together
STREAMS = (1, 2, 4, 8)
PIECES = (1 << 16, 1 << 19)  # bytes a thread claims at a time
AHEAD = (0, 4096, 8192, 16384)  # bytes
PASS = VECTOR * VECTORS

Clock = Callable[[], float]
"""`time.perf_counter`; or, for one thread on a busy machine, `time.thread_time`, which stops while others run."""


class Way(NamedTuple):
    """How to read: places at once, bytes claimed at a time, bytes asked for ahead (0: left to the processor)."""

    streams: int
    piece: int
    ahead: int

    def numbers(self) -> list[int]:
        """The kernel's `way`: passes a piece, numbers from pass to pass, numbers ahead, where each vector begins."""
        part = self.piece // 4 // self.streams
        each = VECTORS // self.streams
        offsets = [stream * part + i * VECTOR for stream in range(self.streams) for i in range(each)]
        return [self.piece // 4 // PASS, PASS // self.streams, self.ahead // 4, *offsets]


WAYS = [Way(streams, piece, ahead) for streams in STREAMS for piece in PIECES for ahead in AHEAD]


class Reader:
    """Memory that is read again and again by `threads` threads. Raises ParameterError."""

    def __init__(
        self, threads: int, size: int = BYTES, *, progress: Progress = silent, clock: Clock = time.perf_counter
    ) -> None:
        whole("threads", threads, 1, MAX_THREADS)
        compile_in_child(__name__, "reading", progress)
        self.bytes = size // max(PIECES) * max(PIECES)
        self._numbers = new_arena(self.bytes).view(np.int32)
        self._numbers[:] = 1  # memory nobody has written to is one shared page of zeros, which a cache would hold
        self._sums = np.zeros(threads * LINE, np.int64)
        self._way = np.zeros(3 + VECTORS, np.int64)
        self._program = Program(read_all, (self._numbers, self._way, self._sums), threads)
        self._clock = clock
        self.way = WAYS[0]

    def seconds(self) -> float:
        """Of reading all of it once, in the current way."""
        self._way[:] = self.way.numbers()
        began = self._clock()
        team().run(self._program)
        return self._clock() - began

    def sum(self) -> int:
        """Of the numbers that the last run read: one for each 4 bytes, if it has read each once."""
        return int(self._sums.sum())

    def tune(self, runs: int = 2, progress: Progress = silent) -> dict[Way, float]:
        """Try all ways and keep the fastest; bytes per second of each, from its fastest run."""
        rates: dict[Way, float] = {}
        for done, way in enumerate(WAYS):
            progress("measuring memory", done, len(WAYS), "ways")
            self.way = way
            rates[way] = self.bytes / min(self.seconds() for _ in range(runs))
        progress("measuring memory", len(WAYS), len(WAYS), "ways")
        self.way = max(rates, key=rates.__getitem__)
        return rates

    def close(self) -> None:
        """Let go of the memory."""
        team().forget(self._program)


@inlined
@kernel
def ask(numbers, at, a, b, c, d):
    """Prefetch four cache lines."""
    prefetch(numbers, at + a)
    prefetch(numbers, at + b)
    prefetch(numbers, at + c)
    prefetch(numbers, at + d)


@inlined
@kernel
def plus_four(sums, numbers, at, a, b, c, d):
    """Four sums, with a vector added to each."""
    first, second = sums[0] + load(i32x8, numbers, at + a), sums[1] + load(i32x8, numbers, at + b)
    return first, second, sums[2] + load(i32x8, numbers, at + c), sums[3] + load(i32x8, numbers, at + d)


@kernel
def read_all(tid, n, sync, numbers, way, sums):
    """Add up all numbers: a pass takes eight vectors, from `Way.streams` places."""
    passes, step, ahead = way[0], way[1], way[2]
    a, b, c, d, e, f, g, h = way[3], way[4], way[5], way[6], way[7], way[8], way[9], way[10]
    none = splat(i32x8, 0)
    low = high = (none, none, none, none)
    first = claim(sync, 0, passes * PASS)
    while first < numbers.size:
        i = first
        for _ in range(passes):
            if ahead:
                ask(numbers, i + ahead, a, c, e, g)
                if step < LINE:  # eight streams
                    ask(numbers, i + ahead, b, d, f, h)
            low, high = plus_four(low, numbers, i, a, b, c, d), plus_four(high, numbers, i, e, f, g, h)
            i += step
        first = claim(sync, 0, passes * PASS)
    sums[tid * LINE] = sum_lanes(low[0] + low[1] + low[2] + low[3] + high[0] + high[1] + high[2] + high[3])
    barrier(sync, n)


def warm(spec: str) -> None:
    """Compile it (called by `compile_in_child`)."""
    Program(read_all, (np.zeros(1, np.int32), np.zeros(3 + VECTORS, np.int64), np.zeros(LINE, np.int64)), 1).compile()
