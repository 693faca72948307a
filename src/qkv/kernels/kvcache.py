# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The paged KV cache: where the keys and values of past positions lie, and how they are written and read.

Positions come in blocks of 32, counted from position 0 of their sequence. A block holds the keys and values of its 32
positions for every layer and every key/value head; a sequence's block table says which blocks are its own, in order.

    block → layer → key/value head → keys  [head_dim, 32]   lanes are positions: no sum runs across a vector
                                     values [32, head_dim]

`f32` keeps numbers as they are, and `f16` rounds them; a step reports those beyond ±65504, which `f16` cannot hold.
`int8` keeps 8 bits and a float32 scale for each position and 32 dimensions, as activations are quantized. What is read
is float32, one block at a time. What was never written is never used: attention masks it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba.core.types import float32

from qkv.kernels.isa import ISA
from qkv.kernels.memory import Index, Memory, emitted
from qkv.kernels.simd import (
    absolute,
    f32x8,
    f32x16,
    float_to_half,
    load,
    max_lanes,
    maximum,
    minimum,
    multiply,
    narrow,
    prefetch,
    round_to_int,
    splat,
    splat_i32,
    store,
)
from qkv.kernels.sizes import BLOCK, CACHE_KINDS, GROUP
from qkv.kernels.values import Value, i8x16, u16x16
from qkv.runtime.jit import kernel

KV_F32, KV_F16, KV_INT8 = range(len(CACHE_KINDS))

SMALLEST_NORMAL = np.float32(2.0**-126)
LARGEST_HALF = np.float32(65504)
NUMBER_BYTES = {KV_F32: 4, KV_F16: 2, KV_INT8: 1}


class Pool(NamedTuple):
    """The cache of all sequences, for kernels."""

    kind: int  # KV_F32, KV_F16 or KV_INT8
    bytes: Any  # uint8: all blocks
    floats: Any  # the same memory as float32
    layers: int
    kv_heads: int
    head_dim: int
    half: int  # `half_block_bytes`


@kernel
def keys_offset(pool, block, layer, head):
    """The byte where the keys of a head in a block begin; its values are `pool.half` bytes further on."""
    return ((block * pool.layers + layer) * pool.kv_heads + head) * 2 * pool.half


# ------------------------------------------------------------------------------------------ writing one position


@emitted()
def store_every(array: Memory, index: Index, step: Index, vector: Value) -> None:
    """`store_every(array, i, step, vector)`: write the lanes apart, lane l at array[i + l·step], as a column."""
    for lane in range(vector.lanes):
        array.store(index + step * lane, vector.lane(lane))


@kernel
def ask_for_keys(pool, at):
    """Ask for the memory that `write_key` will touch: one line for each dimension, far slower one after another."""
    step = BLOCK * (pool.half // BLOCK // pool.head_dim)
    for i in range(pool.head_dim):
        prefetch(pool.bytes, at + i * step)


@kernel
def write_key(pool, at, slot, k, k_at):
    """Store k[k_at : k_at + d] as position `slot` (0…31) of the block whose keys begin at byte `at`.

    Returns the largest magnitude, as `write_value` does: of an f16 cache only, since the others hold every number.
    """
    d = pool.head_dim
    largest = splat(np.float32(0))
    if pool.kind == KV_INT8:
        for g in range(d // GROUP):
            scale = group_scale(k, k_at + g * GROUP)
            pool.floats[(at + BLOCK * d) // 4 + g * BLOCK + slot] = scale
            for i in range(g * GROUP, (g + 1) * GROUP, 8):
                store_every(pool.bytes, at + i * BLOCK + slot, BLOCK, quantized(k, k_at + i, scale))
        return np.float32(0)
    for i in range(0, d, 8):
        values = load(f32x8, k, k_at + i)
        if pool.kind == KV_F32:
            store_every(pool.bytes, at + (i * BLOCK + slot) * 4, BLOCK * 4, values)
        else:
            store_every(pool.bytes, at + (i * BLOCK + slot) * 2, BLOCK * 2, float_to_half(values))
            largest = maximum(absolute(values), largest)
    return max_lanes(largest)


@kernel
def write_value(pool, at, slot, v, v_at):
    """Store v[v_at : v_at + d] as position `slot` of the block whose values begin at byte `at`: see `write_key`."""
    d = pool.head_dim
    largest = splat(np.float32(0))
    if pool.kind == KV_INT8:
        for g in range(d // GROUP):
            scale = group_scale(v, v_at + g * GROUP)
            pool.floats[(at + BLOCK * d) // 4 + slot * (d // GROUP) + g] = scale
            for i in range(g * GROUP, (g + 1) * GROUP, 8):
                store(pool.bytes, at + slot * d + i, quantized(v, v_at + i, scale))
        return np.float32(0)
    for i in range(0, d, 8):
        values = load(f32x8, v, v_at + i)
        if pool.kind == KV_F32:
            store(pool.bytes, at + (slot * d + i) * 4, values)
        else:
            store(pool.bytes, at + (slot * d + i) * 2, float_to_half(values))
            largest = maximum(absolute(values), largest)
    return max_lanes(largest)


@kernel
def group_scale(x, at):
    """max|x| / 127 over a group of 32 numbers."""
    largest = splat(np.float32(0))
    for i in range(0, GROUP, 8):
        largest = maximum(absolute(load(f32x8, x, at + i)), largest)
    return max_lanes(largest) / np.float32(127)


@kernel
def quantized(x, at, scale):
    """x[at : at + 8] / scale as int8, rounded to nearest even; zeros for a scale of 0."""
    inverse = np.float32(0) if scale < SMALLEST_NORMAL else np.float32(1) / scale
    q = round_to_int(multiply(load(f32x8, x, at), splat(inverse)))
    return narrow(maximum(minimum(q, splat_i32(np.int32(127))), splat_i32(np.int32(-127))))


# ------------------------------------------------------------------------------------------ reading

_LOADED = {KV_F32: f32x16, KV_F16: u16x16, KV_INT8: i8x16}


@emitted(lambda: f32x16)
def read(kind: int, shared: int, numbers: Memory, at: Index, scales: Memory, scales_at: Index) -> Value:
    """16 numbers of `kind` from numbers[at] on, as float32.

    An int8 number counts times its scale: all 16 share the one at scales_at, or else each has its own from there on.
    """
    raw = numbers.load(_LOADED[kind], at)
    if kind == KV_F32:
        return raw
    if kind == KV_F16:
        return ISA.half_to_float(raw)
    return raw.to(float32) * (scales.spread(f32x16, scales_at) if shared else scales.load(f32x16, scales_at))


@cache
def _converter(kind: int) -> Any:
    size = NUMBER_BYTES[kind]

    @kernel
    def convert(pool, at, slots, keys, values, scratch):
        d = pool.head_dim
        scales = (at + BLOCK * d) // 4
        for i in range(d):
            for lane in range(0, BLOCK, 16):
                place = i * BLOCK + lane
                k = read(kind, 0, pool.bytes, at + place * size, pool.floats, scales + i // GROUP * BLOCK + lane)
                store(scratch, keys + place, k)
        at, scales = at + pool.half, scales + pool.half // 4
        for slot in range(slots):
            for i in range(0, d, 16):
                place = slot * d + i
                v = read(kind, 1, pool.bytes, at + place * size, pool.floats, scales + place // GROUP)
                store(scratch, values + place, v)

    return convert


_convert_f32, _convert_f16, _convert_int8 = (_converter(kind) for kind in (KV_F32, KV_F16, KV_INT8))


@kernel
def read_block(pool, at, slots, keys, values, scratch):
    """A head's block, whose keys begin at byte `at`, as float32: keys [d, 32] → scratch[keys …], values of the first
    `slots` slots, [slots, d] → scratch[values …]. Slots never written hold anything, NaN included."""
    if pool.kind == KV_F32:
        _convert_f32(pool, at, slots, keys, values, scratch)
    elif pool.kind == KV_F16:
        _convert_f16(pool, at, slots, keys, values, scratch)
    else:
        _convert_int8(pool, at, slots, keys, values, scratch)
