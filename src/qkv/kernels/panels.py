# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Products of quantized weights and many tokens: a few rows are unpacked once, and then meet all tokens.

A *panel* is a block of 8 rows as bytes: no nibbles, no float16. Where registers are 512 bits wide it is four blocks,
two side by side in each of two vectors. It lies in the thread's scratch memory, small enough for the near caches, and
tiles of 4 tokens run over it. The sums are those of `matmul`, in the same order: a token's numbers have the same bits.

    for each group of 32 columns:  8 words: byte 4·l + t of word j is row l's column 4j + t
                                   the scales of the rows, and their minimums, as float32
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import types

from qkv.kernels import simd
from qkv.kernels.formats import GROUP, INT4, INT4M, INT8, QUANT_BYTES, ROWS
from qkv.kernels.simd import any_intrinsic, f32x8, f32x16, i32x8, store, u8x32, u16x8
from qkv.kernels.tiles import (
    OUTLIER,
    TOTAL,
    Emitter,
    bias_of,
    is_accumulator,
    pinned,
    store_tile,
    zeros,
)
from qkv.runtime.jit import inlined, kernel

BLOCKS = 2 if simd.HAS_512 and simd.HAS_VNNI else 1
"""Blocks of 8 rows that lie side by side in a vector."""
VECTORS = BLOCKS
TOKENS = 4
"""Vectors and tokens of a tile: as many sums as the registers hold, a running one and one of the group for each."""
FEW_TOKENS = 2 * TOKENS
"""Fewer tokens than these are not worth a panel."""
MANY_TOKENS = 16 if BLOCKS == 2 else 0
"""For up to so many, a group is unpacked when it is needed, twice as many tokens at a time: a whole panel of 32 rows
would not stay in the nearest cache, and what 16 tokens do with it is too little to pay for the way."""

LANES = ROWS * BLOCKS
_SUMS = f32x16 if BLOCKS == 2 else f32x8
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)

WORDS = GROUP // 4
SCALES, MINIMUMS, GROUP_SIZE = WORDS * LANES, (WORDS + 1) * LANES, (WORDS + 2) * LANES  # in float32 elements
CONTROLS = 4 * LANES
"""A panel begins with 4 shuffles: the b-th brings byte b of every 4 to their front, and zeros to the others."""


def panel_size(columns: int) -> int:
    """Float32 elements of scratch memory that a panel of so many columns takes."""
    return CONTROLS + -(-columns // GROUP) * GROUP_SIZE * VECTORS


# ------------------------------------------------------------------------------------------ unpacking


@any_intrinsic
def unpack_group(
    typing: Any, fmt: Any, arena: Any, quants: Any, scales: Any, minimums: Any, apart: Any, scratch: Any, at: Any
) -> Any:
    """Unpack a group of 32 columns to scratch[at:].

    quants, scales, minimums: its byte offsets in the first block; in the second they are `apart` groups further on.
    """
    kind = simd.literal(fmt)
    if kind not in (INT8, INT4, INT4M):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        names = "fmt arena quants scales minimums apart scratch at"
        _emit_unpack(Emitter(context, builder, signature, values, names), kind)
        return context.get_dummy_value()

    index = types.intp
    return types.void(fmt, arena, index, index, index, index, scratch, index), codegen


def _emit_unpack(e: Emitter, kind: int) -> None:
    builder, quant_bytes = e.builder, QUANT_BYTES[kind]  # no asking ahead: it was measured to cost more than it brings

    def side_by_side(vector: Any, base: Any, offset: int, step: int) -> Any:
        first = e.offset(base, (_i64(1), offset))
        parts = [e.load(vector, "arena", e.offset(first, (e.apart, step * b))) for b in range(BLOCKS)]
        return parts[0] if BLOCKS == 1 else simd.join(builder, *parts)

    def put(value: Any, place: int) -> None:
        simd.emit_store(e.context, builder, e.scratch_type, e.scratch, e.offset(e.at, (_i64(1), place)), value)

    for j in range(quant_bytes // 32):
        q = side_by_side(u8x32, e.quants, 32 * j, quant_bytes)
        if kind == INT8:  # VNNI's products want q + 128
            put(builder.xor(q, simd.constant(q.type, 128)) if simd.HAS_VNNI else q, j * LANES)
        else:
            put(simd.low_nibbles.emit(builder, q), j * LANES)
            put(simd.high_nibbles.emit(builder, q), (j + WORDS // 2) * LANES)
    put(simd.half_to_float.emit(builder, side_by_side(u16x8, e.scales, 0, 2 * ROWS)), SCALES)
    if kind == INT4M:
        put(simd.half_to_float.emit(builder, side_by_side(u16x8, e.minimums, 0, 2 * ROWS)), MINIMUMS)


@kernel
def write_controls(scratch, at):
    """The 4 shuffles at the beginning of a panel."""
    for b in range(4):
        for lane in range(0, LANES, 8):
            store(scratch, at + b * LANES + lane, shuffle_to_front(b))


@simd.operation(i32x8, types.int64)
def shuffle_to_front(builder: Any, b: Any) -> Any:
    """The shuffle that brings byte b of every 4 to their front, for 8 numbers."""
    first = ir.Constant(i32x8.llvm, [_signed(0x80808000 | 4 * (lane % 4)) for lane in range(8)])
    return builder.add(first, simd.broadcast(builder, builder.trunc(b, ir.IntType(32)), 8))


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def _i64(value: int) -> Any:
    return ir.IntType(64)(value)


# ------------------------------------------------------------------------------------------ multiplying


@any_intrinsic
def panel_step(
    typing: Any, fmt: Any, acc: Any, scratch: Any, controls: Any, group: Any, vector_size: Any, xq: Any, xs: Any,
    xinfo: Any, at: Any, groups: Any,
) -> Any:  # fmt: skip
    """The next 32 columns, whose group of the panel begins at scratch[group]; `at` and `groups` as in `group_step`."""
    kind = simd.literal(fmt)
    if kind not in (INT8, INT4, INT4M) or not is_accumulator(acc, _SUMS):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        e = Emitter(
            context, builder, signature, values, "fmt acc scratch controls group vector_size xq xs xinfo at groups"
        )
        return _emit_panel_step(e, kind)

    index = types.intp
    return acc(fmt, acc, scratch, index, index, index, xq, xs, xinfo, index, index), codegen


def _emit_panel_step(e: Emitter, kind: int) -> Any:
    builder, tokens = e.builder, range(e.acc_type.dtype.count)
    dots = _emit_dots(e, kind)
    sums = {}
    for r in range(e.acc_type.count):
        scale = _load(e, _SUMS.llvm, _row_group(e, r), SCALES)
        minimum = _load(e, _SUMS.llvm, _row_group(e, r), MINIMUMS) if kind == INT4M else None
        for t in tokens:
            xs = e.spread(_SUMS, "xs", e.offset(e.at, (e.groups, t)))
            dot = builder.sitofp(dots[r, t], _SUMS.llvm)
            total = simd.fma.emit(builder, dot, builder.fmul(scale, xs), builder.extract_value(e.acc, (r, t)))
            if kind == INT4M:
                x_total = builder.bitcast(_info(e, t, TOTAL), _SUMS.llvm)
                total = simd.fma.emit(builder, minimum, x_total, total)
            sums[r, t] = total
    return e.result(sums)


def _row_group(e: Emitter, r: int) -> Any:
    """Where the group begins in the panel of the r-th rows."""
    return e.offset(e.group, (e.vector_size, r))


def _emit_dots(e: Emitter, kind: int) -> dict[tuple[int, int], Any]:
    """Σ q·X over the group, the outlier included, minus what the bytes have too much of q."""
    builder, each = e.builder, e.each()
    bias = bias_of(kind)
    zero = simd.constant(_INTEGERS, 0)
    start = {(r, t): _emit_outlier(e, kind, r, t, zero if bias is None else _info(e, t, bias)) for r, t in each}
    dots = start if simd.HAS_VNNI or kind == INT8 else dict.fromkeys(each, simd.constant(_SHORTS, 0))
    for j in range(WORDS):
        w = [_load(e, _BYTES, _row_group(e, r), j * LANES) for r in range(e.acc_type.count)]
        for t in range(e.acc_type.dtype.count):
            x = _spread_four(e, t, 4 * j)
            for r in range(e.acc_type.count):
                if simd.HAS_VNNI:
                    dots[r, t] = simd.dot_bytes.emit(builder, dots[r, t], w[r], x)
                elif kind == INT8:
                    positive = simd.absolute_bytes.emit(builder, w[r])
                    product = simd.multiply_add_bytes.emit(builder, positive, simd.with_sign_of.emit(builder, x, w[r]))
                    dots[r, t] = pinned(builder, builder.add(dots[r, t], simd.add_pairs.emit(builder, product)))
                else:  # 8 times 2·15·127 is 30,480: fits int16
                    product = simd.multiply_add_bytes.emit(builder, w[r], x)
                    dots[r, t] = pinned(builder, builder.add(dots[r, t], product))
    if not (simd.HAS_VNNI or kind == INT8):
        dots = {at: builder.add(simd.add_pairs.emit(builder, dot), start[at]) for at, dot in dots.items()}
    return dots


def _emit_outlier(e: Emitter, kind: int, r: int, t: int, bias: Any) -> Any:
    """bias + q·(what is left of the group's outlier)."""
    builder, word = e.builder, ir.IntType(32)
    outlier = simd.emit_load(e.context, builder, e.xinfo_type, e.xinfo, e.info_at(t, OUTLIER), word, 4)
    place = builder.lshr(outlier, word(16))
    which = builder.zext(builder.lshr(place, word(5)), ir.IntType(64))
    q = _load(e, _INTEGERS, e.offset(_row_group(e, r), (which, LANES)), 0)
    if simd.HAS_AVX2:
        byte = builder.zext(builder.lshr(builder.and_(place, word(24)), word(3)), ir.IntType(64))
        control = _load(e, _BYTES, e.offset(e.controls, (byte, LANES)), 0)
        q = builder.bitcast(simd.shuffle_bytes.emit(builder, builder.bitcast(q, _BYTES), control), _INTEGERS)
    else:
        q = builder.lshr(q, simd.broadcast(builder, builder.and_(place, word(31)), LANES))
        q = builder.and_(q, simd.constant(_INTEGERS, 255))
    if kind == INT8 and not simd.HAS_VNNI:
        top = simd.constant(_INTEGERS, 24)
        q = builder.and_(builder.ashr(builder.shl(q, top), top), simd.constant(_INTEGERS, 0xFFFF))
    extra = builder.bitcast(_info(e, t, OUTLIER), _SHORTS)
    return simd.dot_shorts.emit(builder, bias, builder.bitcast(q, _SHORTS), extra)


def _load(e: Emitter, llvm: Any, base: Any, offset: int) -> Any:
    index = e.builder.add(base, ir.IntType(64)(offset))
    return simd.emit_load(e.context, e.builder, e.scratch_type, e.scratch, index, llvm, 4 * LANES)


def _spread_four(e: Emitter, t: int, column: int) -> Any:
    """Token t's activations at 4 columns of the group, for every row."""
    place = e.offset(ir.IntType(64)(column), (e.at, GROUP), (e.groups, GROUP * t))
    scalar = simd.emit_load(e.context, e.builder, e.xq_type, e.xq, place, ir.IntType(32), 4)
    return e.builder.bitcast(simd.broadcast(e.builder, scalar, LANES), _BYTES)


def _info(e: Emitter, t: int, field: int) -> Any:
    scalar = simd.emit_load(e.context, e.builder, e.xinfo_type, e.xinfo, e.info_at(t, field), ir.IntType(32), 4)
    return simd.broadcast(e.builder, scalar, LANES)


@any_intrinsic
def fence(typing: Any) -> Any:
    """Nothing: but what comes later in the program is not loaded earlier, into registers that are not there."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), codegen


@cache
def panel_product(fmt: int) -> Any:
    """The kernel for blocks of one quantized format and at least FEW_TOKENS tokens."""
    quant_bytes = QUANT_BYTES[fmt]
    rows_of_panel = VECTORS * BLOCKS
    unpacks_late = MANY_TOKENS > 0

    @inlined
    @kernel
    def unpack(arena, matrix, block, g, scratch, at, vector_size):
        """Group g of the panel's blocks, from `block` on."""
        for r in range(VECTORS):
            # A panel that the matrix does not fill repeats its last block; what comes of it is not stored.
            first = min(block + r * BLOCKS, matrix.blocks - 1)
            apart = matrix.groups if first + 1 < matrix.blocks else 0
            tile = first * matrix.groups + g
            unpack_group(
                fmt, arena, matrix.quants + tile * quant_bytes, matrix.scales + tile * (2 * ROWS),
                matrix.minimums + tile * (2 * ROWS), apart, scratch, at + r * vector_size,
            )  # fmt: skip

    @inlined
    @kernel
    def tile(scratch, at, groups, inputs, token, outputs, out_at, rows):
        acc = zeros(_SUMS, VECTORS, TOKENS)
        for g in range(groups):
            acc = panel_step(
                fmt, acc, scratch, at, at + CONTROLS + g * GROUP_SIZE, groups * GROUP_SIZE,
                inputs.xq, inputs.xs, inputs.xinfo, token * groups + g, groups,
            )  # fmt: skip
        store_tile(acc, outputs.numbers, out_at + token * outputs.stride, outputs.stride, rows)

    @inlined
    @kernel
    def double_tile(arena, matrix, block, scratch, at, inputs, token, outputs, out_at, rows):
        """Twice as many tokens, and no more, so that unpacked weights need not be kept."""
        groups, later = matrix.groups, token + TOKENS
        xq, xs, xinfo = inputs.xq, inputs.xs, inputs.xinfo
        group = at + CONTROLS
        a, b = zeros(_SUMS, VECTORS, TOKENS), zeros(_SUMS, VECTORS, TOKENS)
        for g in range(groups):
            unpack(arena, matrix, block, g, scratch, group, GROUP_SIZE)
            fence()
            a = panel_step(fmt, a, scratch, at, group, GROUP_SIZE, xq, xs, xinfo, token * groups + g, groups)
            fence()
            b = panel_step(fmt, b, scratch, at, group, GROUP_SIZE, xq, xs, xinfo, later * groups + g, groups)
        store_tile(a, outputs.numbers, out_at + token * outputs.stride, outputs.stride, rows)
        store_tile(b, outputs.numbers, out_at + later * outputs.stride, outputs.stride, rows)

    @kernel
    def product(arena, matrix, inputs, outputs, token, token_end, first, end, scratch, at):
        """Blocks first … end-1 times tokens token … token_end-1."""
        write_controls(scratch, at)
        # The last tile repeats tokens of the one before rather than being smaller.
        for block in range(first, end, rows_of_panel):
            rows = min(matrix.rows, end * ROWS) - block * ROWS
            place = outputs.at + block * ROWS
            if unpacks_late and token_end - token <= MANY_TOKENS:
                for t in range(token, token_end, 2 * TOKENS):
                    start = min(t, token_end - 2 * TOKENS)
                    double_tile(arena, matrix, block, scratch, at, inputs, start, outputs, place, rows)
                continue
            for g in range(matrix.groups):
                group = at + CONTROLS + g * GROUP_SIZE
                unpack(arena, matrix, block, g, scratch, group, matrix.groups * GROUP_SIZE)
            for t in range(token, token_end, TOKENS):
                start = min(t, token_end - TOKENS)
                tile(scratch, at, matrix.groups, inputs, start, outputs, place, rows)

    return product
