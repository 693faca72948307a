"""The inner loops of attention: weighted sums of the cache's numbers, for several rows at once.

`acc[r, v]` is a vector. It holds sums of row r for the 16 lanes from 16·v on. One step adds the
next term, factor · numbers, with one factor for each row and numbers that all rows share. Scores and outputs are such
sums: the factors are q_i and the lanes positions, or the factors are weights and the lanes dimensions.

The numbers come from the cache as it is kept, and become float32 in registers. So a number's bits do not depend on
whether a block was converted beforehand (`KV_F32` in scratch memory) or is read in passing.
"""

from __future__ import annotations

from numba.core import types

from qkv.kernels.isa import ISA
from qkv.kernels.kvcache import NUMBER_BYTES, read
from qkv.kernels.memory import Index, Memory, Sums, emitted
from qkv.kernels.values import f32x16, fma

WIDE_ROWS = ISA.attention_rows


@emitted(lambda acc: acc)
def add_term(
    kind: int, shared: int, acc: Sums, factors: Memory, factors_at: Index, stride: Index, numbers: Memory,
    numbers_at: Index, scales: Memory, scales_at: Index, ahead: Index,
) -> Sums:  # fmt: skip
    """acc[r, v] += factors[factors_at + r·stride] · (the 16 numbers of `kind` from numbers[numbers_at] + 16·v on).

    `shared`, scales and scales_at: see `kvcache.read`. `ahead` is where in a cache memory will be needed soon.
    """
    if numbers.array.dtype == types.uint8:
        numbers.prefetch(ahead)
    elements = 8 * 16 * NUMBER_BYTES[kind] // numbers.array.dtype.bitwidth
    terms = []
    for v in acc.columns:
        scale_at = scales_at if shared else scales_at + 16 * v
        terms.append(read.emit(kind, shared, numbers, numbers_at + elements * v, scales, scale_at))
    for r in acc.rows:
        factor = factors.spread(f32x16, factors_at + stride * r)
        for v, term in enumerate(terms):
            acc[r, v] = fma(factor, term, acc[r, v])
    return acc


@emitted(lambda rows, vectors: Sums(f32x16, rows, vectors).type)
def load_sums(rows: int, vectors: int, array: Memory, at: Index, stride: Index, factors_at: Index) -> Sums:
    """The `acc` with acc[r, v] = array[at + r·stride + 16·v …] · array[factors_at + r·stride]."""
    acc = Sums(f32x16, rows, vectors)
    for r, v in acc:
        factor = array.spread(f32x16, factors_at + stride * r)
        acc[r, v] = array.load(f32x16, at + stride * r + 16 * v) * factor
    return acc


@emitted()
def store_sums(acc: Sums, array: Memory, at: Index, stride: Index) -> None:
    """Write acc[r, v] to array[at + r·stride + 16·v …]."""
    for (r, v), sums in acc.items():
        array.store(at + stride * r + 16 * v, sums)
