# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The attention of a model, timed: the phases of the compiled step that attend, without its products and norms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ModelFileError
from qkv.kernels.attention import CHUNK
from qkv.kernels.formats import MATRIX
from qkv.kernels.kvcache import Pool
from qkv.kernels.sizes import STEP_TOKENS, blocks_for
from qkv.measure.bandwidth import Clock
from qkv.measure.limits import fastest
from qkv.model.attention import Array
from qkv.model.compiled import TILE_TOKENS, new_buffers, new_input, step_shape
from qkv.model.config import PRESETS, ModelConfig
from qkv.model.forward import Step, Weights, attend, finish_attention
from qkv.model.layers import layer_records
from qkv.model.probe import new_probe
from qkv.progress import Progress, silent
from qkv.runtime.jit import kernel
from qkv.runtime.team import Program
from qkv.runtime.warmup import compile_in_child

ROUNDS = 6  # other programs disturb some of them, so each length is measured in each
ROUND_SECONDS = 0.02  # of runs of each step in a round
POSITIONS = 32_768
"""In the cache that is read. Decoding has as many layers as fit into it: none is found in a processor's own caches."""


def measure(
    config: ModelConfig,
    prompts: Sequence[int],
    contexts: Sequence[int],
    threads: int,
    progress: Progress = silent,
    clock: Clock = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Seconds that one layer's attention takes: for prompts of these lengths, and for one token that sees as many
    positions. The best of several runs each, on random numbers; the cache is f16. Raises ModelFileError."""
    if config.head_dim % 16:
        raise ModelFileError(f"head_dim {config.head_dim} is not a multiple of 16; the kernels need that")
    compile_in_child(__name__, "attention", progress)
    pool = new_pool(config, max(POSITIONS, *contexts, *prompts))
    numbers, rng = pool.bytes.view(np.float16), np.random.default_rng(0)
    numbers[:] = np.resize(rng.standard_normal(1 << 16).astype(np.float16), numbers.size)
    q = rng.standard_normal((max(*prompts, 1), config.num_attention_heads, config.head_dim), np.float32)
    layers = [1] * len(prompts) + [max(1, blocks_for(POSITIONS) // blocks_for(T)) for T in contexts]
    works = [attention_steps(config, q[:T], 0, pool, threads) for T in prompts]
    works += [
        attention_steps(config, q[:1], T - 1, pool._replace(layers=n), threads)
        for T, n in zip(contexts, layers[len(prompts) :], strict=True)
    ]
    best = [float("inf")] * len(works)
    for done in range(ROUNDS):
        progress("measuring attention", done, ROUNDS, "rounds")
        now = [sum(fastest(program, clock, ROUND_SECONDS) for program, _ in steps) for steps in works]
        best = list(map(min, best, now))
    progress("measuring attention", ROUNDS, ROUNDS, "rounds")
    seconds = [whole / n for whole, n in zip(best, layers, strict=True)]
    return seconds[: len(prompts)], seconds[len(prompts) :]


def new_pool(config: ModelConfig, positions: int) -> Pool:
    """An f16 cache of one layer, in blocks 0, 1, 2, …"""
    narrow = _narrow(config, 1)
    pool: Pool = new_buffers(narrow, step_shape(narrow, ()), blocks_for(positions), "f16", 1, 1).pool
    return pool


def attention_steps(
    config: ModelConfig, q: Array, first: int, pool: Pool, threads: int
) -> list[tuple[Program, NDArray[np.float32]]]:
    """The steps whose queries [T, H, d] are at the positions from `first` on, the same in every layer of the pool.

    With each step comes the memory for its outputs [tokens, H·d], where those of the last layer stay.
    """
    starts = range(0, len(q), STEP_TOKENS)
    return [_step(config, q[start : start + STEP_TOKENS], first + start, pool, threads) for start in starts]


def _step(config: ModelConfig, q: Array, first: int, pool: Pool, threads: int) -> tuple[Program, NDArray[np.float32]]:
    narrow = _narrow(config, pool.layers)
    shape, tokens, end = step_shape(narrow, ()), len(q), first + len(q)
    weights = Weights(np.zeros(1, np.uint8), np.zeros(1, MATRIX), np.zeros(1, np.float32), layer_records(narrow))
    buffers = new_buffers(narrow, shape, 1, "f16", threads, 1)._replace(pool=pool)
    numbers = q.reshape(tokens, -1)
    buffers.qkv[: tokens * shape.qkv_row].reshape(tokens, -1)[:, : numbers.shape[1]] = numbers
    batch = new_input(narrow, blocks_for(end))
    batch.positions[:tokens] = range(first, end)
    batch.tables[: blocks_for(end)] = range(blocks_for(end))
    starts = range(0, tokens, TILE_TOKENS) if tokens > 1 else []
    tiles = [(start, min(TILE_TOKENS, tokens - start)) for start in starts]
    parts = [(0, chunk) for chunk in range(-(-end // CHUNK))] if tokens == 1 else []
    batch.part_at[:tokens] = -1 if tiles else 0
    for array, pairs in ((batch.tiles, tiles), (batch.parts, parts)):
        array[: 2 * len(pairs)] = np.ravel(pairs)
    batch.command[:] = tokens, len(tiles), len(parts), 0, 0, 0
    out = buffers.o[: tokens * shape.o_row].reshape(tokens, -1)[:, : numbers.shape[1]]
    return Program(attend_layers, (batch, shape, weights, buffers, new_probe()), threads), out


def _narrow(config: ModelConfig, layers: int) -> ModelConfig:
    """So many layers with the same heads, and next to nothing beside them."""
    return replace(config, num_hidden_layers=layers, hidden_size=32, intermediate_size=32, vocab_size=32)


@kernel
def attend_layers(tid, n, sync, input, shape, weights, buffers, probe):
    """What a step does between the products of a layer: attend, and join the parts."""
    s = Step(sync, tid, n, input, shape, weights, buffers, probe)
    for i in range(len(weights.layers)):
        attend(s, weights.layers[i])
        finish_attention(s, i)


def warm(spec: str) -> None:
    """Compile it (called by `compile_in_child`)."""
    config = PRESETS["Qwen/Qwen3-0.6B"]  # any would do: only the types of its numbers and arrays count
    q = np.zeros((1, config.num_attention_heads, config.head_dim), np.float32)
    attention_steps(config, q, 0, new_pool(config, 1), 1)[0][0].compile()
