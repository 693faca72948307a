"""Let the engines take turns at one point after the other, and keep what each round gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

from benchmarks.points import Point, in_order
from benchmarks.workers import WorkerError
from qkv.progress import Progress, silent

SETTLE_SECONDS = 0.06
"""Pause between turns: engines let their threads spin for some milliseconds after a step (qkv's for 20)."""

HEADROOM = 64
"""Positions behind a point's depth, for the steps of a burst."""


class Asked(Protocol):
    """What of a `workers.Worker` is used here; tests have scripted ones."""

    name: str

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
class Idleness:
    """How much processor time the engines that had to wait took meanwhile."""

    waited: float = 0.0  # seconds during which someone else was timed
    used: float = 0.0  # processor seconds of those who waited

    @property
    def share(self) -> float:
        return self.used / self.waited if self.waited else 0.0


@dataclass
class Result:
    """A point: everyone's rates, and the read bandwidth of the same rounds in bytes per second."""

    point: Point
    contestants: list[Contestant]
    reads: list[float] = field(default_factory=list)


def opened(
    workers: Iterable[Asked], model: str, threads: int, points: list[Point], failures: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Have every engine load the model; what each said, by name. Who cannot is named in `failures`."""
    depth = max((point.positions for point in points), default=1) + HEADROOM
    sequences = max((point.n for point in points if point.kind == "batch"), default=1)
    replies = {}
    for worker in workers:
        try:
            said = worker.ask("describe")
            said |= worker.ask("open", model=model, threads=threads, context=depth, sequences=sequences)
            replies[worker.name] = said
        except WorkerError as error:
            failures[worker.name] = str(error)
    return replies


def results(
    workers: list[Asked],
    said: dict[str, dict[str, Any]],
    points: list[Point],
    rounds: int,
    *,
    reader: Asked | None = None,
    idleness: Idleness | None = None,
    progress: Progress = silent,
    what: str = "measuring",
) -> Iterator[Result]:
    """Measure one point after the other; `said` is what the workers answered to "describe" and "open"."""
    idleness = idleness or Idleness()
    points = in_order(points)
    for done, point in enumerate(points):
        progress(f"{what} {point}", done, len(points), "points")
        contestants = [
            Contestant(worker.name, variant, cache, worker)
            for worker in workers
            for variant, cache in said[worker.name]["variants"].items()
            if point.kind in said[worker.name].get("kinds", (point.kind,))
        ]
        result = Result(point, contestants)
        for one in contestants:
            _try(one, partial(one.worker.ask, "prepare", variant=one.variant, kind=point.kind, n=point.n))
        for turn in range(rounds):
            if reader is not None:
                result.reads.append(_read(reader, workers, idleness))
            alive = [one for one in contestants if one.failure is None]
            # Every other round goes the other way, so that nobody always follows the same neighbour.
            for one in alive if turn % 2 == 0 else reversed(alive):
                _try(one, partial(_burst, one, point, workers, idleness))
        yield result
    progress(what, len(points), len(points), "points")


def _try(one: Contestant, work: Callable[[], object]) -> None:
    try:
        work()
    except WorkerError as error:
        one.failure = str(error)


def _burst(one: Contestant, point: Point, workers: list[Asked], idleness: Idleness) -> None:
    """Note the tokens per second of one burst."""
    order = {"variant": one.variant, "kind": point.kind, "n": point.n, "steps": point.steps}
    seconds = _watched(one.worker, order, workers, idleness)["seconds"]
    one.rates.append(point.tokens * point.steps / float(seconds))


def _read(reader: Asked, workers: list[Asked], idleness: Idleness) -> float:
    reply = _watched(reader, {}, workers, idleness)
    return float(reply["bytes"]) / float(reply["seconds"])


def _watched(worker: Asked, order: dict[str, Any], workers: list[Asked], idleness: Idleness) -> dict[str, Any]:
    """Give one worker its turn, and see that the others rest."""
    time.sleep(SETTLE_SECONDS)
    others = [other for other in workers if other is not worker]
    before, began = sum(other.cpu_seconds() for other in others), time.perf_counter()
    reply = worker.ask("burst", **order)
    idleness.waited += time.perf_counter() - began
    idleness.used += sum(other.cpu_seconds() for other in others) - before
    return reply


def best(contestants: Iterable[Contestant], engine: str, caches: set[str] | None) -> Contestant | None:
    """The fastest setting of an engine with one of these kinds of cache (None: any)."""
    able = [
        one
        for one in contestants
        if one.engine == engine and one.rates and one.failure is None and (caches is None or one.cache in caches)
    ]
    return max(able, key=lambda one: one.rate, default=None)
