# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The innermost steps of matrix products: a few blocks of 8 rows times a few tokens, held in registers.

`acc` is a tuple of tuples of vectors: acc[r][t] holds the sums of the 8 rows (lanes) of block r for token t. A step
multiplies the next columns and adds. It is emitted for whatever sizes the type of `acc` has, by Python loops, so that
LLVM sees one straight run of vector instructions. See `matmul` for the order of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import types

from qkv.kernels import simd
from qkv.kernels.formats import BF16, F32, GROUP, INT4, INT4M, INT8, QUANT_BYTES, ROWS
from qkv.kernels.simd import any_intrinsic, f32x8, f32x16, i8x32, i16x16, i32x8, literal, named_vector, u8x32, u16x8

DENSE_STEP = 4
"""Columns that `dense_step` takes."""

INFO = 4
BIAS4, BIAS8, OUTLIER, TOTAL = range(INFO)
"""The int32 fields of `xinfo` for a group of 32 activations.

BIAS4, BIAS8: -8 and -128 times the sum of their integers. OUTLIER: the number whose integer does not fit int8; xq holds
±127 of it, the lower 16 bits the rest, the upper ones 8 times its column. TOTAL: the bits of the float32 xs · sum.
"""


class Emitter:
    """What the steps below share while they emit: where things are, and how to load them."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any, names: str) -> None:
        self.context, self.builder = context, builder
        for name, kind, value in zip(names.split(), signature.args, values, strict=True):
            setattr(self, name, value)
            setattr(self, f"{name}_type", kind)

    def __getattr__(self, name: str) -> Any:  # for the type checker: the names given to __init__
        raise AttributeError(name)

    def offset(self, base: Any, *terms: tuple[Any, int]) -> Any:
        """base + Σ value · factor."""
        for value, factor in terms:
            base = self.builder.add(base, self.builder.mul(value, ir.IntType(64)(factor)))
        return base

    def load(self, vector: Any, array: str, index: Any) -> Any:
        kind, value = getattr(self, f"{array}_type"), getattr(self, array)
        return simd.emit_load(self.context, self.builder, kind, value, index, vector.llvm, vector.bytes)

    def spread(self, vector: Any, array: str, index: Any) -> Any:
        kind, value = getattr(self, f"{array}_type"), getattr(self, array)
        return simd.emit_spread(self.context, self.builder, vector, kind, value, index)

    def half(self, index: Any) -> Any:
        return simd.half_to_float.emit(self.builder, self.load(u16x8, "arena", index))

    def prefetch(self, step_bytes: int) -> None:
        """Ask for as many bytes as this step takes, from `soon` on. The processor's own prefetching starts late."""
        for line in range(0, step_bytes * self.acc_type.count, 64):
            index = self.builder.add(self.soon, ir.IntType(64)(line))
            simd.emit_prefetch(self.context, self.builder, self.arena_type, self.arena, index)

    @property
    def lanes(self) -> int:
        """Rows in one vector of the accumulator."""
        return int(self.acc_type.dtype.dtype.lanes)

    def each(self) -> list[tuple[int, int]]:
        """The (r, t) of every accumulator."""
        return [(r, t) for r in range(self.acc_type.count) for t in range(self.acc_type.dtype.count)]

    def outputs(self) -> Iterator[tuple[Any, Any, Any]]:
        """For every accumulator: where it goes, its sums, and how many of its rows exist."""
        for r, t in self.each():
            place = self.offset(self.at, (self.stride, t), (ir.IntType(64)(self.lanes), r))
            left = self.builder.sub(self.rows, ir.IntType(64)(self.lanes * r))
            yield place, self.builder.extract_value(self.acc, (r, t)), left

    def info_at(self, t: int, field: int) -> Any:
        """Where `xinfo` has a field of token t's group."""
        return self.offset(ir.IntType(64)(field), (self.at, INFO), (self.groups, INFO * t))

    def result(self, sums: dict[tuple[int, int], Any]) -> Any:
        acc = self.acc
        for at, value in sums.items():
            acc = self.builder.insert_value(acc, value, at)
        return acc


def is_accumulator(acc: Any, *vectors: Any) -> bool:
    """Whether a type is that of an `acc` of one of these vectors."""
    return isinstance(acc, types.UniTuple) and isinstance(acc.dtype, types.UniTuple) and acc.dtype.dtype in vectors


@any_intrinsic
def zeros(typing: Any, vector: Any, blocks: Any, tokens: Any) -> Any:
    """An `acc` of zeros, for numbers of blocks and tokens known at compile time."""
    kind = named_vector(vector)
    if kind is None or literal(blocks) is None or literal(tokens) is None:
        return None
    acc = types.UniTuple(types.UniTuple(kind, literal(tokens)), literal(blocks))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(context.get_value_type(acc), None)

    return acc(vector, blocks, tokens), codegen


# ------------------------------------------------------------------------------------------ quantized formats


@any_intrinsic
def group_step(
    typing: Any, fmt: Any, acc: Any, arena: Any, quants: Any, scales: Any, minimums: Any, xq: Any, xs: Any, xinfo: Any,
    at: Any, groups: Any, soon: Any,
) -> Any:  # fmt: skip
    """The next 32 columns of an int8, int4 or int4m matrix.

    quants, scales, minimums: byte offsets of this group in the first block; at: its index in xs and xinfo for the first
    token. The next block, and the next token, are `groups` groups further on. soon: where weights will be read later.
    """
    kind = literal(fmt)
    if kind not in (INT8, INT4, INT4M) or not is_accumulator(acc, f32x8):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        names = "fmt acc arena quants scales minimums xq xs xinfo at groups soon"
        return _emit_group(Emitter(context, builder, signature, values, names), kind)

    index = types.intp
    return acc(fmt, acc, arena, index, index, index, xq, xs, xinfo, index, index, index), codegen


def _emit_group(e: Emitter, kind: int) -> Any:
    builder = e.builder
    e.prefetch(QUANT_BYTES[kind])
    dots = _emit_int8_dots(e) if kind == INT8 else _emit_int4_dots(e, kind)
    sums = {}
    for r in range(e.acc_type.count):
        scale = e.half(e.offset(e.scales, (e.groups, 16 * r)))
        minimum = e.half(e.offset(e.minimums, (e.groups, 16 * r))) if kind == INT4M else None
        for t in range(e.acc_type.dtype.count):
            token = e.offset(e.at, (e.groups, t))
            xs = e.spread(f32x8, "xs", token)
            dot = builder.sitofp(builder.add(dots[r, t], _emit_outlier(e, kind, r, t)), f32x8.llvm)
            total = simd.fma.emit(builder, dot, builder.fmul(scale, xs), builder.extract_value(e.acc, (r, t)))
            if kind == INT4M:
                x_total = builder.bitcast(_emit_info(e, t, TOTAL), f32x8.llvm)
                total = simd.fma.emit(builder, minimum, x_total, total)
            sums[r, t] = total
    return e.result(sums)


def _emit_int4_dots(e: Emitter, kind: int) -> dict[tuple[int, int], Any]:
    """Σ (q - 8)·x over the group, or Σ q·x where the format has a minimum."""
    builder, quant_bytes = e.builder, QUANT_BYTES[kind]
    dots: dict[tuple[int, int], Any] = {}
    if simd.HAS_VNNI:
        dots = _emit_corrections(e, kind)
    for j in range(GROUP // 8):
        for half in (0, 1):
            for r in range(e.acc_type.count):
                pair = e.load(u8x32, "arena", e.offset(e.quants, (e.groups, quant_bytes * r), (ir.IntType(64)(32), j)))
                q = (simd.high_nibbles if half else simd.low_nibbles).emit(builder, pair)
                for t in range(e.acc_type.dtype.count):
                    x = _emit_four(e, t, 16 * half + 4 * j)
                    if simd.HAS_VNNI:
                        dots[r, t] = simd.dot_bytes.emit(builder, dots[r, t], q, x)
                        continue
                    product = simd.multiply_add_bytes.emit(builder, q, x)
                    # 8 times 2·15·127 is 30,480: fits int16
                    dots[r, t] = pinned(builder, builder.add(dots[r, t], product)) if (r, t) in dots else product
    if not simd.HAS_VNNI:
        corrections = _emit_corrections(e, kind)
        for at, total in dots.items():
            dots[at] = builder.add(simd.add_pairs.emit(builder, total), corrections[at])
    return dots


def _emit_int8_dots(e: Emitter) -> dict[tuple[int, int], Any]:
    """Σ q·x over the group."""
    builder = e.builder
    # One factor of an AVX2 or VNNI byte product is unsigned: |q|·(sign(q)·x), or (q + 128)·x with 128·Σx taken away.
    dots = _emit_corrections(e, INT8)
    for j in range(GROUP // 4):
        for r in range(e.acc_type.count):
            q = e.load(i8x32, "arena", e.offset(e.quants, (e.groups, 256 * r), (ir.IntType(64)(32), j)))
            positive = (
                builder.xor(q, simd.constant(i8x32.llvm, -128))
                if simd.HAS_VNNI
                else simd.absolute_bytes.emit(builder, q)
            )
            for t in range(e.acc_type.dtype.count):
                x = _emit_four(e, t, 4 * j)
                if simd.HAS_VNNI:
                    dots[r, t] = simd.dot_bytes.emit(builder, dots[r, t], positive, x)
                    continue
                products = simd.multiply_add_bytes.emit(builder, positive, simd.with_sign_of.emit(builder, x, q))
                dots[r, t] = pinned(builder, builder.add(dots[r, t], simd.add_pairs.emit(builder, products)))
    return dots


def _emit_corrections(e: Emitter, kind: int) -> dict[tuple[int, int], Any]:
    """What the sums of unsigned weights begin with, for every accumulator: see `bias_of`."""
    field = bias_of(kind)
    if field is None:
        return dict.fromkeys(e.each(), simd.constant(i32x8.llvm, 0))
    corrections = {t: _emit_info(e, t, field) for t in range(e.acc_type.dtype.count)}
    return {(r, t): corrections[t] for r, t in e.each()}


def bias_of(kind: int) -> int | None:
    """The field of `xinfo` that makes up for a format's integers being unsigned, if they are."""
    return {INT4: BIAS4, INT4M: None, INT8: BIAS8 if simd.HAS_VNNI else None}[kind]


def _emit_info(e: Emitter, t: int, field: int) -> Any:
    """A field of what `xinfo` says about token t's group, for every row."""
    return e.spread(i32x8, "xinfo", e.info_at(t, field))


def _emit_outlier(e: Emitter, kind: int, r: int, t: int) -> Any:
    """q · extra for the group's outlier, whose activation is `extra` more than its int8 says."""
    builder = e.builder
    word = ir.IntType(32)
    outlier = simd.emit_load(e.context, builder, e.xinfo_type, e.xinfo, e.info_at(t, OUTLIER), word, 4)
    place = builder.lshr(outlier, word(16))  # 8·column: 32 times the word it is in, plus the bits to shift that right
    if kind != INT8:  # columns from 16 on are the upper halves of the bytes
        place = builder.or_(builder.and_(place, word(127)), builder.shl(builder.lshr(place, word(7)), word(2)))
    line = builder.zext(builder.and_(place, word(~31)), ir.IntType(64))
    words = e.load(i32x8, "arena", e.offset(e.quants, (e.groups, QUANT_BYTES[kind] * r), (line, 1)))
    shift = simd.broadcast(builder, builder.and_(place, word(31)), ROWS)
    if kind != INT8:
        q = builder.and_(builder.lshr(words, shift), simd.constant(i32x8.llvm, 15))
    elif simd.HAS_VNNI:  # q + 128, as in the other products
        q = builder.and_(builder.lshr(words, shift), simd.constant(i32x8.llvm, 255))
        q = builder.xor(q, simd.constant(i32x8.llvm, 128))
    else:
        left = builder.sub(simd.constant(i32x8.llvm, 24), shift)
        q = builder.ashr(builder.shl(words, left), simd.constant(i32x8.llvm, 24))
        q = builder.and_(q, simd.constant(i32x8.llvm, 0xFFFF))
    # q fits 16 bits, so the other half of the pair, which meets the column, is 0.
    q, extra = (builder.bitcast(value, i16x16.llvm) for value in (q, _emit_info(e, t, OUTLIER)))
    return simd.multiply_add_shorts.emit(builder, q, extra)


def _emit_four(e: Emitter, t: int, column: int) -> Any:
    """Token t's activations at 4 columns of the group, for every row."""
    token = e.offset(ir.IntType(64)(column), (e.at, GROUP), (e.groups, GROUP * t))
    return e.spread(i8x32, "xq", token)


def pinned(builder: Any, value: Any) -> Any:
    """The value, in a register, here: keeps LLVM from summing as a tree, whose leaves would not fit the registers."""
    if not simd.HAS_AVX2 or value.type not in (i16x16.llvm, i32x8.llvm):
        return value
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=x,0", [value], False)


# ------------------------------------------------------------------------------------------ f32 and bf16


@any_intrinsic
def dense_step(
    typing: Any, fmt: Any, acc: Any, arena: Any, quants: Any, x: Any, at: Any, groups: Any, soon: Any
) -> Any:
    """The next 4 columns of an f32 or bf16 matrix.

    quants: their byte offset in the first block; at: their index in x for the first token. The next block, and the next
    token, are `groups` groups further on.
    """
    kind = literal(fmt)
    if kind not in (F32, BF16) or not is_accumulator(acc, f32x8):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _emit_dense(Emitter(context, builder, signature, values, "fmt acc arena quants x at groups soon"), kind)

    return acc(fmt, acc, arena, types.intp, x, types.intp, types.intp, types.intp), codegen


def _emit_dense(e: Emitter, kind: int) -> Any:
    size = 4 if kind == F32 else 2
    e.prefetch(DENSE_STEP * ROWS * size)
    sums = {(r, t): e.builder.extract_value(e.acc, (r, t)) for r, t in e.each()}
    for k in range(DENSE_STEP):
        inputs = [
            e.spread(f32x8, "x", e.offset(ir.IntType(64)(k), (e.at, 1), (e.groups, GROUP * t)))
            for t in range(e.acc_type.dtype.count)
        ]
        for r in range(e.acc_type.count):
            at = e.offset(e.quants, (e.groups, GROUP * ROWS * size * r), (ir.IntType(64)(ROWS * size), k))
            if kind == F32:
                w = e.load(f32x8, "arena", at)
            else:
                w = simd.bf16_to_float.emit(e.builder, e.load(u16x8, "arena", at))
            for t, x in enumerate(inputs):
                sums[r, t] = simd.fma.emit(e.builder, w, x, sums[r, t])
    return e.result(sums)


# ------------------------------------------------------------------------------------------ results


@any_intrinsic
def store_tile(typing: Any, acc: Any, out: Any, at: Any, stride: Any, rows: Any) -> Any:
    """Write acc[r][t] to out[at + t·stride + lanes·r], but no more than `rows` rows of each token."""
    if not is_accumulator(acc, f32x8, f32x16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        e = Emitter(context, builder, signature, values, "acc out at stride rows")
        whole = builder.icmp_signed(">=", e.rows, ir.IntType(64)(e.lanes * e.acc_type.count))
        with builder.if_else(whole) as (then, otherwise):
            with then:
                for place, sums, _ in e.outputs():
                    simd.emit_store(context, builder, e.out_type, e.out, place, sums)
            with otherwise:
                for place, sums, left in e.outputs():
                    simd.emit_store_lanes(context, builder, e.out_type, e.out, place, sums, left)
        return context.get_dummy_value()

    return types.void(acc, out, types.intp, types.intp, types.intp), codegen
