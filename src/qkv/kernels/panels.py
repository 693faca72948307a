# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Products of quantized weights and many tokens: a few rows are unpacked once, and then meet all tokens.

A *panel* is one block of 8 rows (or two blocks side by side, where a register holds 16 numbers) as bytes: no nibbles,
no float16. It lies in the thread's scratch memory, small enough for the nearest caches, and tiles of 8 tokens run over
it. The sums are those of `matmul`, in the same order: a token's numbers have the same bits either way.

    for each group of 32 columns:  8 words: byte 4·l + t of word j is row l's column 4j + t
                                   the scales of the rows, and their minimums, as float32
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import types

from qkv.kernels import simd
from qkv.kernels.formats import GROUP, INT4, INT4M, INT8, ROWS
from qkv.kernels.jit import inlined, kernel
from qkv.kernels.simd import any_intrinsic, f32x8, f32x16, half_to_float, i32x8, load, store, u8x32, u16x8
from qkv.kernels.tiles import OUTLIER, TOTAL, Emitter, bias_of, is_accumulator, pinned, store_tile, zeros

PANEL_BLOCKS = 2 if simd.HAS_512 and simd.HAS_VNNI else 1
PANEL_TOKENS = 8 if simd.HAS_VNNI else 4
"""Tokens of a tile: as many sums as the registers hold, one before and one after scaling for each."""

LANES = ROWS * PANEL_BLOCKS
_SUMS = f32x16 if PANEL_BLOCKS == 2 else f32x8
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)

WORDS = GROUP // 4
SCALES, MINIMUMS, GROUP_SIZE = WORDS * LANES, (WORDS + 1) * LANES, (WORDS + 2) * LANES  # in float32 elements
CONTROLS = 4 * LANES
"""A panel begins with 4 shuffles: the b-th brings byte b of every 4 to their front, and zeros to the others."""


def panel_size(columns: int) -> int:
    """Float32 elements of scratch memory that a panel of so many columns takes."""
    return CONTROLS + -(-columns // GROUP) * GROUP_SIZE


# ------------------------------------------------------------------------------------------ unpacking


@cache
def fill_for(fmt: int) -> Any:
    """The kernel that unpacks blocks of a format."""
    quant_bytes = GROUP * ROWS if fmt == INT8 else GROUP * ROWS // 2

    @kernel
    def fill(arena, matrix, block, scratch, at):
        """Make the panel of block `block` and, in a panel of two, of the next (of the same one if it is the last)."""
        for b in range(4):
            for lane in range(0, LANES, 8):
                store(scratch, at + b * LANES + lane, shuffle_to_front(b))
        groups = matrix.groups
        for half in range(PANEL_BLOCKS):
            source = min(block + half, matrix.blocks - 1) * groups
            for g in range(groups):
                target = at + CONTROLS + g * GROUP_SIZE + half * ROWS
                quants = matrix.quants + (source + g) * quant_bytes
                for j in range(quant_bytes // 32):
                    q = load(u8x32, arena, quants + 32 * j)
                    if fmt == INT8:
                        store(scratch, target + j * LANES, unsigned(q))
                    else:
                        store(scratch, target + j * LANES, simd.low_nibbles(q))
                        store(scratch, target + (j + WORDS // 2) * LANES, simd.high_nibbles(q))
                scales = (source + g) * (2 * ROWS)
                store(scratch, target + SCALES, half_to_float(load(u16x8, arena, matrix.scales + scales)))
                if fmt == INT4M:
                    store(scratch, target + MINIMUMS, half_to_float(load(u16x8, arena, matrix.minimums + scales)))

    return fill


@simd.operation(u8x32, u8x32)
def unsigned(builder: Any, q: Any) -> Any:
    """int8 weights as the byte products want them: q + 128 for VNNI, else as they are."""
    return builder.xor(q, simd.constant(u8x32.llvm, 128)) if simd.HAS_VNNI else q


@simd.operation(i32x8, types.int64)
def shuffle_to_front(builder: Any, b: Any) -> Any:
    """The shuffle of `CONTROLS` for byte b, for 8 numbers."""
    first = ir.Constant(i32x8.llvm, [_signed(0x80808000 | 4 * (lane % 4)) for lane in range(8)])
    return builder.add(first, simd.broadcast(builder, builder.trunc(b, ir.IntType(32)), 8))


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


# ------------------------------------------------------------------------------------------ multiplying


@any_intrinsic
def panel_step(
    typing: Any, fmt: Any, acc: Any, scratch: Any, controls: Any, group: Any, xq: Any, xs: Any, xinfo: Any, at: Any,
    groups: Any,
) -> Any:  # fmt: skip
    """The next 32 columns, whose group of the panel begins at scratch[group]; `at` and `groups` as in `group_step`."""
    kind = simd.literal(fmt)
    if kind not in (INT8, INT4, INT4M) or not is_accumulator(acc, _SUMS):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        e = Emitter(context, builder, signature, values, "fmt acc scratch controls group xq xs xinfo at groups")
        return _emit_panel_step(e, kind)

    index = types.intp
    return acc(fmt, acc, scratch, index, index, xq, xs, xinfo, index, index), codegen


def _emit_panel_step(e: Emitter, kind: int) -> Any:
    builder, tokens = e.builder, range(e.acc_type.dtype.count)
    dots = _emit_dots(e, kind, tokens)
    scale = _load(e, _SUMS.llvm, e.group, SCALES)
    minimum = _load(e, _SUMS.llvm, e.group, MINIMUMS) if kind == INT4M else None
    sums = {}
    for t in tokens:
        xs = e.spread(_SUMS, "xs", e.offset(e.at, (e.groups, t)))
        dot = builder.sitofp(dots[t], _SUMS.llvm)
        total = simd.fma.emit(builder, dot, builder.fmul(scale, xs), builder.extract_value(e.acc, (0, t)))
        if kind == INT4M:
            x_total = builder.bitcast(_info(e, t, TOTAL), _SUMS.llvm)
            total = simd.fma.emit(builder, minimum, x_total, total)
        sums[0, t] = total
    return e.result(sums)


def _emit_dots(e: Emitter, kind: int, tokens: range) -> list[Any]:
    """Σ q·X over the group, the outlier included, minus what the bytes have too much of q."""
    builder = e.builder
    bias = bias_of(kind)
    zero = simd.constant(_INTEGERS, 0)
    start = [_emit_outlier(e, kind, t, zero if bias is None else _info(e, t, bias)) for t in tokens]
    dots = start if simd.HAS_VNNI or kind == INT8 else [simd.constant(_SHORTS, 0) for _ in tokens]
    for j in range(WORDS):
        w = _load(e, _BYTES, e.group, j * LANES)
        positive = simd.absolute_bytes.emit(builder, w) if kind == INT8 and not simd.HAS_VNNI else w
        for t in tokens:
            x = _spread_four(e, t, 4 * j)
            if simd.HAS_VNNI:
                dots[t] = simd.dot_bytes.emit(builder, dots[t], w, x)
            elif kind == INT8:
                product = simd.multiply_add_bytes.emit(builder, positive, simd.with_sign_of.emit(builder, x, w))
                dots[t] = builder.add(dots[t], simd.add_pairs.emit(builder, product))
            else:  # 8 times 2·15·127 is 30,480: fits int16
                dots[t] = pinned(builder, builder.add(dots[t], simd.multiply_add_bytes.emit(builder, w, x)))
    if not (simd.HAS_VNNI or kind == INT8):
        dots = [builder.add(simd.add_pairs.emit(builder, dot), begin) for dot, begin in zip(dots, start, strict=True)]
    return dots


def _emit_outlier(e: Emitter, kind: int, t: int, bias: Any) -> Any:
    """bias + q·(what is left of the group's outlier)."""
    builder, word = e.builder, ir.IntType(32)
    outlier = simd.emit_load(e.context, builder, e.xinfo_type, e.xinfo, e.info_at(t, OUTLIER), word, 4)
    place = builder.lshr(outlier, word(16))
    which = builder.zext(builder.lshr(place, word(5)), ir.IntType(64))
    q = _load(e, _INTEGERS, e.offset(e.group, (which, LANES)), 0)
    if simd.HAS_AVX2:
        byte = builder.zext(builder.lshr(builder.and_(place, word(24)), word(3)), ir.IntType(64))
        control = _load(e, _BYTES, e.offset(e.controls, (byte, LANES)), 0)
        q = builder.bitcast(simd.shuffle_bytes.emit(builder, builder.bitcast(q, _BYTES), control), _INTEGERS)
    else:
        q = builder.lshr(q, simd.broadcast(builder, builder.and_(place, word(31)), LANES))
        q = builder.and_(q, simd.constant(_INTEGERS, 255))
    if kind == INT8 and not simd.HAS_VNNI:
        top = simd.constant(_INTEGERS, 24)
        q = builder.ashr(builder.shl(q, top), top)
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


@cache
def panel_product(fmt: int) -> Any:
    """The kernel for blocks of one quantized format and at least PANEL_TOKENS tokens."""
    fill = fill_for(fmt)

    @inlined
    @kernel
    def tile(scratch, at, groups, xq, xs, xinfo, token, out, out_at, stride, rows):
        acc = zeros(_SUMS, 1, PANEL_TOKENS)
        for g in range(groups):
            group = at + CONTROLS + g * GROUP_SIZE
            acc = panel_step(fmt, acc, scratch, at, group, xq, xs, xinfo, token * groups + g, groups)
        store_tile(acc, out, out_at + token * stride, stride, rows)

    @kernel
    def product(arena, matrix, xq, xs, xinfo, out, out_at, stride, token, token_end, first, end, scratch, at):
        """Blocks first … end-1 times tokens token … token_end-1."""
        for block in range(first, end, PANEL_BLOCKS):
            fill(arena, matrix, block, scratch, at)
            rows = min(matrix.rows, end * ROWS) - block * ROWS
            for t in range(token, token_end, PANEL_TOKENS):
                # The last tile repeats tokens of the one before rather than being smaller.
                start = min(t, token_end - PANEL_TOKENS)
                tile(scratch, at, matrix.groups, xq, xs, xinfo, start, out, out_at + block * ROWS, stride, rows)

    return product
