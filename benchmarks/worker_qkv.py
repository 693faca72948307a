"""qkv as a worker of `compare`: the compiled decoder itself, without the engine around it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import qkv
from benchmarks.worker import BATCH_DEPTH, serve
from qkv.kernels import simd
from qkv.kernels.formats import FORMATS, packed_bytes
from qkv.model.compiled import Chunk, CompiledDecoder, compile_kernels
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import formats_of, load_weights

CACHES = ("f16", "int8")


class Qkv:
    """Two decoders over the same weights, one for each kind of cache."""

    def describe(self) -> dict[str, Any]:
        path = "VNNI" if simd.HAS_VNNI else "AVX2" if simd.HAS_AVX2 else "portable"
        return {"version": qkv.__version__, "variants": {cache: cache for cache in CACHES}, "build": path}

    def open(self, model: str, threads: int, context: int, sequences: int) -> dict[str, Any]:
        checkpoint = open_checkpoint(Path(model))
        config = checkpoint.config
        compile_kernels(formats_of(config, checkpoint.tensors, None))
        began = time.perf_counter()
        weights = load_weights(config, checkpoint.tensors, threads=threads)
        self._decoders = {
            cache: CompiledDecoder(
                config, weights, cache=cache, context=context, threads=threads, outputs=max(1, sequences)
            )
            for cache in CACHES
        }
        loaded = time.perf_counter() - began
        self._held = {cache: [decoder.new_cache()] for cache, decoder in self._decoders.items()}
        self._ids = np.random.default_rng(0).integers(0, max(1, config.vocab_size - 300), 1 << 16).tolist()
        head = weights.matrices[-1]
        return {
            "load_seconds": loaded,
            "weight_bytes": weights.bytes_per_token,
            "head_bytes": packed_bytes(list(FORMATS)[int(head["format"])], int(head["rows"]), int(head["columns"])),
        }

    def prepare(self, variant: str, kind: str, n: int) -> None:
        """Keep n sequences of 128 tokens, one of n tokens, or an empty one."""
        decoder, held = self._decoders[variant], self._held[variant]
        count, depth = {"decode": (1, n), "batch": (n, BATCH_DEPTH), "prefill": (1, 0)}[kind]
        while len(held) > count:
            decoder.release(held.pop())
        held += [decoder.new_cache() for _ in range(count - len(held))]
        for cache in held:
            if cache.length > depth:
                decoder.release(cache)
            if cache.length < depth:
                decoder.next_logits(self._ids[cache.length : depth], cache)

    def burst(self, variant: str, kind: str, n: int, steps: int) -> float:
        decoder, held = self._decoders[variant], self._held[variant]
        if kind == "prefill":
            began = time.perf_counter()
            for _ in range(steps):
                decoder.next_logits(self._ids[:n], held[0])
                decoder.release(held[0])
            return time.perf_counter() - began
        depths = [cache.length for cache in held]
        self._step(decoder, held, 0)
        began = time.perf_counter()
        for step in range(1, 1 + steps):
            self._step(decoder, held, step)
        seconds = time.perf_counter() - began
        for cache, depth in zip(held, depths, strict=True):
            cache.length = depth
        return seconds

    def first(self, n: int) -> None:
        decoder = self._decoders["f16"]
        cache = decoder.new_cache()
        int(decoder.next_logits(self._ids[:n], cache)[0].argmax())
        decoder.release(cache)

    def _step(self, decoder: CompiledDecoder, held: list[Any], step: int) -> None:
        first = step * len(held)
        decoder.step([Chunk(cache, [self._ids[first + i]]) for i, cache in enumerate(held)])


if __name__ == "__main__":
    serve(Qkv())
