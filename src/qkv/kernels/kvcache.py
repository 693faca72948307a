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
from qkv.kernels.memory import Index, Memory, emitted, load, prefetch, store
from qkv.kernels.simd import absolute, float_to_half, inverse, max_lanes, maximum, minimum, narrow, round_to_int, splat
from qkv.kernels.sizes import BLOCK, CACHE_KINDS, GROUP
from qkv.kernels.values import Value, f32x8, f32x16, i8x16, u16x16
from qkv.runtime.jit import kernel

KV_F32, KV_F16, KV_INT8 = range(len(CACHE_KINDS))

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


@kernel
def ask_for_keys(pool, at):
    """Ask for the memory that `write_key` will touch: one line for each dimension, far slower one after another."""
    step = BLOCK * (pool.half // BLOCK // pool.head_dim)
    for i in range(pool.head_dim):
        prefetch(pool.bytes, at + i * step)


@emitted()
def store_every(array: Memory, index: Index, step: Index, vector: Value) -> None:
    """`store_every(array, i, step, vector)`: write the lanes apart, lane l at array[i + l·step], as a column."""
    for lane in range(vector.lanes):
        array.store(index + step * lane, vector.lane(lane))


@emitted()
def store_row(array: Memory, index: Index, step: Index, vector: Value) -> None:
    """The same for a `step` of one number: the lanes lie side by side."""
    array.store(index, vector)


def _writer(as_column: bool) -> Any:
    put = store_every if as_column else store_row

    @kernel
    def write(pool, at, slot, x, x_at):
        """Store x[x_at : x_at + d] as position `slot` (0…31) of the block whose keys, or values, begin at byte `at`.

        Returns the largest magnitude: of an f16 cache only, since the others hold every number.
        """
        d = pool.head_dim
        scales = (at + BLOCK * d) // 4
        first, first_scale, step = slot * d, scales + slot * (d // GROUP), 1
        if as_column:
            first, first_scale, step = slot, scales + slot, BLOCK
        largest = to_steps = splat(f32x8, 0)
        for i in range(0, d, 8):
            numbers, place = load(f32x8, x, x_at + i), first + i * step
            if pool.kind == KV_F32:
                put(pool.bytes, at + place * 4, step * 4, numbers)
            elif pool.kind == KV_F16:
                put(pool.bytes, at + place * 2, step * 2, float_to_half(numbers))
                largest = maximum(absolute(numbers), largest)
            else:
                if i % GROUP == 0:
                    scale = group_scale(x, x_at + i)
                    pool.floats[first_scale + i // GROUP * step] = scale
                    to_steps = inverse(splat(f32x8, scale))
                put(pool.bytes, at + place, step, clamped_bytes(numbers * to_steps))
        return max_lanes(largest)

    return write


write_key, write_value = _writer(True), _writer(False)


@kernel
def group_scale(x, at):
    """max|x| / 127 over a group of 32 numbers."""
    largest = splat(f32x8, 0)
    for i in range(0, GROUP, 8):
        largest = maximum(absolute(load(f32x8, x, at + i)), largest)
    return max_lanes(largest) / np.float32(127)


@kernel
def clamped_bytes(x):
    """x as int8 within ±127, rounded to nearest even."""
    return narrow(maximum(minimum(round_to_int(x), 127), -127))


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
