"""qkv as a worker of `compare`: the compiled decoder itself, without the engine around it (but for `overhead`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import qkv
from benchmarks.worker import serve
from qkv.engine.engine import Engine
from qkv.engine.params import SamplingParams
from qkv.engine.vocabulary import Vocabulary
from qkv.kernels.isa import ISA
from qkv.kernels.sizes import format_name, packed_bytes
from qkv.measure.speed import BATCH_DEPTH, Bursts, Point
from qkv.model.compiled import CompiledDecoder, compile_kernels
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.choices import matrix_formats
from qkv.weights.load import load_weights

CACHES = ("f16", "int8")


class Qkv:
    """A decoder for each kind of cache, made when it is first needed, over the same weights."""

    def describe(self) -> dict[str, Any]:
        return {"version": qkv.__version__, "variants": {cache: cache for cache in CACHES}, "build": ISA.name}

    def open(self, model: str, threads: int, points: list[str]) -> dict[str, Any]:
        checkpoint = open_checkpoint(Path(model))
        formats = matrix_formats(checkpoint.config, checkpoint.tensors, None)
        compile_kernels(frozenset(formats.values()))
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
        int(bursts.session.run(bursts.ids[:n], bursts.held[0])[0].argmax())
        bursts.session.release(bursts.held[0])

    def overhead(self, steps: int) -> dict[str, Any]:
        """Median seconds of the engine's greedy decode steps after 128 tokens, and of what is not compiled in them."""
        bursts = self._of("f16")
        bursts.prepare(Point("prefill", BATCH_DEPTH))
        decoder = bursts.decoder
        engine = Engine(decoder, vocabulary=Vocabulary(self._config.vocab_size), context=decoder.context, end_ids=())
        times: list[tuple[float, float]] = []
        with _timed(decoder, times):
            engine.submit(bursts.ids[:BATCH_DEPTH], SamplingParams(temperature=0, max_tokens=steps)).wait()
        engine.close()
        decoding = times[-steps + 1 :]
        pairs = list(pairwise(decoding))
        return {
            "step": median(after[0] - before[0] for before, after in pairs),
            "outside": median(after[0] - before[1] for before, after in pairs),
        }

    def _of(self, variant: str) -> Bursts:
        if variant not in self._bursts:
            self._bursts[variant] = Bursts(
                self._config, self._weights, self._points, cache=variant, threads=self._threads
            )
        return self._bursts[variant]


@contextlib.contextmanager
def _timed(decoder: CompiledDecoder, times: list[tuple[float, float]]) -> Iterator[None]:
    """Note when thread 0 enters and leaves the compiled step."""
    program = decoder._program
    entry = program.entry

    def timed(tid: int, *arguments: Any) -> Any:
        if tid != 0:
            return entry(tid, *arguments)
        began = time.perf_counter()
        outcome = entry(tid, *arguments)
        times.append((began, time.perf_counter()))
        return outcome

    program.entry = timed
    try:
        yield
    finally:
        program.entry = entry


if __name__ == "__main__":
    serve(Qkv())
