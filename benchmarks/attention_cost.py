"""Attention alone against T: seconds of one layer for a prompt of T tokens and for one token at T, and their exponents.

    python benchmarks/attention_cost.py [--model Qwen/Qwen3-0.6B] [--threads 2] [--rounds 20] [--cpu-time]

The textbook says T² and T. Prints a table and one JSON line; look at it only on a quiet machine, or with --cpu-time,
which is one thread and does not count the time that other programs get.
"""

from __future__ import annotations

import argparse
import json
import time

from qkv.explain import attention_cost
from qkv.measure import attention_timing
from qkv.model.config import PRESETS
from qkv.runtime.cores import available_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", choices=PRESETS, help="whose heads")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=20, help="how often each length is measured")
    parser.add_argument("--cpu-time", action="store_true", help="measure one thread's own time")
    options = parser.parse_args()
    threads, clock = (1, time.thread_time) if options.cpu_time else (options.threads, time.perf_counter)
    attention_timing.ROUNDS = options.rounds
    result = attention_cost.compute(PRESETS[options.model], threads, clock=clock)
    print(attention_cost.report(result, options.model, 100))
    phases = {
        phase.name: {
            "exponent": round(phase.exponent, 3),
            "seconds": dict(zip(phase.lengths, phase.seconds, strict=True)),
            "executed": dict(zip(phase.lengths, phase.executed, strict=True)),
        }
        for phase in (result.prefill, result.decode)
    }
    limits = {"bytes": result.limits.bytes_per_second, "flop": result.limits.flop_per_second}
    summary = {"benchmark": "attention_cost", "model": options.model, "threads": threads, "cpu_time": options.cpu_time}
    print(json.dumps({**summary, "limits_per_second": limits, **phases}))


if __name__ == "__main__":
    main()
