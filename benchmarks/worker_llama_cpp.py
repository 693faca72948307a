"""llama.cpp as a worker of `compare`, through the C interface of llama-cpp-python.

Runs in the Python that llama-cpp-python is installed in; needs NumPy beside it, which that brings. Contexts with flash
attention off and on and with a quantized cache (which needs it on) share one copy of the weights. Batches run in
contexts of their own, with each sequence's cache apart, as `llama-server` and `llama-batched-bench` have it by default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp as api
import numpy as np

from benchmarks.worker import serve

F16, Q8_0 = 1, 8  # ggml's numbers of its types
STEP_TOKENS = 2048  # the library's own default for a logical batch
BATCH_DEPTH = 128
HEADROOM = 64  # positions that a burst may add


class Variant(NamedTuple):
    type: int
    flash: bool


VARIANTS = {"f16": Variant(F16, False), "f16 flash": Variant(F16, True), "q8_0 flash": Variant(Q8_0, True)}
_quiet = api.llama_log_callback(lambda *_: None)


class Context:
    """A context, and how many positions each of its sequences holds."""

    def __init__(self, model: Any, variant: Variant, threads: int, context: int, sequences: int) -> None:
        wanted = api.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max, wanted.kv_unified = context * sequences, sequences, False
        wanted.n_batch, wanted.n_ubatch = STEP_TOKENS, 512
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.flash_attn_type = int(variant.flash)
        wanted.type_k = wanted.type_v = variant.type
        self._context = api.llama_init_from_model(model, wanted)
        if not self._context:
            raise MemoryError(f"llama.cpp made no context of {context} × {sequences} positions")
        self._memory = api.llama_get_memory(self._context)
        self.depths = [0] * sequences

    def run(self, tokens: Sequence[int], sequences: Sequence[int], every: bool) -> None:
        """Append token i to sequence sequences[i]; logits of all of them or of the last."""
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, sequence) in enumerate(zip(tokens, sequences)):  # noqa: B905 - may be an old Python
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.depths[sequence], 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = int(every or i == len(tokens) - 1)
            self.depths[sequence] += 1
        code = api.llama_decode(self._context, batch)
        api.llama_synchronize(self._context)
        api.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def fill(self, tokens: Sequence[int], sequence: int = 0) -> None:
        for first in range(0, len(tokens), STEP_TOKENS):
            part = tokens[first : first + STEP_TOKENS]
            self.run(part, [sequence] * len(part), every=False)

    def cut(self, sequence: int, depth: int) -> None:
        """Forget the sequence from position `depth` on."""
        if not api.llama_memory_seq_rm(self._memory, sequence, depth, -1):
            raise RuntimeError("llama.cpp could not shorten a sequence")
        self.depths[sequence] = depth

    def close(self) -> None:
        api.llama_free(self._context)


class LlamaCpp:
    def describe(self) -> dict[str, Any]:
        kinds = {F16: "f16", Q8_0: "q8_0"}
        variants = {name: kinds[variant.type] for name, variant in VARIANTS.items()}
        build = api.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {api.__version__}", "variants": variants, "build": build}

    def open(self, model: str, threads: int, points: Sequence[str]) -> dict[str, Any]:
        api.llama_log_set(_quiet, None)
        api.llama_backend_init()
        began = time.perf_counter()
        wanted = api.llama_model_default_params()
        wanted.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(model.encode(), wanted)
        if not self._model:
            raise ValueError("llama.cpp cannot load this file")
        loaded = time.perf_counter() - began
        self._threads = threads
        lengths = [int(point.split(":")[1]) for point in points if not point.startswith("batch")]
        self._room = max(lengths, default=BATCH_DEPTH) + HEADROOM
        self._contexts: dict[tuple[str, int], Context] = {}
        size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._ids = np.random.default_rng(0).integers(0, max(1, size - 300), 1 << 16).tolist()
        return {"load_seconds": loaded}

    def prepare(self, variant: str, kind: str, n: int) -> None:
        count, depth = {"decode": (1, n), "batch": (n, BATCH_DEPTH), "prefill": (1, 0)}[kind]
        context = self._context(variant, count)
        for sequence in range(count):
            if context.depths[sequence] > depth:
                context.cut(sequence, 0)
            context.fill(self._ids[context.depths[sequence] : depth], sequence)

    def burst(self, variant: str, kind: str, n: int, steps: int) -> float:
        context = self._context(variant, n if kind == "batch" else 1)
        if kind == "prefill":
            began = time.perf_counter()
            for _ in range(steps):
                context.fill(self._ids[:n])
                context.cut(0, 0)
            return time.perf_counter() - began
        depths = list(context.depths)
        count = len(depths)
        self._step(context, 0, count)
        began = time.perf_counter()
        for step in range(1, 1 + steps):
            self._step(context, step, count)
        seconds = time.perf_counter() - began
        for sequence, depth in enumerate(depths):
            context.cut(sequence, depth)
        return seconds

    def first(self, n: int) -> None:
        self._context("f16", 1).fill(self._ids[:n])

    def _step(self, context: Context, step: int, count: int) -> None:
        context.run(self._ids[step * count : (step + 1) * count], range(count), every=True)

    def _context(self, variant: str, sequences: int) -> Context:
        """The context of that many sequences; of those for batches only the latest is kept."""
        key = (variant, sequences)
        if key not in self._contexts:
            for old in [old for old in self._contexts if old[0] == variant and old[1] > 1]:
                self._contexts.pop(old).close()
            room = self._room if sequences == 1 else BATCH_DEPTH + HEADROOM
            self._contexts[key] = Context(self._model, VARIANTS[variant], self._threads, room, sequences)
        return self._contexts[key]


if __name__ == "__main__":
    serve(LlamaCpp())
