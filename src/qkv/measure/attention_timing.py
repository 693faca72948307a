# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The attention of one layer, alone, with the kernels that the compiled decoder uses: run and timed.

Prefill computes T queries in tiles of 32 tokens, decode one query in chunks of 512 positions, as `forward.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ModelFileError
from qkv.kernels.attention import (
    CHUNK,
    History,
    attend_part,
    attend_tile,
    join_parts,
    padded_group,
    scratch_regions,
    state_size,
)
from qkv.kernels.formats import new_arena
from qkv.kernels.kvcache import KV_F16, Pool
from qkv.kernels.sizes import BLOCK, half_block_bytes
from qkv.measure.bandwidth import Clock
from qkv.measure.limits import seconds_of
from qkv.model.attention import Array
from qkv.model.compiled import TILE_TOKENS
from qkv.model.config import ModelConfig
from qkv.progress import Progress, silent
from qkv.runtime.jit import kernel
from qkv.runtime.spmd import barrier, claim
from qkv.runtime.team import Program, team
from qkv.runtime.warmup import compile_in_child

ROUNDS = 6  # other programs disturb some of them, so each length is measured in each
ROUND_SECONDS = 0.02  # of runs of each length in a round, but at least one run
POSITIONS = 32_768
"""In the cache that decoding is measured on. The model's layers are read in turn, so none is found in a processor's own
caches; here as many tokens' histories are read in turn as fill this many positions."""


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
    rng = np.random.default_rng(0)
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    pool = random_pool(max(POSITIONS, *contexts, *prompts), kv_heads, d)
    q = rng.standard_normal((max(*prompts, 1), heads, d), np.float32)
    histories = [max(1, POSITIONS // T) for T in contexts]
    programs = [prefill_program(q[:T], pool, threads)[0] for T in prompts]
    programs += [decode_program(q[0], pool, T, n, threads)[0] for T, n in zip(contexts, histories, strict=True)]
    best = [float("inf")] * len(programs)
    for program in programs:
        team().run(program)
    for done in range(ROUNDS):
        progress("measuring attention", done, ROUNDS, "rounds")
        best = [min(so_far, _seconds(program, clock)) for so_far, program in zip(best, programs, strict=True)]
    progress("measuring attention", ROUNDS, ROUNDS, "rounds")
    decode = [seconds / n for seconds, n in zip(best[len(prompts) :], histories, strict=True)]
    return best[: len(prompts)], decode


def random_pool(positions: int, kv_heads: int, d: int) -> Pool:
    """A cache of one layer for so many positions, in blocks 0, 1, 2, …, full of half-precision numbers."""
    pool = new_pool(-(-positions // BLOCK), kv_heads, d)
    numbers = pool.bytes.view(np.float16)
    numbers[:] = np.resize(np.random.default_rng(1).standard_normal(1 << 16).astype(np.float16), numbers.size)
    return pool


def new_pool(blocks: int, kv_heads: int, d: int) -> Pool:
    """An f16 cache of one layer: for each block and head keys [d, 32] and values [32, d], all 0."""
    half = half_block_bytes("f16", d)
    memory = new_arena(blocks * kv_heads * 2 * half)
    return Pool(KV_F16, memory, memory.view(np.float32), 1, kv_heads, d, half)


def prefill_program(q: Array, pool: Pool, threads: int) -> tuple[Program, NDArray[np.float32]]:
    """The attention of queries [T, H, d] at positions 0 … T-1, and where its outputs [T, H·d] will be."""
    T, heads, d = q.shape
    out = np.zeros((T, heads * d), np.float32)
    scratch = _scratch(heads // pool.kv_heads, TILE_TOKENS, d, threads)
    arrays = (pool, _table(T), q.reshape(-1), T, heads, scratch, scratch.size // threads, out.reshape(-1))
    return Program(attend_prompt, arrays, threads), out


def decode_program(
    q: Array, pool: Pool, positions: int, histories: int, threads: int
) -> tuple[Program, NDArray[np.float32]]:
    """The attention of one token's queries [H, d] that see `positions` positions, and where the outputs [H·d] will be.

    Once for each of `histories` that lie behind each other in the cache (several: of a multiple of 32 positions); the
    outputs are the last one's.
    """
    heads, d = q.shape
    out = np.zeros(heads * d, np.float32)
    scratch = _scratch(heads // pool.kv_heads, 1, d, threads)
    parts = np.zeros(-(-positions // CHUNK) * heads * state_size(d), np.float32)
    table, row = _table(histories * positions), scratch.size // threads
    arrays = (pool, table, q.reshape(-1), positions, histories, heads, scratch, row, parts, out)
    return Program(attend_token, arrays, threads), out


@kernel
def attend_prompt(tid, n, sync, pool, table, q, tokens, heads, scratch, scratch_row, out):
    """Tiles of neighbouring tokens, for each key/value head."""
    group, row = heads // pool.kv_heads, heads * pool.head_dim
    tiles = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    item = claim(sync, 0, 1)
    while item < tiles * pool.kv_heads:
        t, g = item // pool.kv_heads * TILE_TOKENS, item % pool.kv_heads
        at = t * row + g * group * pool.head_dim
        attend_tile(
            History(pool, table, 0, 0, g, 0), group, scratch, tid * scratch_row, q, at, row,
            min(TILE_TOKENS, tokens - t), t, out, at, row,
        )  # fmt: skip
        item = claim(sync, 0, 1)
    barrier(sync, n)


@kernel
def attend_token(tid, n, sync, pool, table, q, positions, histories, heads, scratch, scratch_row, parts, out):
    """Chunks of 512 positions, for each key/value head; then each query head's chunks are joined."""
    group, d = heads // pool.kv_heads, pool.head_dim
    chunks = (positions + CHUNK - 1) // CHUNK
    for history in range(histories):
        first_block = history * (positions // BLOCK)
        item = claim(sync, 0, 1)
        while item < chunks * pool.kv_heads:
            chunk, g = item // pool.kv_heads, item % pool.kv_heads
            attend_part(
                History(pool, table, first_block, 0, g, 0), group, scratch, tid * scratch_row, q, g * group * d,
                positions - 1, chunk, parts, (chunk * heads + g * group) * state_size(d),
            )  # fmt: skip
            item = claim(sync, 0, 1)
        barrier(sync, n)
        h = claim(sync, 0, 1)
        while h < heads:
            at = h * state_size(d)
            join_parts(parts, at, heads * state_size(d), chunks, d, scratch, tid * scratch_row, out, h * d)
            h = claim(sync, 0, 1)
        barrier(sync, n)


def warm(spec: str) -> None:
    """Compile both (called by `compile_in_child`)."""
    q = np.zeros((1, 1, 32), np.float32)
    pool = new_pool(1, 1, 32)
    prefill_program(q, pool, 1)[0].compile()
    decode_program(q[0], pool, 1, 1, 1)[0].compile()


def _table(positions: int) -> NDArray[np.int64]:
    return np.arange(-(-positions // BLOCK), dtype=np.int64)


def _scratch(group: int, tokens: int, d: int, threads: int) -> NDArray[np.float32]:
    size: Any = scratch_regions(d, tokens * padded_group(group))[-1]
    return np.zeros(threads * (-(-size // 32) * 32), np.float32)


def _seconds(program: Program, clock: Clock) -> float:
    """Of the fastest of as many runs as fit in a moment."""
    times: list[float] = []
    while sum(times) < ROUND_SECONDS:
        times.append(seconds_of(program, clock))
    return min(times)
