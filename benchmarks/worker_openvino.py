"""OpenVINO GenAI as a worker of `compare`. It reads GGUF files of a few types itself.

Runs in the Python that openvino-genai is installed in. A burst is a request whose prompt is in the prefix cache, so
that only its last block is computed again; the times of its steps are those that the library reports.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as api

from benchmarks.worker import serve

CACHES = ("f16", "u8")
CACHE_GB = 3
BATCH_DEPTH = 128
IDS = 1 << 16


class OpenVino:
    """A pipeline for each kind of cache, made when it is first needed."""

    def describe(self) -> dict[str, Any]:
        return {"version": f"openvino-genai {api.__version__}", "variants": {cache: cache for cache in CACHES}}

    def open(self, model: str, threads: int, points: list[str]) -> dict[str, Any]:
        self._model, self._threads = model, threads
        self._pipelines: dict[str, Any] = {}
        began = time.perf_counter()
        self._pipeline("f16")
        seconds = time.perf_counter() - began
        size = len(self._pipelines["f16"].get_tokenizer().get_vocab())
        # Each prefill starts one id further on, where no other prompt has started: nothing of it is cached.
        self._ids = np.random.default_rng(0).integers(0, max(1, size - 300), IDS).astype(np.int64)
        self._start = 0
        return {"load_seconds": seconds}

    def prepare(self, variant: str, kind: str, n: int) -> None:
        if kind != "prefill":
            self._generate(variant, self._prompts(kind, n), 1)

    def burst(self, variant: str, kind: str, n: int, steps: int) -> float:
        if kind == "prefill":
            seconds = 0.0
            for _ in range(steps):
                self._start = (self._start + 1) % (IDS - n)
                prompt = self._ids[self._start : self._start + n]
                began = time.perf_counter()
                self._generate(variant, [prompt], 1)
                seconds += time.perf_counter() - began
            return seconds
        prompts = self._prompts(kind, n)
        # One token is the prompt's, and the step after it is not counted: others have a step to warm up, too.
        metrics = self._generate(variant, prompts, 2 + steps)[0].perf_metrics
        durations = metrics.raw_metrics.m_durations  # microseconds, a step's shared out to its tokens
        if len(durations) != len(prompts) * (1 + steps):
            raise RuntimeError(f"{len(durations)} durations for {1 + steps} steps of {len(prompts)}")
        return float(sum(durations[len(prompts) :])) / 1e6

    def first(self, n: int) -> None:
        self._generate("f16", [self._ids[:n]], 1)

    def _prompts(self, kind: str, n: int) -> list[Any]:
        if kind == "decode":
            return [self._ids[:n]]
        return [self._ids[i * BATCH_DEPTH : (i + 1) * BATCH_DEPTH] for i in range(n)]

    def _generate(self, variant: str, prompts: list[Any], tokens: int) -> list[Any]:
        wanted = api.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = tokens, True, False
        inputs = [openvino.Tensor(np.ascontiguousarray(prompt[None])) for prompt in prompts]
        return list(self._pipeline(variant).generate(inputs, [wanted] * len(prompts)))

    def _pipeline(self, variant: str) -> Any:
        if variant not in self._pipelines:
            scheduling = api.SchedulerConfig()
            scheduling.enable_prefix_caching = True
            scheduling.cache_size = CACHE_GB
            scheduling.dynamic_split_fuse = False  # a prompt in one piece
            scheduling.max_num_batched_tokens = IDS
            settings = {"INFERENCE_NUM_THREADS": self._threads, "KV_CACHE_PRECISION": variant}
            self._pipelines[variant] = api.ContinuousBatchingPipeline(self._model, scheduling, "CPU", settings, {})
        return self._pipelines[variant]


if __name__ == "__main__":
    serve(OpenVino())
