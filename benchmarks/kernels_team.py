"""What the team costs: a barrier, and a step from `run` to `run`.

    python benchmarks/kernels_team.py [--threads 1,2,4]

Prints a table and one JSON line. Medians; look at them only on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import numpy as np

from qkv.runtime.cores import available_cores
from qkv.runtime.jit import kernel
from qkv.runtime.spmd import barrier, claim
from qkv.runtime.team import Program, team


@kernel
def barriers(tid, n, sync, command):
    """command[0] barriers."""
    for _ in range(command[0]):
        barrier(sync, n)


@kernel
def claims(tid, n, sync, command):
    """All threads together claim command[0] items, one by one."""
    while claim(sync, 0, 1) < command[0]:
        pass
    barrier(sync, n)


def seconds(program: Program, repeats: int) -> float:
    """Median time of one run."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        team().run(program)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def alternating(programs: list[Program], repeats: int) -> float:
    """Time per step when two Python threads use two programs at once."""
    users = [threading.Thread(target=lambda p=p: [team().run(p) for _ in range(repeats)]) for p in programs]
    began = time.perf_counter()
    for user in users:
        user.start()
    for user in users:
        user.join()
    return (time.perf_counter() - began) / (len(programs) * repeats)


def after_idle(program: Program) -> float:
    """Median time of a run whose workers have parked."""
    times = []
    for _ in range(20):
        time.sleep(0.05)
        times.append(seconds(program, 1))
    return statistics.median(times)


def measure(threads: int) -> dict[str, float]:
    command = np.array([0])
    program = Program(barriers, (command,), threads)
    team().run(program)
    empty = seconds(program, 2000)
    many = 20_000 if threads <= available_cores() else 500
    command[0] = many
    one_barrier = (seconds(program, 5) - empty) / many
    claiming = Program(claims, (command,), threads)
    team().run(claiming)
    one_claim = (seconds(claiming, 5) - empty) / many
    command[0] = 0
    switched = alternating([program, Program(barriers, (command,), threads)], 500)
    figures = {"barrier": one_barrier, "claim": one_claim, "step": empty, "step after idle": after_idle(program)}
    figures["step of two models in turn"] = switched
    return {name: round(value * 1e6, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = available_cores()
    default = ",".join(str(n) for n in dict.fromkeys([1, cores, 4 * cores]))
    parser.add_argument("--threads", default=default, help=f"comma-separated counts (default {default})")
    counts = [int(count) for count in parser.parse_args().threads.split(",")]
    results = {count: measure(count) for count in counts}
    print(f"microseconds, {cores} cores")
    for name in results[counts[0]]:
        print(f"  {name:28}" + "".join(f"{results[count][name]:12.3f}" for count in counts))
    print(f"  {'threads':28}" + "".join(f"{count:12}" for count in counts))
    print(json.dumps({"benchmark": "kernels_team", "cores": cores, "microseconds": results}))


if __name__ == "__main__":
    main()
