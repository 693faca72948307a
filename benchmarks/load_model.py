"""How long a model takes from its files to packed weights, and how much memory that takes at its peak.

    python benchmarks/load_model.py [MODEL ...] [--weights int8] [--threads 2] [--repeats 3]

MODEL is a file, a folder or a name of a model that is on this machine (default: smollm2). Each load is a process of its
own, with kernels compiled and the files in the system's cache. Prints a table and one JSON line: the best time, the
processor time of all threads, and the peak of the process's memory, its file pages included, with what it was before
loading taken off. `bound` is the larger of the files and the packed weights, plus 300 MB. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qkv.runtime.cores import available_cores

MB = 1e6


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")
    return int(found[1]) << 10


def load_once(path: str, weights: str | None, threads: int) -> dict[str, Any]:
    from qkv.kernels.packing import compile_all
    from qkv.weights.checkpoint import open_checkpoint
    from qkv.weights.load import load_weights

    compile_all()
    before, cpu, started = memory("VmRSS"), time.process_time(), time.perf_counter()
    checkpoint = open_checkpoint(Path(path))
    opened = time.perf_counter()
    packed = load_weights(checkpoint.config, checkpoint.tensors, wanted=weights, threads=threads)
    ended = time.perf_counter()
    files = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
    return {
        "open_seconds": opened - started,
        "seconds": ended - started,
        "cpu_seconds": time.process_time() - cpu,
        "files_mb": files / MB,
        "packed_mb": packed.arena.nbytes / MB,
        "peak_mb": (memory("VmHWM") - before) / MB,
        "bound_mb": max(files, packed.arena.nbytes) / MB + 300,
    }


def measured(path: str, weights: str | None, threads: int, repeats: int) -> dict[str, Any]:
    """The best of several loads, each in its own process."""
    command = [sys.executable, __file__, "--one", path, "--threads", str(threads)]
    command += ["--weights", weights] if weights else []
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(repeats + 1)]
    return min(runs[1:], key=lambda run: float(run["seconds"]))  # the first one fills the caches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--weights")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(load_once(options.one, options.weights, options.threads)))
        return
    from qkv.weights.names import find

    results = {}
    print(f"{'model':40} {'s':>6} {'CPU s':>6} {'files MB':>9} {'packed MB':>9} {'peak MB':>8} {'bound MB':>8}")
    for model in options.models:
        path = find(model)
        if path is None:
            raise SystemExit(f"{model} is not on this machine; fetch it: qkv pull {model}")
        run = results[model] = measured(str(path), options.weights, options.threads, options.repeats)
        print(
            f"{model[-40:]:40} {run['seconds']:6.2f} {run['cpu_seconds']:6.2f} {run['files_mb']:9.0f} "
            f"{run['packed_mb']:9.0f} {run['peak_mb']:8.0f} {run['bound_mb']:8.0f}"
        )
    print(json.dumps({"benchmark": "load_model", "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
