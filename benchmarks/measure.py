"""Let the engines take turns at one point after the other, and keep what each round gave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks.workers import WorkerError
from qkv.measure.speed import KINDS, Point, in_order
from qkv.progress import Progress, silent

SETTLE_SECONDS = 0.06
"""Pause between turns: engines let their threads spin for some milliseconds after a step (qkv's for 20)."""

STRANGERS = 0.05
"""Cores that other programs may use during a round; if they use more, it is measured again."""


class Asked(Protocol):
    """What of a `workers.Worker` is used here; tests have scripted ones."""

    @property
    def name(self) -> str: ...

    def ask(self, do: str, **order: Any) -> dict[str, Any]: ...

    def cpu_seconds(self) -> float: ...


@dataclass
class Contestant:
    """An engine at one of its settings, and what it did at a point."""

    engine: str
    variant: str
    cache: str
    worker: Asked
    rates: list[float] = field(default_factory=list)  # tokens per second, one a round
    failure: str | None = None

    @property
    def rate(self) -> float:
        return median(self.rates)


@dataclass
class Company:
    """Who else used the processor while someone was timed, in seconds."""

    timed: float = 0.0
    waiting: float = 0.0  # processor time of the engines that had to wait
    strangers: float = 0.0  # processor time of other programs, and what a hypervisor took

    def __iadd__(self, other: Company) -> Company:
        self.timed += other.timed
        self.waiting += other.waiting
        self.strangers += other.strangers
        return self

    def share(self, seconds: float) -> float:
        """In cores."""
        return max(0.0, seconds) / self.timed if self.timed else 0.0


@dataclass
class Result:
    """A point: everyone's rates, the read bandwidth of the same rounds in bytes per second, and who disturbed them."""

    point: Point
    contestants: list[Contestant]
    reads: list[float] = field(default_factory=list)
    company: Company = field(default_factory=Company)


@dataclass(frozen=True)
class Memory:
    """The worker that reads memory, and how many bytes it reads in a turn."""

    worker: Asked
    bytes: float


def busy_seconds() -> float:
    """Processor time that all programs have used, and that a hypervisor has taken; 0 where that cannot be told."""
    try:
        with Path("/proc/stat").open() as lines:
            fields = [int(text) for text in lines.readline().split()[1:]]
    except OSError:
        return 0.0
    idle = fields[3] + fields[4]
    guests = sum(fields[8:10])  # counted as user time already
    return (sum(fields) - idle - guests) / os.sysconf("SC_CLK_TCK")


class Rounds:
    """Measures points with workers that have been opened; `said` is what they answered then."""

    def __init__(
        self,
        workers: Sequence[Asked],
        said: dict[str, dict[str, Any]],
        rounds: int,
        *,
        memory: Memory | None = None,
        busy: Callable[[], float] | None = None,
        settle: float | None = None,
    ) -> None:
        self._workers, self._said, self._rounds = workers, said, rounds
        self._memory, self._busy = memory, busy or busy_seconds
        self._settle = SETTLE_SECONDS if settle is None else settle
        self._everyone = [*workers, *([memory.worker] if memory else [])]

    def measure(self, points: list[Point], progress: Progress = silent, what: str = "measuring") -> Iterator[Result]:
        """One point after the other."""
        points = in_order(points)
        for done, point in enumerate(points):
            progress(f"{what} {point}", done, len(points), "points")
            yield self._point(point)
        progress(what, len(points), len(points), "points")

    def _point(self, point: Point) -> Result:
        result = Result(point, self._contestants(point))
        for one in result.contestants:
            try:
                one.worker.ask("prepare", variant=one.variant, kind=point.kind, n=point.n)
            except WorkerError as error:
                one.failure = str(error)
        spare = self._rounds  # how many disturbed rounds may be measured again
        turn = 0
        while turn < self._rounds:
            company, rates, read = self._round(result.contestants, point, backwards=turn % 2 == 1)
            if spare and company.share(company.strangers) > STRANGERS:
                spare -= 1
                continue
            turn += 1
            result.company += company
            for one, rate in rates:
                one.rates.append(rate)
            if read is not None:
                result.reads.append(read)
        return result

    def _contestants(self, point: Point) -> list[Contestant]:
        return [
            Contestant(worker.name, variant, cache, worker)
            for worker in self._workers
            for variant, cache in self._said[worker.name]["variants"].items()
            if point.kind in self._said[worker.name].get("kinds", KINDS)
            # A prompt reads too little of the cache for its kind to matter, and takes the longest to measure.
            and (cache == "f16" or point.kind != "prefill")
        ]

    def _round(
        self, contestants: list[Contestant], point: Point, backwards: bool
    ) -> tuple[Company, list[tuple[Contestant, float]], float | None]:
        """A burst of everyone. Every other round goes backwards, so that nobody always follows the same neighbour."""
        company, rates, read = Company(), [], None
        if self._memory is not None:
            read = self._memory.bytes / self._burst(self._memory.worker, company)
        order = {"kind": point.kind, "n": point.n, "steps": point.steps}
        for one in reversed(contestants) if backwards else contestants:
            if one.failure is None:
                try:
                    seconds = self._burst(one.worker, company, variant=one.variant, **order)
                    rates.append((one, point.tokens * point.steps / seconds))
                except WorkerError as error:
                    one.failure = str(error)
        return company, rates, read

    def _burst(self, worker: Asked, company: Company, **order: Any) -> float:
        """Seconds of one burst. Adds to `company` who else was busy meanwhile."""
        time.sleep(self._settle)
        others = [other for other in self._everyone if other is not worker]
        began, busy = time.perf_counter(), self._busy()
        own, waiting = worker.cpu_seconds(), sum(other.cpu_seconds() for other in others)
        reply = worker.ask("burst", **order)
        own, waiting = worker.cpu_seconds() - own, sum(other.cpu_seconds() for other in others) - waiting
        strangers = self._busy() - busy - own - waiting
        company += Company(time.perf_counter() - began, waiting, strangers)
        return float(reply["seconds"])


def opened(
    workers: Iterable[Asked], model: str, threads: int, points: list[Point], failures: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Have every engine load the model; what each said, by name. Who cannot is named in `failures`."""
    order = {"model": model, "threads": threads, "points": [str(point) for point in points]}
    replies = {}
    for worker in workers:
        try:
            said = worker.ask("describe")
            said |= worker.ask("open", **order)
            replies[worker.name] = said
        except WorkerError as error:
            failures[worker.name] = str(error)
    return replies


def best(contestants: Iterable[Contestant], engine: str, caches: set[str] | None) -> Contestant | None:
    """The fastest setting of an engine with one of these kinds of cache (None: any)."""
    able = [
        one
        for one in contestants
        if one.engine == engine and one.rates and one.failure is None and (caches is None or one.cache in caches)
    ]
    return max(able, key=lambda one: one.rate, default=None)
