"""qkv as a worker of `compare`: the compiled decoder itself, without the engine around it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import qkv
from benchmarks.worker import serve
from qkv.inspect.speed import Bursts, Point
from qkv.kernels import simd
from qkv.kernels.formats import format_name, packed_bytes
from qkv.kernels.team import Program, Team
from qkv.model.compiled import compile_kernels
from qkv.model.paged import Chunk
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import formats_of, load_weights

CACHES = ("f16", "int8")


class Qkv:
    """A decoder for each kind of cache, made when it is first needed, over the same weights."""

    def describe(self) -> dict[str, Any]:
        path = "VNNI" if simd.HAS_VNNI else "AVX2" if simd.HAS_AVX2 else "portable"
        return {"version": qkv.__version__, "variants": {cache: cache for cache in CACHES}, "build": path}

    def open(self, model: str, threads: int, points: list[str]) -> dict[str, Any]:
        checkpoint = open_checkpoint(Path(model))
        compile_kernels(formats_of(checkpoint.config, checkpoint.tensors, None))
        began = time.perf_counter()
        self._weights = load_weights(checkpoint.config, checkpoint.tensors, threads=threads)
        loaded = time.perf_counter() - began
        self._config, self._threads = checkpoint.config, threads
        self._points = [Point.parse(point) for point in points]
        self._bursts: dict[str, Bursts] = {}
        head = self._weights.matrices[-1]
        return {
            "load_seconds": loaded,
            "weight_bytes": self._weights.bytes_per_token,
            "head_bytes": packed_bytes(format_name(head), int(head["rows"]), int(head["columns"])),
        }

    def prepare(self, variant: str, kind: str, n: int) -> None:
        self._of(variant).prepare(Point(kind, n))

    def burst(self, variant: str, kind: str, n: int, steps: int) -> float:
        return self._of(variant).burst(Point(kind, n))

    def first(self, n: int) -> None:
        bursts = self._of("f16")
        bursts.prepare(Point("prefill", n))
        int(bursts.decoder.next_logits(bursts.ids[:n], bursts.held[0])[0].argmax())
        bursts.decoder.release(bursts.held[0])

    def overhead(self, steps: int) -> dict[str, Any]:
        """Median seconds of greedy decode steps at depth 128, and of what is not compiled code in them."""
        bursts, point = self._of("f16"), Point("decode", 128)
        bursts.prepare(point)
        cache, token = bursts.held[0], bursts.ids[0]
        inside: list[float] = []
        whole: list[float] = []
        with _timed_team(inside):
            for _ in range(steps):
                cache.length = point.depth
                began = time.perf_counter()
                token = int(bursts.decoder.step([Chunk(cache, [token])])[0].argmax())
                whole.append(time.perf_counter() - began)
        outside = [total - compiled for total, compiled in zip(whole, inside, strict=True)]
        return {"step": median(whole), "outside": median(outside)}

    def _of(self, variant: str) -> Bursts:
        if variant not in self._bursts:
            self._bursts[variant] = Bursts(
                self._config, self._weights, self._points, cache=variant, threads=self._threads
            )
        return self._bursts[variant]


@contextlib.contextmanager
def _timed_team(times: list[float]) -> Iterator[None]:
    """Note how long each run of the team takes."""
    run = Team.run

    def timed(self: Team, program: Program) -> None:
        began = time.perf_counter()
        run(self, program)
        times.append(time.perf_counter() - began)

    Team.run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Team.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(Qkv())
