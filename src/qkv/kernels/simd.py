# mypy: disable-error-code="no-untyped-call"
"""Arithmetic on vectors inside Numba kernels; see `values` for the types and `isa` for the modes of QKV_SIMD.

    total = fma(load(f32x8, a, i), load(f32x8, b, i), total / 2)

Vectors have Python's operators. A number beside a vector counts for every lane, as a number of the vector's type.

Two rules hold everywhere, so that modes and processors agree on every bit: comparisons and selections are spelled
out (`minimum(a, b)` is `a if a < b else b`), and rounding is to the nearest, ties to even.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types import float32, int8, int32, uint16, uint32
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import lower_builtin

from qkv.kernels import values
from qkv.kernels.isa import ISA
from qkv.kernels.memory import emitted
from qkv.kernels.values import Value, Vector, i32x8

# ------------------------------------------------------------------------------------------ operators

_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge)
_ARITHMETIC = (operator.add, operator.iadd, operator.sub, operator.mul, operator.truediv)
_BITS = (operator.and_, operator.or_, operator.ior, operator.xor, operator.lshift, operator.rshift)


def _define(sign: Any) -> None:
    """Give the vectors of kernels an operator: that of `Value`."""

    class Typing(AbstractTemplate):
        def generic(self, given: Any, keywords: Any) -> Any:
            vector = next((each for each in given if isinstance(each, Vector)), None)
            if vector is None or not all(each == vector or isinstance(each, types.Number) for each in given):
                return None
            result = Vector(types.boolean, vector.lanes) if sign in _COMPARISONS else vector
            return result(*map(types.unliteral, given))

    def lower(context: Any, builder: Any, signature: Any, numbers: Any) -> Any:
        a, b = (Value(builder, number, kind) for number, kind in zip(numbers, signature.args, strict=True))
        return sign(a if a.lanes > 1 else b.like(a), b).ir

    infer_global(sign)(Typing)
    for kinds in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(sign, *kinds)(lower)


for _sign in (*_COMPARISONS, *_ARITHMETIC, *_BITS):
    _define(_sign)

# ------------------------------------------------------------------------------------------ making and taking apart


@emitted(lambda vector: vector)
def splat(vector: Vector, x: Value) -> Value:
    """`splat(f32x8, x)`: the same number in every lane."""
    return x.to(vector.element).in_lanes(vector.lanes)


@emitted(lambda: i32x8)
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


@emitted(lambda a: a.element)
def sum_lanes(a: Value) -> Value:
    """The sum ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7))."""
    return _tree(a, operator.add)


@emitted(lambda a: a.element)
def max_lanes(a: Value) -> Value:
    """The largest lane."""
    return _tree(a, maximum.emit)


@emitted(lambda a: a.element)
def min_lanes(a: Value) -> Value:
    """The smallest lane."""
    return _tree(a, minimum.emit)


@emitted(lambda high: high.element)
def second_of_lanes(high: Value, low: Value) -> Value:
    """The second largest of 16 numbers, given as pairs: low ≤ high in each lane."""
    larger, smaller = maximum.emit, minimum.emit
    while high.lanes > 1:
        (high_a, high_b), (low_a, low_b) = _halves(high), _halves(low)
        low = larger(smaller(high_a, high_b), larger(low_a, low_b))
        high = larger(high_a, high_b)
    return low.lane(0)


@emitted(lambda a: a.element)
def first_lane(a: Value) -> Value:
    """a0."""
    return a.lane(0)


# ------------------------------------------------------------------------------------------ arithmetic

fma = emitted(lambda a: a)(values.fma)


@emitted(lambda a: a)
def minimum(a: Value, b: Value) -> Value:
    """a if a < b else b."""
    return values.select(a < b, a, b)


@emitted(lambda a: a)
def maximum(a: Value, b: Value) -> Value:
    """a if a > b else b."""
    return values.select(a > b, a, b)


@emitted(lambda a, b: b if isinstance(b, Vector) else a)
def select(mask: Value, a: Value, b: Value) -> Value:
    """a where the mask holds, else b."""
    return values.select(mask, a, b)


@emitted(lambda b: b)
def where_not_zero(a: Value, b: Value) -> Value:
    """b where a is not 0, else 0."""
    return values.select(a.equals(0), 0, b)


@emitted(lambda a: a)
def absolute(a: Value) -> Value:
    """|a| of float32."""
    return (a.bits(int32) & 0x7FFFFFFF).bits(float32)


@emitted(lambda a: a)
def inverse(a: Value) -> Value:
    """1/a, or 0 where |a| is no normal float32 and so may have no inverse."""
    return values.select(absolute.emit(a) < 2.0**-126, 0, a.like(1) / a)


@emitted(lambda total: total)
def dot_nibbles(total: Value, w: Value, x: Value) -> Value:
    """total + w0·x0 + … + w3·x3 over fours of bytes, with the instructions of the matrix products; 0 ≤ w ≤ 15."""
    return ISA.end_dot(ISA.add_dot(ISA.start_dot(w.signed, total), w, x), total)


# ------------------------------------------------------------------------------------------ conversions


@emitted(lambda a: Vector(float32, a.lanes))
def to_float(a: Value) -> Value:
    """Integers of any width as float32 (rounded to nearest above 2^24)."""
    return a.to(float32)


@emitted(lambda a: Vector(int32, a.lanes))
def round_to_int(a: Value) -> Value:
    """The nearest int32, ties to even, for |a| < 2^22.

    Adding 1.5·2^23 leaves no bits for a fraction, so the addition itself rounds, the same way on every processor.
    """
    return (a + 12582912.0).bits(int32) - 0x4B400000


@emitted(lambda a: Vector(int32, a.lanes))
def floor_to_int(a: Value) -> Value:
    """The largest int32 not above a, for |a| < 2^22."""
    nearest = round_to_int.emit(a)
    return nearest - (nearest.to(float32) > a).to(int32)


@emitted(lambda a: Vector(int32, a.lanes))
def as_bits(a: Value) -> Value:
    """The float32 bits as int32."""
    return a.bits(int32)


@emitted(lambda a: Vector(float32, a.lanes))
def as_float(a: Value) -> Value:
    """The int32 bits as float32."""
    return a.bits(float32)


@emitted(lambda a: Vector(int8, a.lanes))
def narrow(a: Value) -> Value:
    """The low byte of each lane."""
    return a.to(int8)


@emitted(lambda a: Vector(float32, a.lanes))
def bf16_to_float(a: Value) -> Value:
    """bfloat16 bits are the upper half of a float32."""
    return (a.to(uint32) << 16).bits(float32)


@emitted(lambda a: Vector(uint16, a.lanes))
def float_to_bf16(a: Value) -> Value:
    """float32 as bfloat16 bits, rounded to nearest even. Not-a-number stays so."""
    bits = a.bits(uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (values.select(a.is_nan(), bits | 0x400000, rounded) >> 16).to(uint16)


half_to_float = emitted(lambda a: Vector(float32, a.lanes))(ISA.half_to_float)
float_to_half = emitted(lambda a: Vector(uint16, a.lanes))(ISA.float_to_half)

# ------------------------------------------------------------------------------------------ exp

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits, so that n·_LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4
_EXP_LOWEST = -87.33654  # e^x below this is under 2^-126, the smallest normal number
_EXP_HIGHEST = 88.37626  # 2^n with n = 127 is the largest power

# (e^r - 1 - r) / r², |r| ≤ ln(2)/2, by a minimax fit of the relative error (3e-9): lowest power first.
_EXP_SERIES = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)


@emitted(lambda x: x)
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
