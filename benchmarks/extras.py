"""What is not speed at a point: starting, time outside the compiled code, and the code for processors without AVX2."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Rounds, best, opened
from benchmarks.workers import Launch, Worker, WorkerError
from qkv.measure.speed import Point

HOME = Launch("qkv", sys.executable, "benchmarks.worker_qkv")
PORTABLE = Launch("qkv, portable", sys.executable, "benchmarks.worker_qkv", {"QKV_SIMD": "portable"})
PROMPT = 128
OVERHEAD_STEPS = 200
OVERHEAD_BAR = 0.3e-3  # seconds a step
PORTABLE_BARS = {Point("decode", 128): 3.0, Point("prefill", 512): 6.0}  # times as long as the usual code, at most

Start = Callable[[Launch], Worker]


@dataclass
class Check:
    """A number that has to be at most `most`."""

    name: str
    value: float
    most: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value <= self.most

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": float(f"{self.value:.4g}"), "most": self.most, "met": self.met}

    def line(self) -> str:
        return f"{self.name}: {self.value:.3g}{self.unit}, at most {self.most:g}{self.unit}: " + (
            "met" if self.met else "NOT MET"
        )


@dataclass
class Starting:
    """From nothing to a first token, medians: seconds and bytes."""

    engine: str
    load: float  # the file, in the system's cache, to weights ready to compute
    first: float  # starting the process to the first token after a prompt of 128
    peak: int | None  # memory of the process, file pages included

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "load_s": round(self.load, 3),
            "first_token_s": round(self.first, 3),
            "peak_bytes": self.peak,
        }


def starting(
    launches: Sequence[Launch], model: Path, threads: int, rounds: int, start: Start = Worker
) -> tuple[list[Starting], dict[str, str]]:
    """Start each engine several times, taking turns; and who could not, with the reason."""
    seen: dict[str, list[tuple[float, float, int | None]]] = {launch.name: [] for launch in launches}
    failures: dict[str, str] = {}
    for _ in range(rounds):
        for launch in launches:
            if launch.name not in failures:
                try:
                    seen[launch.name].append(_start(launch, model, threads, start))
                except WorkerError as error:
                    failures[launch.name] = str(error)
    rows = []
    for name, times in seen.items():
        if name not in failures:
            loads, firsts, peaks = zip(*times, strict=True)
            known = [peak for peak in peaks if peak is not None]
            rows.append(Starting(name, median(loads), median(firsts), round(median(known)) if known else None))
    return rows, failures


def _start(launch: Launch, model: Path, threads: int, start: Start) -> tuple[float, float, int | None]:
    began = time.perf_counter()
    with closing(start(launch)) as worker:
        said = worker.ask("open", model=str(model), threads=threads, points=[f"prefill:{PROMPT}"])
        worker.ask("first", n=PROMPT)
        return float(said["load_seconds"]), time.perf_counter() - began, worker.ask("memory")["peak_bytes"]


def overhead(model: Path, threads: int, start: Start = Worker) -> Check:
    """What a greedy decode step of the engine takes outside the compiled code. Raises WorkerError."""
    with closing(start(HOME)) as worker:
        worker.ask("open", model=str(model), threads=threads, points=["decode:512"])
        outside = float(worker.ask("overhead", steps=OVERHEAD_STEPS)["outside"])
    return Check("a step outside the compiled code", outside * 1e3, OVERHEAD_BAR * 1e3, " ms")


def portable(model: Path, threads: int, rounds: int, start: Start = Worker) -> list[Check]:
    """How many times as long the code without AVX2 takes. Raises WorkerError."""
    points, failures = list(PORTABLE_BARS), dict[str, str]()
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(start(launch))) for launch in (HOME, PORTABLE)]
        said = opened(workers, str(model), threads, points, failures)
        if failures:
            raise WorkerError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
        for one in said.values():
            one["variants"] = {"f16": "f16"}
        checks = []
        for result in Rounds(workers, said, rounds).measure(points):
            usual, slow = (best(result.contestants, launch.name, None) for launch in (HOME, PORTABLE))
            if usual is None or slow is None:
                raise WorkerError("; ".join(f"{one.engine}: {one.failure}" for one in result.contestants))
            name = f"portable code against {said[HOME.name]['build']}, {result.point}"
            checks.append(Check(name, usual.rate / slow.rate, PORTABLE_BARS[result.point], "×"))
    return checks
