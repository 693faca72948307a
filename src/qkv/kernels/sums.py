# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The inner loops of attention: weighted sums of the cache's numbers, for several rows at once.

`acc` is a tuple of tuples of vectors: acc[r][v] holds sums of row r for the 16 lanes from 16·v on. One step adds the
next term, factor · numbers, with one factor for each row and numbers that all rows share. Scores and outputs are such
sums: the factors are q_i and the lanes positions, or the factors are weights and the lanes dimensions.

The numbers come from the cache as it is kept, and become float32 in registers. So a number's bits do not depend on
whether a block was converted beforehand (`KV_F32` in scratch memory) or is read in passing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from qkv.kernels import simd
from qkv.kernels.kvcache import NUMBER_BYTES, emit_read
from qkv.kernels.simd import any_intrinsic, f32x16, is_flat, literal

WIDE_ROWS = 4 if simd.HAS_512 else 2
"""Rows whose sums of 32 numbers fit the registers."""


def _rows_and_vectors(acc: Any) -> tuple[int, int] | None:
    if isinstance(acc, types.UniTuple) and isinstance(acc.dtype, types.UniTuple) and acc.dtype.dtype == f32x16:
        return acc.count, acc.dtype.count
    return None


def _i64(value: int) -> Any:
    return ir.IntType(64)(value)


@any_intrinsic
def add_term(
    typing: Any, kind: Any, shared: Any, acc: Any, factors: Any, factors_at: Any, stride: Any, numbers: Any,
    numbers_at: Any, scales: Any, scales_at: Any, ahead: Any,
) -> Any:  # fmt: skip
    """acc[r][v] += factors[factors_at + r·stride] · (the 16 numbers of `kind` from numbers[numbers_at] + 16·v on).

    `shared`, scales and scales_at: see `emit_read`. `ahead` is where in a cache memory will be needed soon.
    """
    size, number, one_scale = _rows_and_vectors(acc), literal(kind), literal(shared)
    if size is None or number not in NUMBER_BYTES or one_scale is None or not is_flat(numbers):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, _, sums, factors_value, f_at, step, data, at, scales_data, scales_at, soon = values
        item = numbers.dtype.bitwidth // 8
        if numbers.dtype == types.uint8:
            simd.emit_prefetch(context, builder, numbers, data, soon)
        terms = []
        for v in range(size[1]):
            place = builder.add(at, _i64(16 * v * NUMBER_BYTES[number] // item))
            scale = scales_at if one_scale else builder.add(scales_at, _i64(16 * v))
            where = (data, place, scales_data, scale)
            terms.append(emit_read(context, builder, number, one_scale, (numbers, scales), where))
        for r in range(size[0]):
            index = builder.add(f_at, builder.mul(step, _i64(r)))
            factor = simd.emit_spread(context, builder, f32x16, factors, factors_value, index)
            for v, term in enumerate(terms):
                total = simd.fma.emit(builder, factor, term, builder.extract_value(sums, (r, v)))
                sums = builder.insert_value(sums, total, (r, v))
        return sums

    index = types.intp
    return acc(kind, shared, acc, factors, index, index, numbers, index, scales, index, index), codegen


@any_intrinsic
def load_sums(typing: Any, rows: Any, vectors: Any, array: Any, at: Any, stride: Any, factors_at: Any) -> Any:
    """The `acc` with acc[r][v] = array[at + r·stride + 16·v …] · array[factors_at + r·stride]."""
    if literal(rows) is None or literal(vectors) is None or not is_flat(array):
        return None
    acc = types.UniTuple(types.UniTuple(f32x16, literal(vectors)), literal(rows))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, _, value, first, step, factors = values
        sums = ir.Constant(context.get_value_type(acc), ir.Undefined)
        for r in range(acc.count):
            row = builder.mul(step, _i64(r))
            factor = simd.emit_spread(context, builder, f32x16, array, value, builder.add(factors, row))
            for v in range(acc.dtype.count):
                index = builder.add(builder.add(first, row), _i64(16 * v))
                old = simd.emit_load(context, builder, array, value, index, f32x16.llvm, f32x16.bytes)
                sums = builder.insert_value(sums, builder.fmul(old, factor), (r, v))
        return sums

    return acc(rows, vectors, array, types.intp, types.intp, types.intp), codegen


@any_intrinsic
def store_sums(typing: Any, acc: Any, array: Any, at: Any, stride: Any) -> Any:
    """Write acc[r][v] to array[at + r·stride + 16·v …]."""
    size = _rows_and_vectors(acc)
    if size is None or not is_flat(array):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums, value, first, step = values
        for r in range(size[0]):
            row = builder.add(first, builder.mul(step, _i64(r)))
            for v in range(size[1]):
                index = builder.add(row, _i64(16 * v))
                simd.emit_store(context, builder, array, value, index, builder.extract_value(sums, (r, v)))
        return context.get_dummy_value()

    return types.void(acc, array, types.intp, types.intp), codegen
