"""How fast the matrix products are, alone: from the cache, from memory, and for many tokens at a time.

    python benchmarks/kernels_matmul.py [--threads 2] [--formats int4 int8]

Prints a table, then one JSON line. Times are the best of several runs; trust them on an idle machine only. `of read` is
the bandwidth as a fraction of that of summing a large array with the same threads.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable

import numpy as np

from qkv.kernels import formats, packing, sizes
from qkv.kernels.isa import ISA, MODE
from qkv.kernels.matmul import Inputs, Outputs, matmul_for, quantize_groups
from qkv.kernels.memory import load
from qkv.kernels.panels import panel_size
from qkv.kernels.simd import splat, sum_lanes
from qkv.kernels.tiles import INFO
from qkv.kernels.values import i32x8
from qkv.runtime.jit import kernel

# rows, columns, tokens: what it shows. Starting threads takes longer than the first case, so one thread does that.
FROM_CACHE = "one token, cache, 1 thread"
CASES = [
    (262144, 1024, 8, "8 tokens, from memory"),
    (3072, 1024, 8, "8 tokens"),
    (1024, 1024, 1, FROM_CACHE),
    (262144, 1024, 1, "one token, from memory"),
    (262144, 1024, 4, "four tokens, from memory"),
    (3072, 1024, 16, "16 tokens"),
    (3072, 1024, 128, "128 tokens"),
    (1024, 3072, 512, "512 tokens"),
]


@kernel
def read(array, first, end):
    """The sum of int32 array[first:end] with four streams of loads."""
    quarter = (end - first) // 4
    a = b = c = d = splat(i32x8, 0)
    for i in range(first, first + quarter, 8):
        a += load(i32x8, array, i)
        b += load(i32x8, array, i + quarter)
        c += load(i32x8, array, i + 2 * quarter)
        d += load(i32x8, array, i + 3 * quarter)
    return sum_lanes(a + b + c + d)


def best_seconds(work: Callable[[int, int], object], threads: int, repeats: int) -> float:
    """The shortest time in which `threads` threads did work(tid, threads)."""
    best = np.inf
    for _ in range(repeats):
        others = [threading.Thread(target=work, args=(tid, threads)) for tid in range(1, threads)]
        start = time.perf_counter()
        for thread in others:
            thread.start()
        work(0, threads)
        for thread in others:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth(threads: int) -> float:
    """GB/s."""
    array = formats.new_arena(400 << 20).view(np.int32)
    array[:] = 1
    part = array.size // threads // 32 * 32
    return array.nbytes / best_seconds(lambda tid, n: read(array, tid * part, (tid + 1) * part), threads, 7) / 1e9


def measure(fmt: str, rows: int, columns: int, tokens: int, threads: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    arena = formats.new_arena(sizes.packed_bytes(fmt, rows, columns))
    matrix = formats.place(fmt, rows, columns)
    some = rng.normal(size=(256, columns)).astype(np.float32)
    for first in range(0, rows, len(some)):
        packing.pack(arena, matrix, first, some)
    x = rng.normal(size=tokens * columns).astype(np.float32)
    groups = x.size // sizes.GROUP
    xq, xs, xinfo = np.zeros(x.size, np.int8), np.zeros(groups, np.float32), np.zeros(INFO * groups, np.int32)
    quantize_groups(x, 0, xq, xs, xinfo, 0, groups)
    out = np.zeros(tokens * rows, np.float32)
    matmul = matmul_for((fmt,))
    scratch = [formats.new_arena(4 * panel_size(columns)).view(np.float32) for _ in range(threads)]
    inputs, outputs = Inputs(x, 0, xq, xs, xinfo, tokens), Outputs(out, 0, rows)
    blocks = int(matrix["blocks"])

    def work(tid: int, n: int) -> None:
        first, end = blocks * tid // n, blocks * (tid + 1) // n
        matmul(arena, matrix, inputs, outputs, first, end, 0, scratch[tid], 0)

    work(0, 1)  # compiles
    seconds = best_seconds(work, threads, 200 if rows * columns * tokens < 1 << 22 else 7)
    weights = rows * columns
    return {
        "us": seconds * 1e6,
        "gb_s": arena.size / seconds / 1e9,
        "g_weights_s": weights / seconds / 1e9,
        "gops": 2 * weights * tokens / seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", choices=sizes.FORMATS, default=["int4", "int8", "bf16"])
    options = parser.parse_args()
    bandwidth = read_bandwidth(options.threads)
    print(f"{options.threads} threads, {ISA.name}, mode {MODE}; a plain read loop gets {bandwidth:.1f} GB/s\n")
    print(f"{'format':7}{'case':28}{'µs':>10}{'GB/s':>8}{'of read':>9}{'G weights/s':>13}{'GOPS':>8}")
    results = []
    for fmt in options.formats:
        for rows, columns, tokens, case in CASES:
            got = measure(fmt, rows, columns, tokens, 1 if case == FROM_CACHE else options.threads)
            fraction = got["gb_s"] / bandwidth
            print(
                f"{fmt:7}{case:28}{got['us']:10.0f}{got['gb_s']:8.1f}{fraction:9.2f}"
                f"{got['g_weights_s']:13.1f}{got['gops']:8.0f}",
                flush=True,
            )
            results.append({"format": fmt, "case": case, "rows": rows, "columns": columns, "tokens": tokens, **got})
    print()
    summary = {"benchmark": "kernels_matmul", "threads": options.threads, "path": ISA.name, "read_gb_s": bandwidth}
    print(json.dumps({**summary, "results": [{k: _short(v) for k, v in each.items()} for each in results]}))


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
