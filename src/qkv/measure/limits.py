# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The limits of this machine, measured: bytes from memory and operations on numbers in registers, in a second."""

from __future__ import annotations

import time

import numpy as np

from qkv.kernels.memory import load, store
from qkv.kernels.simd import dot_nibbles, fma, splat
from qkv.kernels.values import f32x8, i8x32, i32x8, u8x32
from qkv.measure.bandwidth import Clock, Reader
from qkv.model.cost import Limits
from qkv.progress import Progress, silent
from qkv.runtime.jit import inlined, kernel
from qkv.runtime.spmd import barrier
from qkv.runtime.team import Program, team
from qkv.runtime.warmup import compile_in_child

CHAINS = 12  # independent sums, so that no multiply-add waits for another: latency 4-5, two a cycle
ROUNDS = 1 << 20
MOMENT = 0.1  # seconds of runs: several times as long as another program may take a core away


def measure_limits(threads: int, progress: Progress = silent, clock: Clock = time.perf_counter) -> Limits:
    """The best of many runs of each, on `threads` threads. Takes two seconds and 0.5 GB. Raises ParameterError."""
    reader = Reader(threads, progress=progress, clock=clock)
    compile_in_child(__name__, "limits", progress)
    sums = np.zeros(threads * 32, np.float32)
    codes = np.arange(32 * CHAINS, dtype=np.uint8)
    reading = max(reader.tune(progress=progress).values())
    reader.close()
    counting = fastest(Program(multiply_add, (ROUNDS, sums), threads), clock, MOMENT)
    counting_bytes = fastest(Program(multiply_bytes, (ROUNDS, codes, sums.view(np.int32)), threads), clock, MOMENT)
    operations = 2 * threads * ROUNDS * CHAINS
    return Limits(reading, 8 * operations / counting, 32 * operations / counting_bytes)


@inlined
@kernel
def six_sums(a, x, y):
    """Each of six sums times x, plus y."""
    return fma(a[0], x, y), fma(a[1], x, y), fma(a[2], x, y), fma(a[3], x, y), fma(a[4], x, y), fma(a[5], x, y)


@inlined
@kernel
def added(a, b):
    """Two times six sums, added up."""
    low = ((a[0] + a[1]) + (a[2] + a[3])) + (a[4] + a[5])
    return low + (((b[0] + b[1]) + (b[2] + b[3])) + (b[4] + b[5]))


@kernel
def multiply_add(tid, n, sync, rounds, sums):
    """`CHAINS` vectors of eight numbers, each multiplied and added to `rounds` times in registers."""
    x, y = splat(f32x8, 0.5), splat(f32x8, 1)
    v, w = splat(f32x8, tid), splat(f32x8, 1 + tid)
    a, b = (v, v, v, v, v, v), (w, w, w, w, w, w)
    for _ in range(rounds):
        a, b = six_sums(a, x, y), six_sums(b, x, y)
    store(sums, tid * 32, added(a, b))
    barrier(sync, n)


@inlined
@kernel
def six_dots(a, q, codes, at):
    """Each of six sums, with the products of q and 32 bytes of its own added."""
    a0, a1 = dot_nibbles(a[0], q, load(i8x32, codes, at)), dot_nibbles(a[1], q, load(i8x32, codes, at + 32))
    a2, a3 = dot_nibbles(a[2], q, load(i8x32, codes, at + 64)), dot_nibbles(a[3], q, load(i8x32, codes, at + 96))
    a4, a5 = dot_nibbles(a[4], q, load(i8x32, codes, at + 128)), dot_nibbles(a[5], q, load(i8x32, codes, at + 160))
    return a0, a1, a2, a3, a4, a5


@kernel
def multiply_bytes(tid, n, sync, rounds, codes, sums):
    """`CHAINS` vectors of eight sums, to each of which 32 products of bytes are added `rounds` times."""
    v = splat(i32x8, tid)
    a = b = (v, v, v, v, v, v)
    for i in range(rounds):
        q = load(u8x32, codes, 32 * (i & 7))
        a, b = six_dots(a, q, codes, 0), six_dots(b, q, codes, 192)
    store(sums, tid * 32, added(a, b))
    barrier(sync, n)


def fastest(program: Program, clock: Clock, moment: float) -> float:
    """Seconds of the fastest of as many runs as fill `moment` seconds, at least one; the first run does not count."""
    team().run(program)
    times: list[float] = []
    while sum(times) < moment:
        began = clock()
        team().run(program)
        times.append(clock() - began)
    return min(times)


def warm(spec: str) -> None:
    """Compile both (called by `compile_in_child`)."""
    sums = np.zeros(32, np.float32)
    Program(multiply_add, (1, sums), 1).compile()
    Program(multiply_bytes, (1, np.zeros(1, np.uint8), sums.view(np.int32)), 1).compile()
