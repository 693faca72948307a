# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""GGUF's Q4_K as int4m: the quants in another order, the scales of the groups multiplied out and rounded to float16.

A block is 256 weights of a row, 8 groups of 32, in 144 bytes: d and dmin (float16), 12 bytes with a 6-bit scale and a
6-bit minimum for each group, 128 bytes of quants. A weight is d·scale·q - dmin·minimum.
"""

from __future__ import annotations

import numpy as np
from numba import types

from qkv.kernels.formats import read_half
from qkv.kernels.memory import load, store
from qkv.kernels.simd import absolute, float_to_half, max_lanes, maximum, splat
from qkv.kernels.sizes import ROWS
from qkv.kernels.values import Vector, f32x8, u32x8
from qkv.runtime.jit import kernel

BLOCK_WEIGHTS, BLOCK_BYTES = 256, 144
GROUPS = 8
_LARGEST_HALF = np.float32(65504)

u8x4 = Vector(types.uint8, 4)


@kernel
def pack_q4_k_rows(arena, matrices, first_row, source, count, scales, words):
    """Returns whether all scales fit float16. Scratch: float32 [scale or minimum, group, row], bytes [word, row, 4]."""
    matrix = matrices[0]
    blocks = matrix.groups // GROUPS
    largest = splat(f32x8, 0)
    for i in range((count + ROWS - 1) // ROWS):
        for b in range(blocks):
            for lane in range(ROWS):
                row = i * ROWS + lane
                if row < count:
                    at = (row * blocks + b) * BLOCK_BYTES
                    _read_scales(source, at, lane, scales)
                    for k in range(32):
                        store(words, (k * ROWS + lane) * 4, load(u8x4, source, at + 16 + 4 * k))
                else:  # rows of padding
                    for k in range(2 * GROUPS):
                        scales[k * ROWS + lane] = 0
                    for k in range(128):
                        words[k // 4 * 32 + lane * 4 + k % 4] = 0
            tile = (first_row // ROWS + i) * matrix.groups + b * GROUPS
            for g in range(GROUPS):
                d, m = load(f32x8, scales, g * ROWS), load(f32x8, scales, (GROUPS + g) * ROWS)
                largest = maximum(absolute(d), maximum(absolute(m), largest))
                store(arena, matrix.scales + (tile + g) * 16, float_to_half(d))
                store(arena, matrix.minimums + (tile + g) * 16, float_to_half(m))
            _rearrange(arena, matrix.quants + tile * 128, words)
    return max_lanes(largest) <= _LARGEST_HALF


@kernel
def _read_scales(source, at, lane, scales):
    """d·scale and -dmin·minimum of a block's 8 groups, exact: 11 bits times 6.

    Bytes 4…15 hold 6-bit numbers. Groups 0…3: the lower 6 bits of bytes 4+g (scale) and 8+g (minimum). Groups 4…7: the
    lower (scale) or upper (minimum) 4 bits of byte 8+g, and above them the upper 2 bits of byte g or 4+g.
    """
    d, dmin = read_half(source, at), read_half(source, at + 2)
    for g in range(GROUPS):
        if g < 4:
            scale, minimum = source[at + 4 + g] & 63, source[at + 8 + g] & 63
        else:
            both = source[at + 8 + g]
            scale = (both & 15) | (source[at + g] >> 6 << 4)
            minimum = (both >> 4) | (source[at + 4 + g] >> 6 << 4)
        scales[g * ROWS + lane] = d * np.float32(scale)
        scales[(GROUPS + g) * ROWS + lane] = -(dmin * np.float32(minimum))


@kernel
def _rearrange(arena, quants, words):
    """Q4_K has two groups side by side: in 32 bytes, group 2p in the lower 4 bits, group 2p+1 in the upper. Our tiles
    have the two halves of one group so. Lanes are rows, each with 4 bytes."""
    lower, upper = 0x0F0F0F0F, 0xF0F0F0F0
    for p in range(GROUPS // 2):
        for j in range(4):
            first = load(u32x8, words, (8 * p + j) * 32)
            second = load(u32x8, words, (8 * p + 4 + j) * 32)
            store(arena, quants + 256 * p + 32 * j, first & lower | (second & lower) << 4)
            store(arena, quants + 256 * p + 128 + 32 * j, first >> 4 & lower | second & upper)
