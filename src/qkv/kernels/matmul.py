# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Products of packed weights and activations: out[t, row] = Σ_k W[row, k] · x[t, k] for any number of tokens t.

The unit of work is a block of 8 rows, one for each lane of a vector; threads take ranges of blocks. A block meets the
tokens in tiles of a few at a time, so its weights come from memory once and stay in the nearest cache.

Activations of int8 and int4 weights are themselves quantized, once per input: in groups of 32 to int8 with a float32
scale (`quantize_groups`). One number of a group may be much larger than the others, the outlier: it keeps 16 bits. A
scale that fitted it would round the other 31 away. (On SmolLM2 the KL divergence from float32 activations is a tenth of
what it is without.) With Q the weights' integers and X the activations':

    acc = fma(float(Σ Q·X), d · xs, acc)        groups in index order; for int4, Σ (Q-8)·X = Σ Q·X - 8·Σ X
    acc = fma(m, xs · ΣX, acc)                  then, where the format has a minimum

The integer sums are exact, however they are computed. f32 and bf16 weights meet float32 activations, one `fma` per
column in index order. So an output number has the same bits whatever the tile, the range of rows or the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from qkv.kernels.isa import ISA
from qkv.kernels.memory import load, store, store_lanes, zeros
from qkv.kernels.panels import FEW_TOKENS, panel_product
from qkv.kernels.simd import (
    absolute,
    as_bits,
    as_float,
    first_lane,
    lane_numbers,
    max_lanes,
    maximum,
    minimum,
    narrow,
    round_to_int,
    second_of_lanes,
    select,
    splat,
    sum_lanes,
    where_not_zero,
)
from qkv.kernels.sizes import BF16, F32, FORMATS, GROUP, INT4, INT4M, INT8, QUANT_BYTES, ROWS, SCALE_BYTES
from qkv.kernels.tiles import BIAS4, BIAS8, DENSE_STEP, INFO, OUTLIER, TOTAL, dense_step, group_step, store_tile
from qkv.kernels.values import f32x8, i32x8
from qkv.runtime.jit import inlined, kernel

TOKEN_CHUNK = 64
"""Tokens that meet all of a range's blocks before the next tokens do: their activations stay in the second cache."""

# Blocks of a tile of four tokens. An addition waits for the one before it in the same sum, so a tile has as many sums
# as the registers hold. Quantized products without VNNI need registers for other things too.
_BLOCKS = {F32: 2, BF16: 2} | dict.fromkeys((INT8, INT4, INT4M), ISA.tile_blocks)


@kernel
def quantize_groups(x, x_at, xq, xs, xinfo, first, end):
    """Quantize groups first … end-1 of the activations x[x_at:] (float32, [T, columns padded to 32], contiguous).

    Group i is x[x_at + 32i …], with the two largest magnitudes a ≥ b. Its step is d = max(b / 127, a / 32767), and its
    integers are X = x · (1/d), rounded to nearest even: within ±127, but for one outlier where a is larger than b.
    xs[i] = d (float32), xq[32i …] = X clamped to ±127 (int8), and xinfo[4i …] has Σ X and what is left of the outlier
    (see `tiles`). A group so small that d is no normal number gives zeros. Where x is not finite, neither is xs.
    """
    for i in range(first, end):
        at = x_at + i * GROUP
        largest, second = two_largest(
            as_bits(absolute(load(f32x8, x, at))),
            as_bits(absolute(load(f32x8, x, at + 8))),
            as_bits(absolute(load(f32x8, x, at + 16))),
            as_bits(absolute(load(f32x8, x, at + 24))),
        )
        d = maximum(as_float(splat(i32x8, second)) / 127, as_float(splat(i32x8, largest)) / 32767)
        small = d < 2.0**-126
        to_steps = select(small, 0, 1 / d)
        total = rest = where = splat(i32x8, 0)
        for part in range(0, GROUP, 8):
            whole = round_to_int(load(f32x8, x, at + part) * to_steps)
            q = maximum(minimum(whole, 127), -127)
            store(xq, i * GROUP + part, narrow(q))
            extra = whole - q
            total, rest = total + whole, rest + extra
            where += where_not_zero(extra, lane_numbers() + part)
        d, count = select(small, 0, d), sum_lanes(total)
        k = sum_lanes(where) & 31  # where x is not finite, `where` may be anything
        store_lanes(xs, i, d, 1)
        xinfo[INFO * i + BIAS4] = -8 * count
        xinfo[INFO * i + BIAS8] = -128 * count
        xinfo[INFO * i + OUTLIER] = k << 19 | sum_lanes(rest) & 0xFFFF
        xinfo[INFO * i + TOTAL] = first_lane(as_bits(d * count))


@kernel
def two_largest(a, b, c, d):
    """The two largest of 32 magnitudes, given as their bits, in four vectors; not-a-number is the largest of all.

    The bits of magnitudes, taken for integers, are in the order of the magnitudes.
    """
    high, low = maximum(a, b), minimum(a, b)
    low, high = maximum(low, minimum(high, c)), maximum(high, c)
    low, high = maximum(low, minimum(high, d)), maximum(high, d)
    return max_lanes(high), second_of_lanes(high, low)


class Inputs(NamedTuple):
    """The activations of `tokens` tokens; all arrays are flat."""

    x: Any  # float32: the input of f32 and bf16 matrices is x[x_at:], [tokens, columns padded to 32 with zeros]
    x_at: int
    xq: Any  # what `quantize_groups` made of it: the input of the other formats
    xs: Any
    xinfo: Any
    tokens: int


class Outputs(NamedTuple):
    """Where results go: numbers[at + t·stride + row], float32."""

    numbers: Any
    at: int
    stride: int


@cache
def matmul_for(formats: Iterable[str]) -> Callable[..., Any]:
    """The product kernel for matrices of these formats (a frozenset or tuple of names); no other is compiled.

    The kernel is `matmul(arena, matrix, inputs, outputs, first, end, ahead, scratch, scratch_at)`. It computes blocks
    first … end-1 (8 rows each) for all tokens.

    arena, matrix: the weights and their `MATRIX` record. ahead: the byte of the arena where the thread will read next.
    scratch: float32; scratch[scratch_at:] has room for a panel (`panels.panel_size`).
    """
    name, *others = sorted(formats)
    fmt, product = FORMATS[name], _product(FORMATS[name])
    if not others:
        return product
    product_of_others = matmul_for(tuple(others))

    @kernel
    def matmul(arena, matrix, inputs, outputs, first, end, ahead, scratch, scratch_at):
        if matrix.format == fmt:
            product(arena, matrix, inputs, outputs, first, end, ahead, scratch, scratch_at)
        else:
            product_of_others(arena, matrix, inputs, outputs, first, end, ahead, scratch, scratch_at)

    return matmul


@cache
def _product(fmt: int) -> Any:
    """The kernel for blocks of one format."""
    dense, size, n_blocks = fmt in (F32, BF16), QUANT_BYTES[fmt], _BLOCKS[fmt]
    four_tokens, two_tokens, one_token, one_block = (
        _tile(fmt, blocks, tokens) for blocks, tokens in ((n_blocks, 4), (n_blocks, 2), (n_blocks, 1), (1, 1))
    )
    many_tokens: Any = None if dense else panel_product(fmt)

    @inlined
    @kernel
    def product(arena, matrix, inputs, outputs, first, end, ahead, scratch, scratch_at):
        for chunk in range(0, inputs.tokens, TOKEN_CHUNK):
            chunk_end = min(chunk + TOKEN_CHUNK, inputs.tokens)
            # `dense` is known when this is compiled; Numba leaves out what cannot happen.
            if not dense and chunk_end - chunk >= FEW_TOKENS:
                many_tokens(arena, matrix, inputs, outputs, chunk, chunk_end, first, end, scratch, scratch_at)
                continue
            block = first
            while block < end:
                wide = end - block >= n_blocks
                next_block = block + (n_blocks if wide else 1)
                soon = matrix.quants + next_block * matrix.groups * size if next_block < end else ahead
                token = chunk
                while token < chunk_end:
                    left = chunk_end - token
                    if wide and left >= 4:
                        four_tokens(arena, matrix, block, inputs, token, outputs, soon)
                    elif wide and left >= 2:
                        two_tokens(arena, matrix, block, inputs, token, outputs, soon)
                    elif wide:
                        one_token(arena, matrix, block, inputs, token, outputs, soon)
                    else:
                        one_block(arena, matrix, block, inputs, token, outputs, soon)
                    token += 1 if not wide or left < 2 else 2 if left < 4 else 4
                block = next_block

    return product


@kernel
def weights_at(matrix, block):
    """The byte of the arena where a matrix's quants of a block begin."""
    return matrix.quants + block * matrix.block_bytes


def _tile(fmt: int, blocks: int, tokens: int) -> Any:
    """The kernel for all columns, in order, of so many blocks of one format, times so many tokens."""
    dense, size = fmt in (F32, BF16), QUANT_BYTES[fmt]

    @inlined
    @kernel
    def tile(arena, matrix, block, inputs, token, outputs, soon):
        acc = zeros(f32x8, blocks, tokens)
        groups, quants = matrix.groups, matrix.quants + block * matrix.groups * size
        if dense:
            x_at = inputs.x_at + token * groups * GROUP
            for k in range(0, groups * GROUP, DENSE_STEP):
                at = k * (size // GROUP)
                acc = dense_step(fmt, acc, arena, quants + at, inputs.x, x_at + k, groups, soon + at * blocks)
        else:
            scales = matrix.scales + block * groups * SCALE_BYTES
            minimums = matrix.minimums + block * groups * SCALE_BYTES
            for g in range(groups):
                acc = group_step(
                    fmt, acc, arena, quants + g * size, scales + g * SCALE_BYTES, minimums + g * SCALE_BYTES,
                    inputs.xq, inputs.xs, inputs.xinfo, token * groups + g, groups, soon + g * blocks * size,
                )  # fmt: skip
        at = outputs.at + token * outputs.stride + block * ROWS
        store_tile(acc, outputs.numbers, at, outputs.stride, matrix.rows - block * ROWS)

    return tile
