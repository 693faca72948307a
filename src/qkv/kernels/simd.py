"""Arithmetic on vectors inside Numba kernels; see `values` for the types and `isa` for the modes of QKV_SIMD.

    total = fma(load(f32x8, a, i), load(f32x8, b, i), total)

Two rules hold everywhere, so that modes and processors agree on every bit: comparisons and selections are spelled
out (`minimum(a, b)` is `a if a < b else b`), and rounding is to the nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import types
from numba.core.types import float32, int8, int32, uint16, uint32

from qkv.kernels import values
from qkv.kernels.isa import ISA
from qkv.kernels.memory import (
    elementwise,
    emitted,
    faults,
    load,
    operation,
    prefetch,
    spread,
    store,
    store_lanes,
    zeros,
)
from qkv.kernels.values import (
    Value,
    Vector,
    f32x8,
    f32x16,
    i8x8,
    i8x16,
    i8x32,
    i16x16,
    i32x8,
    mask8,
    u8x32,
    u16x8,
    u16x16,
)

__all__ = [  # from other modules, so that kernels find all of it here
    "Vector", "f32x8", "f32x16", "faults", "i8x8", "i8x16", "i8x32", "i16x16", "i32x8", "load", "mask8", "prefetch",
    "spread", "store", "store_lanes", "u8x32", "u16x8", "u16x16", "zeros",
]  # fmt: skip

# ------------------------------------------------------------------------------------------ making and taking apart


@operation(f32x8, types.float32)
def splat(x: Value) -> Value:
    """The same float32 in 8 lanes."""
    return x.in_lanes(8)


@operation(i32x8, types.int32)
def splat_i32(x: Value) -> Value:
    """The same int32 in 8 lanes."""
    return x.in_lanes(8)


@operation(i32x8)
def lane_numbers() -> Value:
    """0, 1, … 7."""
    return Value(None, ir.Constant(i32x8.llvm, list(range(8))), i32x8)


def _halves(a: Value) -> tuple[Value, Value]:
    return a.shuffled(range(a.lanes // 2)), a.shuffled(range(a.lanes // 2, a.lanes))


def _tree(a: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Join lanes i and i+4, then i and i+2, then i and i+1: always the same tree."""
    while a.lanes > 1:
        a = join(*_halves(a))
    return a.lane(0)


def _minimum(a: Value, b: Value) -> Value:
    return values.select(a < b, a, b)


def _maximum(a: Value, b: Value) -> Value:
    return values.select(a > b, a, b)


@operation(types.float32, f32x8)
def sum_lanes(a: Value) -> Value:
    """The sum ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7))."""
    return _tree(a, lambda low, high: low + high)


@operation(types.int32, i32x8)
def sum_lanes_i32(a: Value) -> Value:
    """The sum of the lanes."""
    return _tree(a, lambda low, high: low + high)


@operation(types.float32, f32x8)
def max_lanes(a: Value) -> Value:
    """The largest lane."""
    return _tree(a, _maximum)


@operation(types.int32, i32x8)
def max_lanes_i32(a: Value) -> Value:
    """The largest lane."""
    return _tree(a, _maximum)


@operation(types.int32, i32x8)
def min_lanes_i32(a: Value) -> Value:
    """The smallest lane."""
    return _tree(a, _minimum)


@operation(types.int32, i32x8, i32x8)
def second_of_lanes_i32(high: Value, low: Value) -> Value:
    """The second largest of 16 numbers, given as pairs: low ≤ high in each lane."""
    while high.lanes > 1:
        (high_a, high_b), (low_a, low_b) = _halves(high), _halves(low)
        low = _maximum(_minimum(high_a, high_b), _maximum(low_a, low_b))
        high = _maximum(high_a, high_b)
    return low.lane(0)


@operation(types.float32, f32x8)
def first_lane(a: Value) -> Value:
    """a0."""
    return a.lane(0)


# ------------------------------------------------------------------------------------------ arithmetic


@elementwise
def add(a: Value, b: Value) -> Value:
    """a + b; integers wrap around."""
    return a + b


@elementwise
def subtract(a: Value, b: Value) -> Value:
    """a - b; integers wrap around."""
    return a - b


@elementwise
def multiply(a: Value, b: Value) -> Value:
    """a · b; integers wrap around."""
    return a * b


@operation(f32x8, f32x8, f32x8)
def divide(a: Value, b: Value) -> Value:
    """a / b."""
    return a / b


fma = operation(f32x8, f32x8, f32x8, f32x8)(values.fma)


@elementwise
def minimum(a: Value, b: Value) -> Value:
    """a if a < b else b."""
    return _minimum(a, b)


@elementwise
def maximum(a: Value, b: Value) -> Value:
    """a if a > b else b."""
    return _maximum(a, b)


@operation(mask8, f32x8, f32x8)
def less(a: Value, b: Value) -> Value:
    """a < b; false where either is not a number."""
    return a < b


@operation(mask8, i32x8, i32x8)
def less_i32(a: Value, b: Value) -> Value:
    """a < b."""
    return a < b


select = operation(f32x8, mask8, f32x8, f32x8)(values.select)


@operation(i32x8, i32x8, i32x8)
def where_not_zero(a: Value, b: Value) -> Value:
    """b where a is not 0, else 0."""
    return values.select(a.equals(0), 0, b)


@operation(f32x8, f32x8)
def absolute(a: Value) -> Value:
    """|a|."""
    return (a.bits(int32) & 0x7FFFFFFF).bits(float32)


@operation(i32x8, i32x8, i32x8)
def bit_and(a: Value, b: Value) -> Value:
    """a & b."""
    return a & b


@operation(i32x8, i32x8, i32x8)
def bit_or(a: Value, b: Value) -> Value:
    """a | b."""
    return a | b


@operation(i32x8, i32x8, i32x8)
def shift_left(a: Value, count: Value) -> Value:
    """a << count, for counts of 0 to 31."""
    return a << count


@operation(i32x8, i32x8, u8x32, i8x32)
def dot_nibbles(total: Value, w: Value, x: Value) -> Value:
    """total + w0·x0 + … + w3·x3 over fours of bytes, with the instructions of the matrix products; 0 ≤ w ≤ 15."""
    return ISA.end_dot(ISA.add_dot(ISA.start_dot(w.signed, total), w, x), total)


# ------------------------------------------------------------------------------------------ conversions


@emitted(lambda: f32x8)
def to_float(a: Value) -> Value:
    """Eight integers of any width as float32 (rounded to nearest above 2^24)."""
    return a.to(float32)


@operation(i32x8, f32x8)
def round_to_int(a: Value) -> Value:
    """The nearest int32, ties to even, for |a| < 2^22.

    Adding 1.5·2^23 leaves no bits for a fraction, so the addition itself rounds, the same way on every processor.
    """
    return (a + 12582912.0).bits(int32) - 0x4B400000


@operation(i32x8, f32x8)
def floor_to_int(a: Value) -> Value:
    """The largest int32 not above a, for |a| < 2^22."""
    nearest = round_to_int.emit(a)
    return nearest - (nearest.to(float32) > a).to(int32)


@operation(i32x8, f32x8)
def as_bits(a: Value) -> Value:
    """The float32 bits as int32."""
    return a.bits(int32)


@operation(f32x8, i32x8)
def as_float(a: Value) -> Value:
    """The int32 bits as float32."""
    return a.bits(float32)


@operation(i8x8, i32x8)
def narrow(a: Value) -> Value:
    """The low byte of each lane."""
    return a.to(int8)


@operation(f32x8, u16x8)
def bf16_to_float(a: Value) -> Value:
    """bfloat16 bits are the upper half of a float32."""
    return (a.to(uint32) << 16).bits(float32)


@operation(u16x8, f32x8)
def float_to_bf16(a: Value) -> Value:
    """float32 as bfloat16 bits, rounded to nearest even. Not-a-number stays so."""
    bits = a.bits(uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (values.select(a.is_nan(), bits | 0x400000, rounded) >> 16).to(uint16)


half_to_float = operation(f32x8, u16x8)(ISA.half_to_float)
float_to_half = operation(u16x8, f32x8)(ISA.float_to_half)

# ------------------------------------------------------------------------------------------ exp

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits, so that n·_LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4
_EXP_LOWEST = -87.33654  # e^x below this is under 2^-126, the smallest normal number
_EXP_HIGHEST = 88.37626  # 2^n with n = 127 is the largest power

# (e^r - 1 - r) / r², |r| ≤ ln(2)/2, by a minimax fit of the relative error (3e-9): lowest power first.
_EXP_SERIES = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)


@operation(f32x8, f32x8)
def exp(x: Value) -> Value:
    """e^x within 1 ulp or so. exp(0) = 1 exactly; 0 below -87.34 (and for -inf); constant above 88.37; NaN stays.

    x = n·ln 2 + r, e^x = 2^n · e^r.
    """
    clamped = values.select(x < _EXP_LOWEST, _EXP_LOWEST, x)
    clamped = values.select(clamped > _EXP_HIGHEST, _EXP_HIGHEST, clamped)
    n = round_to_int.emit(clamped * _LOG2_E)
    whole = n.to(float32)
    r = values.fma(whole, x.like(-_LN2_HIGH), clamped)
    r = values.fma(whole, x.like(-_LN2_LOW), r)
    series = x.like(_EXP_SERIES[-1])
    for coefficient in reversed(_EXP_SERIES[:-1]):
        series = values.fma(series, r, x.like(coefficient))
    power = values.fma(r * r, series, r) + 1.0
    two_to_n = ((n + 127) << 23).bits(float32)
    result = power * two_to_n
    return values.select(x < _EXP_LOWEST, 0.0, result)
