"""Reading memory as a worker of `compare`: it takes its turn in every round."""

from __future__ import annotations

from typing import Any

from benchmarks.worker import serve
from qkv.measure.bandwidth import Reader

READS = 6
"""How often a burst reads the memory."""


class Memory:
    """Has tuned itself when it is open; a burst reads `bytes`."""

    def open(self, threads: int) -> dict[str, Any]:
        self._reader = Reader(threads)
        rates = self._reader.tune(runs=3)
        return {"bytes": READS * self._reader.bytes, "way": self._reader.way, "best": max(rates.values())}

    def burst(self) -> float:
        self._reader.seconds()
        return sum(self._reader.seconds() for _ in range(READS))


if __name__ == "__main__":
    serve(Memory())
