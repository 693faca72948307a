"""The attention kernels against the definition (`qkv.model.attention`, float64) and against themselves, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.kernels.attention import CHUNK, History, attend_part, attend_tile, join_parts, scratch_regions, state_size
from qkv.kernels.kvcache import Pool, keys_offset, write_key, write_value
from qkv.kernels.sizes import BLOCK, CACHE_KINDS, half_block_bytes
from qkv.model.attention import attention
from qkv.model.compiled import TILE_TOKENS
from qkv.runtime.jit import kernel

LAYERS, LAYER, KV_HEADS, KV_HEAD = 2, 1, 2, 1
BOUNDS = {"f32": 2e-6, "f16": 2e-3, "int8": 2e-2}  # relative to the largest value


class Sequence:
    """A sequence of random q, k and v in a cache whose blocks were used before: everything unwritten is NaN."""

    def __init__(self, kind: str, T: int, d: int, group: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.T, self.d, self.group = kind, T, d, group
        self.q = rng.standard_normal((T, group, d)).astype(np.float32)
        self.k, self.v = (rng.standard_normal((T, d)).astype(np.float32) for _ in range(2))
        blocks = -(-T // BLOCK)
        self.table = rng.permutation(blocks + 3)[:blocks]
        half = half_block_bytes(kind, d)
        floats = np.full((blocks + 3) * LAYERS * KV_HEADS * 2 * half // 4, np.nan, np.float32)
        self.pool = Pool(CACHE_KINDS.index(kind), floats.view(np.uint8), floats, LAYERS, KV_HEADS, d, half)
        self.write()

    def write(self) -> None:
        fill(self.pool, self.table, self.k.ravel(), self.v.ravel(), self.T)

    def tile(self, position: int, tokens: int, window: int = 0) -> np.ndarray:
        """The outputs [tokens, group·d] of the tokens from `position` on, computed as one tile."""
        out = np.full((tokens, self.group * self.d), np.nan, np.float32)
        run_tile(self.history(window), self.group, self.scratch(tokens), self.q.ravel(), position, tokens, out.ravel())
        return out

    def parts(self, position: int) -> np.ndarray:
        """The outputs [1, group·d] of one token, its chunks computed apart and in backward order."""
        out = np.full((1, self.group * self.d), np.nan, np.float32)
        chunks = position // CHUNK + 1
        parts = np.full(chunks * self.group * state_size(self.d), np.nan, np.float32)
        run_parts(self.history(0), self.group, self.scratch(1), self.q.ravel(), position, chunks, parts, out.ravel())
        return out

    def history(self, window: int) -> History:
        return History(self.pool, self.table, 0, LAYER, KV_HEAD, window)

    def scratch(self, tokens: int) -> np.ndarray:
        return np.zeros(scratch_regions(self.d, tokens * (self.group + 1))[-1] + 7, np.float32)

    def expected(self, window: int = 0) -> np.ndarray:
        k, v = (x[:, None].astype(np.float64) for x in (self.k, self.v))
        q = self.q.astype(np.float64)
        if not window:
            return attention(q, k, v)
        rows = []
        for t in range(self.T):
            first = max(0, t - window + 1)
            rows.append(attention(q[t : t + 1], k[first : t + 1], v[first : t + 1]))
        return np.concatenate(rows)


@kernel
def fill(pool, table, k, v, T):
    for t in range(T):
        at = keys_offset(pool, table[t // BLOCK], LAYER, KV_HEAD)
        write_key(pool, at, t % BLOCK, k, t * pool.head_dim)
        write_value(pool, at + pool.half, t % BLOCK, v, t * pool.head_dim)


@kernel
def run_tile(history, group, scratch, q, position, tokens, out):
    stride = group * history.pool.head_dim
    attend_tile(history, group, scratch, 7, q, position * stride, stride, tokens, position, out, 0, stride)


@kernel
def run_parts(history, group, scratch, q, position, chunks, parts, out):
    d = history.pool.head_dim
    stride = group * state_size(d)
    for chunk in range(chunks - 1, -1, -1):
        attend_part(history, group, scratch, 7, q, position * group * d, position, chunk, parts, chunk * stride)
    for g in range(group):
        join_parts(parts, g * state_size(d), stride, chunks, d, scratch, 7, out, g * d)


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize(("d", "group"), [(32, 2), (64, 3), (128, 2), (128, 1), (128, 5)])
def test_outputs_equal_the_definition(kind, d, group):
    sequence = Sequence(kind, 77, d, group)
    difference = np.abs(sequence.tile(0, 77) - sequence.expected())
    assert difference.max() < BOUNDS[kind] * np.abs(sequence.v).max()


@pytest.mark.parametrize("d", [16, 48, 80])
def test_head_sizes_that_are_not_a_multiple_of_32(d):
    sequence = Sequence("f32", 70, d, 2)
    assert np.abs(sequence.tile(0, 70) - sequence.expected()).max() < 1e-5


@pytest.mark.parametrize("T", [*range(1, 131), 511, 512, 513, 1023, 1024, 1025])
def test_every_length_against_the_definition(T):
    """The newest position of a sequence of T, alone: unwritten and recycled slots are NaN and must not count."""
    sequence = Sequence("f16", T, 32, 2, seed=T)
    k, v = (x.astype(np.float16).astype(np.float64)[:, None] for x in (sequence.k, sequence.v))
    expected = attention(sequence.q[-1:].astype(np.float64), k, v)
    assert np.abs(sequence.tile(T - 1, 1) - expected).max() < 5e-6


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_tiles_parts_and_single_rows_have_the_same_bits(kind):
    sequence = Sequence(kind, 1100, 64, 3)
    single = np.concatenate([sequence.tile(t, 1) for t in range(1100)])
    for size in (2, 7, 8, TILE_TOKENS):
        tiles = [sequence.tile(t, min(size, 1100 - t)) for t in range(0, 1100, size)]
        assert np.array_equal(np.concatenate(tiles), single)
    for t in (0, 1, 31, 32, 510, 511, 512, 513, 1023, 1024, 1099):
        assert np.array_equal(sequence.parts(t), single[t : t + 1])


def test_the_window_hides_what_is_older():
    sequence = Sequence("f32", 150, 32, 2)
    for window in (1, 5, 32, 33, 100):
        outputs = np.concatenate([sequence.tile(t, min(8, 150 - t), window) for t in range(0, 150, 8)])
        assert np.abs(outputs - sequence.expected(window)).max() < 1e-5


def test_outputs_lie_in_the_convex_hull():
    sequence = Sequence("f32", 200, 64, 2)
    sequence.q *= 5
    outputs = sequence.tile(0, 200).reshape(200, 2, 64)
    for t in range(200):
        seen = sequence.v[: t + 1]
        slack = 8 * np.spacing(np.abs(seen).max(axis=0)) * np.sqrt(t + 1)
        assert np.all(outputs[t] >= seen.min(axis=0) - slack)
        assert np.all(outputs[t] <= seen.max(axis=0) + slack)


def test_saturated_scores_stay_finite():
    sequence = Sequence("f32", 64, 128, 2)
    sequence.q *= 3e4
    assert np.isfinite(sequence.tile(0, 64)).all()


def test_half_precision_clamps_instead_of_overflowing():
    sequence = Sequence("f16", 40, 32, 2)
    sequence.v[:] = 1e6
    sequence.write()
    np.testing.assert_allclose(sequence.tile(0, 40), 65504, rtol=1e-6)
