"""How fast this machine reads memory: every way that is tried, and the best.

    python -m benchmarks.bandwidth [--threads 1 2] [--megabytes 512] [--runs 5]

The measurement itself is `qkv.measure.bandwidth`, which `qkv bench` and `qkv cost` use too. Prints a table for each
number of threads and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from qkv.cli.bars import Bars
from qkv.explain.charts import table
from qkv.measure.bandwidth import AHEAD, PIECES, STREAMS, Reader, Way
from qkv.runtime.cores import available_cores
from qkv.runtime.team import MAX_THREADS


def measure(threads: int, size: int, runs: int, bars: Bars) -> dict[str, Any]:
    """Print every way for that many threads; what is worth keeping."""
    reader = Reader(threads, size, progress=bars)
    rates = reader.tune(runs, bars)
    print(f"\n{threads} {'thread' if threads == 1 else 'threads'}, GB/s, {reader.bytes >> 20} MB read")
    rows = [["streams", "piece"] + [f"{ahead} ahead" if ahead else "none asked" for ahead in AHEAD]]
    for streams in STREAMS:
        for piece in PIECES:
            values = [rates[Way(streams, piece, ahead)] / 1e9 for ahead in AHEAD]
            rows.append([str(streams), f"{piece >> 10} kB"] + [f"{value:.1f}" for value in values])
    print(table(rows, left=0), end="")
    again = median(reader.bytes / reader.seconds() for _ in range(4 * runs))
    reader.close()
    return {"threads": threads, "best_gb_per_s": max(rates.values()) / 1e9, "way": reader.way, "median": again / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=range(1, available_cores() + 1), metavar="N")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5, help="of each way; the fastest counts (default 5)")
    options = parser.parse_args()
    if not all(1 <= threads <= MAX_THREADS for threads in options.threads):
        parser.error(f"--threads must be from 1 to {MAX_THREADS}")
    if not 1 <= options.megabytes <= 1 << 20 or not 1 <= options.runs <= 1000:
        parser.error("--megabytes must be from 1 to 1048576, --runs from 1 to 1000")
    with Bars() as bars:
        results = [measure(threads, options.megabytes << 20, options.runs, bars) for threads in options.threads]
    print(json.dumps({"benchmark": "bandwidth", "megabytes": options.megabytes, "results": results}))


if __name__ == "__main__":
    main()
