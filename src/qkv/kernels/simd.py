"""Arithmetic on vectors inside Numba kernels; see `vectors` for the types and for the modes of QKV_SIMD.

    total = fma(load(f32x8, a, i), load(f32x8, b, i), total)

Two rules hold everywhere, so that modes and processors agree on every bit: comparisons and selections are spelled
out (`minimum(a, b)` is `a if a < b else b`), and rounding is to the nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from qkv.kernels.vectors import *  # noqa: F403  (kernels find all of it here)
from qkv.kernels.vectors import (
    HAS_AVX2,
    HAS_F16C,
    HAS_VNNI,
    Vector,
    any_intrinsic,
    broadcast,
    call,
    constant,
    elementwise,
    f32x8,
    i8x8,
    i8x32,
    i16x16,
    i32x8,
    mask8,
    operation,
    shuffle,
    u8x32,
    u16x8,
)

_i32x16 = ir.VectorType(ir.IntType(32), 16)

# ------------------------------------------------------------------------------------------ making and taking apart


@operation(f32x8, types.float32)
def splat(builder: Any, x: Any) -> Any:
    """The same float32 in 8 lanes."""
    return broadcast(builder, x, 8)


@operation(i32x8, types.int32)
def splat_i32(builder: Any, x: Any) -> Any:
    """The same int32 in 8 lanes."""
    return broadcast(builder, x, 8)


@operation(i32x8)
def lane_numbers(builder: Any) -> Any:
    """0, 1, … 7."""
    return ir.Constant(i32x8.llvm, list(range(8)))


def _tree(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join lanes i and i+4, then i and i+2, then i and i+1: always the same tree."""
    width = value.type.count
    while width > 1:
        width //= 2
        low = shuffle(builder, value, range(width))
        value = join(low, shuffle(builder, value, range(width, 2 * width)))
    return builder.extract_element(value, ir.IntType(32)(0))


@operation(types.float32, f32x8)
def sum_lanes(builder: Any, a: Any) -> Any:
    """The sum ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7))."""
    return _tree(builder, a, builder.fadd)


@operation(types.float32, f32x8)
def max_lanes(builder: Any, a: Any) -> Any:
    """The largest lane."""
    return _tree(builder, a, lambda low, high: builder.select(builder.fcmp_ordered(">", low, high), low, high))


@operation(types.float32, f32x8)
def first_lane(builder: Any, a: Any) -> Any:
    """a0."""
    return builder.extract_element(a, ir.IntType(32)(0))


@operation(types.int32, i32x8)
def max_lanes_i32(builder: Any, a: Any) -> Any:
    """The largest lane."""
    return _tree(builder, a, lambda low, high: builder.select(builder.icmp_signed(">", low, high), low, high))


@operation(types.int32, i32x8)
def min_lanes_i32(builder: Any, a: Any) -> Any:
    """The smallest lane."""
    return _tree(builder, a, lambda low, high: builder.select(builder.icmp_signed("<", low, high), low, high))


@operation(types.int32, i32x8, i32x8)
def second_of_lanes_i32(builder: Any, high: Any, low: Any) -> Any:
    """The second largest of 16 numbers, given as pairs: low ≤ high in each lane."""

    def pick(relation: str, a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed(relation, a, b), a, b)

    width = high.type.count
    while width > 1:
        width //= 2
        high_a, high_b = shuffle(builder, high, range(width)), shuffle(builder, high, range(width, 2 * width))
        low_a, low_b = shuffle(builder, low, range(width)), shuffle(builder, low, range(width, 2 * width))
        low = pick(">", pick("<", high_a, high_b), pick(">", low_a, low_b))
        high = pick(">", high_a, high_b)
    return builder.extract_element(low, ir.IntType(32)(0))


@operation(types.int32, i32x8)
def sum_lanes_i32(builder: Any, a: Any) -> Any:
    """The sum of the lanes."""
    return _tree(builder, a, builder.add)


# ------------------------------------------------------------------------------------------ arithmetic


@elementwise
def add(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a + b; integers wrap around."""
    return builder.fadd(a, b) if vector.is_float else builder.add(a, b)


@elementwise
def subtract(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a - b; integers wrap around."""
    return builder.fsub(a, b) if vector.is_float else builder.sub(a, b)


@elementwise
def multiply(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a · b; integers wrap around."""
    return builder.fmul(a, b) if vector.is_float else builder.mul(a, b)


@operation(f32x8, f32x8, f32x8)
def divide(builder: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return builder.fdiv(a, b)


@operation(f32x8, f32x8, f32x8, f32x8)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def _compare(builder: Any, vector: Vector, relation: str, a: Any, b: Any) -> Any:
    if vector.is_float:
        return builder.fcmp_ordered(relation, a, b)
    return (builder.icmp_signed if vector.element.signed else builder.icmp_unsigned)(relation, a, b)


@elementwise
def minimum(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a if a < b else b."""
    return builder.select(_compare(builder, vector, "<", a, b), a, b)


@elementwise
def maximum(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a if a > b else b."""
    return builder.select(_compare(builder, vector, ">", a, b), a, b)


@operation(mask8, f32x8, f32x8)
def less(builder: Any, a: Any, b: Any) -> Any:
    """a < b; false where either is not a number."""
    return builder.fcmp_ordered("<", a, b)


@operation(mask8, i32x8, i32x8)
def less_i32(builder: Any, a: Any, b: Any) -> Any:
    """a < b."""
    return builder.icmp_signed("<", a, b)


@operation(f32x8, mask8, f32x8, f32x8)
def select(builder: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask holds, else b."""
    return builder.select(mask, a, b)


@operation(i32x8, i32x8, i32x8)
def where_not_zero(builder: Any, a: Any, b: Any) -> Any:
    """b where a is not 0, else 0."""
    zero = constant(i32x8.llvm, 0)
    return builder.select(builder.icmp_signed("==", a, zero), zero, b)


@operation(f32x8, f32x8)
def absolute(builder: Any, a: Any) -> Any:
    """|a|."""
    bits = builder.and_(builder.bitcast(a, i32x8.llvm), constant(i32x8.llvm, 0x7FFFFFFF))
    return builder.bitcast(bits, f32x8.llvm)


@operation(i32x8, i32x8, i32x8)
def bit_and(builder: Any, a: Any, b: Any) -> Any:
    """a & b."""
    return builder.and_(a, b)


@operation(i32x8, i32x8, i32x8)
def bit_or(builder: Any, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@operation(i32x8, i32x8, i32x8)
def shift_left(builder: Any, a: Any, count: Any) -> Any:
    """a << count, for counts of 0 to 31."""
    return builder.shl(a, count)


# ------------------------------------------------------------------------------------------ products of small integers


@operation(u8x32, u8x32)
def low_nibbles(builder: Any, a: Any) -> Any:
    """The lower 4 bits of every byte."""
    return builder.and_(a, constant(a.type, 15))


@operation(u8x32, u8x32)
def high_nibbles(builder: Any, a: Any) -> Any:
    """The upper 4 bits of every byte."""
    shorts = ir.VectorType(ir.IntType(16), a.type.count // 2)  # there is no shift of bytes
    shifted = builder.lshr(builder.bitcast(a, shorts), constant(shorts, 4))
    return builder.and_(builder.bitcast(shifted, a.type), constant(a.type, 15))


def _pairs(builder: Any, value: Any) -> tuple[Any, Any]:
    lanes = value.type.count
    return shuffle(builder, value, range(0, lanes, 2)), shuffle(builder, value, range(1, lanes, 2))


@operation(i16x16, u8x32, i8x32)
def multiply_add_bytes(builder: Any, a: Any, b: Any) -> Any:
    """a0·b0 + a1·b1, … over pairs of bytes, saturated to int16."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.ub.sw", i16x16.llvm, a, b)
    wide = ir.VectorType(ir.IntType(16), 32)
    even, odd = _pairs(builder, builder.mul(builder.zext(a, wide), builder.sext(b, wide)))
    return call(builder, "llvm.sadd.sat.v16i16", i16x16.llvm, even, odd)


@operation(i32x8, i16x16, i16x16)
def multiply_add_shorts(builder: Any, a: Any, b: Any) -> Any:
    """a0·b0 + a1·b1, … over pairs of int16."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.wd", i32x8.llvm, a, b)
    even, odd = _pairs(builder, builder.mul(builder.sext(a, _i32x16), builder.sext(b, _i32x16)))
    return builder.add(even, odd)


@operation(i32x8, i32x8, i16x16, i16x16)
def dot_shorts(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total0 + a0·b0 + a1·b1, … over pairs of int16. The emitter takes 16 totals as well where HAS_512 and HAS_VNNI."""
    if HAS_VNNI:
        a, b = builder.bitcast(a, total.type), builder.bitcast(b, total.type)
        return call(builder, f"llvm.x86.avx512.vpdpwssd.{32 * total.type.count}", total.type, total, a, b)
    return builder.add(total, multiply_add_shorts.emit(builder, a, b))


@operation(i8x32, i8x32, i8x32)
def shuffle_bytes(builder: Any, a: Any, control: Any) -> Any:
    """In each 16 bytes: the byte of `a` that each of `control` numbers, 0 where that is negative. Needs HAS_AVX2."""
    if a.type.count == 64:
        return call(builder, "llvm.x86.avx512.pshuf.b.512", a.type, a, control)
    return call(builder, "llvm.x86.avx2.pshuf.b", a.type, a, control)


@operation(i32x8, i32x8, u8x32, i8x32)
def dot_bytes(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total0 + a0·b0 + a1·b1 + a2·b2 + a3·b3, … over fours of bytes, exactly. Fast only where HAS_VNNI.

    The emitter takes 16 totals as well where HAS_512.
    """
    if HAS_VNNI:
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}", total.type, total, a, b)
    wide = ir.VectorType(ir.IntType(32), 32)
    even, odd = _pairs(builder, builder.mul(builder.zext(a, wide), builder.sext(b, wide)))
    first, second = _pairs(builder, builder.add(even, odd))
    return builder.add(total, builder.add(first, second))


@operation(i32x8, i16x16)
def add_pairs(builder: Any, a: Any) -> Any:
    """a0 + a1, a2 + a3, … in int32."""
    return multiply_add_shorts.emit(builder, a, constant(i16x16.llvm, 1))


@operation(u8x32, i8x32)
def absolute_bytes(builder: Any, a: Any) -> Any:
    """|a| of signed bytes; 128 for -128."""
    return builder.select(
        builder.icmp_signed("<", a, constant(i8x32.llvm, 0)), builder.sub(constant(i8x32.llvm, 0), a), a
    )


@operation(i8x32, i8x32, i8x32)
def with_sign_of(builder: Any, a: Any, b: Any) -> Any:
    """a·sign(b), with sign(0) = 0. a must not be -128."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.psign.b", i8x32.llvm, a, b)
    zero = constant(i8x32.llvm, 0)
    positive = builder.select(builder.icmp_signed("==", b, zero), zero, a)
    return builder.select(builder.icmp_signed("<", b, zero), builder.sub(zero, a), positive)


# ------------------------------------------------------------------------------------------ conversions


@any_intrinsic
def to_float(typing: Any, a: Any) -> Any:
    """Eight integers of any width as float32 (rounded to nearest above 2^24)."""
    if not isinstance(a, Vector) or a.lanes != 8 or a.is_float:
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return (builder.sitofp if a.element.signed else builder.uitofp)(values[0], f32x8.llvm)

    return f32x8(a), codegen


@operation(i32x8, f32x8)
def round_to_int(builder: Any, a: Any) -> Any:
    """The nearest int32, ties to even, for |a| < 2^22.

    Adding 1.5·2^23 leaves no bits for a fraction, so the addition itself rounds, the same way on every processor.
    """
    moved = builder.bitcast(builder.fadd(a, constant(f32x8.llvm, 12582912.0)), i32x8.llvm)
    return builder.sub(moved, constant(i32x8.llvm, 0x4B400000))


@operation(i32x8, f32x8)
def floor_to_int(builder: Any, a: Any) -> Any:
    """The largest int32 not above a, for |a| < 2^22."""
    nearest = round_to_int.emit(builder, a)
    above = builder.fcmp_ordered(">", builder.sitofp(nearest, f32x8.llvm), a)
    return builder.add(nearest, builder.sext(above, i32x8.llvm))


@operation(i32x8, f32x8)
def as_bits(builder: Any, a: Any) -> Any:
    """The float32 bits as int32."""
    return builder.bitcast(a, i32x8.llvm)


@operation(f32x8, i32x8)
def as_float(builder: Any, a: Any) -> Any:
    """The int32 bits as float32."""
    return builder.bitcast(a, f32x8.llvm)


@operation(i8x8, i32x8)
def narrow(builder: Any, a: Any) -> Any:
    """The low byte of each lane."""
    return builder.trunc(a, i8x8.llvm)


@operation(f32x8, u16x8)
def bf16_to_float(builder: Any, a: Any) -> Any:
    """bfloat16 bits are the upper half of a float32."""
    wide = builder.shl(builder.zext(a, i32x8.llvm), constant(i32x8.llvm, 16))
    return builder.bitcast(wide, f32x8.llvm)


@operation(u16x8, f32x8)
def float_to_bf16(builder: Any, a: Any) -> Any:
    """float32 as bfloat16 bits, rounded to nearest even. Not-a-number stays so."""
    bits = builder.bitcast(a, i32x8.llvm)
    odd = builder.and_(builder.lshr(bits, constant(i32x8.llvm, 16)), constant(i32x8.llvm, 1))
    rounded = builder.add(builder.add(bits, constant(i32x8.llvm, 0x7FFF)), odd)
    nan = builder.or_(bits, constant(i32x8.llvm, 0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", a, a), nan, rounded)
    return builder.trunc(builder.lshr(kept, constant(i32x8.llvm, 16)), u16x8.llvm)


@operation(f32x8, u16x8)
def half_to_float(builder: Any, a: Any) -> Any:
    """float16 bits as float32, exactly."""
    lanes = a.type.count
    floats, integers = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(ir.IntType(32), lanes)
    if HAS_F16C:
        return builder.fpext(builder.bitcast(a, ir.VectorType(ir.HalfType(), lanes)), floats)

    def number(value: int) -> Any:
        return constant(integers, value)

    wide = builder.zext(a, integers)
    sign = builder.shl(builder.and_(wide, number(0x8000)), number(16))
    magnitude = builder.shl(builder.and_(wide, number(0x7FFF)), number(13))
    exponent = builder.and_(magnitude, number(0x7C00 << 13))
    normal = builder.add(magnitude, number((127 - 15) << 23))
    # A subnormal half is an integer times 2^-24: give it the exponent of 2^-14 and take 2^-14 away again.
    lifted = builder.bitcast(builder.add(normal, number(1 << 23)), floats)
    subnormal = builder.bitcast(builder.fsub(lifted, constant(floats, 2.0**-14)), integers)
    special = builder.add(normal, number((128 - 16) << 23))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7C00 << 13))
    special = builder.or_(special, builder.select(is_nan, number(0x400000), number(0)))  # as the instruction does
    result = builder.select(builder.icmp_unsigned("==", exponent, number(0)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned("==", exponent, number(0x7C00 << 13)), special, result)
    return builder.bitcast(builder.or_(result, sign), floats)


@operation(u16x8, f32x8)
def float_to_half(builder: Any, a: Any) -> Any:
    """float32 as float16 bits, clamped to ±65504, then rounded to nearest even. Not-a-number stays so."""
    top = constant(f32x8.llvm, 65504.0)
    bottom = constant(f32x8.llvm, -65504.0)
    a = builder.select(builder.fcmp_ordered(">", a, top), top, a)
    a = builder.select(builder.fcmp_ordered("<", a, bottom), bottom, a)
    if HAS_F16C:
        return builder.bitcast(builder.fptrunc(a, ir.VectorType(ir.HalfType(), 8)), u16x8.llvm)

    def number(value: int) -> Any:
        return constant(i32x8.llvm, value)

    bits = builder.bitcast(a, i32x8.llvm)
    sign = builder.and_(builder.lshr(bits, number(16)), number(0x8000))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    # Below 2^-14 the half is subnormal: adding 0.5 moves its last bit to the float's last bit, and rounds.
    moved = builder.fadd(builder.bitcast(magnitude, f32x8.llvm), constant(f32x8.llvm, 0.5))
    subnormal = builder.sub(builder.bitcast(moved, i32x8.llvm), number(0x3F000000))
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    rounded = builder.add(builder.add(magnitude, number(0xFFF - (112 << 23))), odd)
    normal = builder.lshr(rounded, number(13))
    nan = builder.or_(builder.and_(builder.lshr(magnitude, number(13)), number(0x3FF)), number(0x7E00))
    result = builder.select(builder.icmp_unsigned("<", magnitude, number(113 << 23)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">", magnitude, number(0x7F800000)), nan, result)
    return builder.trunc(builder.or_(result, sign), u16x8.llvm)


# ------------------------------------------------------------------------------------------ exp

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits, so that n·_LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4
_EXP_LOWEST = -87.33654  # e^x below this is under 2^-126, the smallest normal number
_EXP_HIGHEST = 88.37626  # 2^n with n = 127 is the largest power

# (e^r - 1 - r) / r², |r| ≤ ln(2)/2, by a minimax fit of the relative error (3e-9): lowest power first.
_EXP_SERIES = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)


@operation(f32x8, i32x8)
def power_of_two(builder: Any, n: Any) -> Any:
    """2^n for -126 ≤ n ≤ 127, by writing the exponent."""
    return builder.bitcast(builder.shl(builder.add(n, constant(i32x8.llvm, 127)), constant(i32x8.llvm, 23)), f32x8.llvm)


@operation(f32x8, f32x8)
def exp(builder: Any, x: Any) -> Any:
    """e^x within 1 ulp or so. exp(0) = 1 exactly; 0 below -87.34 (and for -inf); constant above 88.37; NaN stays.

    x = n·ln 2 + r, e^x = 2^n · e^r.
    """

    def number(value: float) -> Any:
        return constant(f32x8.llvm, value)

    clamped = builder.select(builder.fcmp_ordered("<", x, number(_EXP_LOWEST)), number(_EXP_LOWEST), x)
    clamped = builder.select(builder.fcmp_ordered(">", x, number(_EXP_HIGHEST)), number(_EXP_HIGHEST), clamped)
    n = round_to_int.emit(builder, builder.fmul(clamped, number(_LOG2_E)))
    whole = builder.sitofp(n, f32x8.llvm)
    r = fma.emit(builder, whole, number(-_LN2_HIGH), clamped)
    r = fma.emit(builder, whole, number(-_LN2_LOW), r)
    series = number(_EXP_SERIES[-1])
    for coefficient in reversed(_EXP_SERIES[:-1]):
        series = fma.emit(builder, series, r, number(coefficient))
    power = builder.fadd(fma.emit(builder, builder.fmul(r, r), series, r), number(1.0))
    result = builder.fmul(power, power_of_two.emit(builder, n))
    return builder.select(builder.fcmp_ordered("<", x, number(_EXP_LOWEST)), number(0.0), result)
