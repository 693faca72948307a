"""Engines whose every time is written down beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from benchmarks.workers import WorkerError

Order = tuple[str, str, str]


class Scripted:
    """Answers like a worker. `seconds`: of each burst, by variant; an exception is raised at its turn."""

    def __init__(
        self,
        name: str,
        variants: dict[str, str],
        seconds: dict[str, Sequence[float | BaseException]],
        log: list[Order] | None = None,
        said: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.log: list[Order] = [] if log is None else log
        self.cpu = 0.0
        self.closed = False
        self._variants = variants
        self._seconds: dict[str, Iterator[float | BaseException]] = {
            variant: iter(repeat(times[0]) if len(times) == 1 else times) for variant, times in seconds.items()
        }
        self._said = said or {}

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        variant = order.get("variant", "")
        self.log.append((self.name, do, variant))
        if do == "describe":
            return {"version": "1", "variants": dict(self._variants), **self._said}
        if do == "open":
            if "cannot open" in self._said:
                raise WorkerError(self._said["cannot open"])
            return {"load_seconds": 0.5, "weight_bytes": 1_000_000, "head_bytes": 100_000, "bytes": 2e9}
        if do == "burst":
            seconds = next(self._seconds[variant])
            if isinstance(seconds, BaseException):
                raise seconds
            return {"seconds": seconds}
        if do == "memory":
            return {"peak_bytes": 123_000_000}
        if do == "overhead":
            return {"step": 0.01, "outside": next(self._seconds[do])}
        return {}

    def cpu_seconds(self) -> float:
        return self.cpu

    def close(self) -> None:
        self.closed = True
