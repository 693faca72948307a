"""The innermost steps of matrix products: a few blocks of 8 rows times a few tokens, held in registers.

`acc[r, t]` is a vector: the sums of the rows (its lanes) of block r for token t. A step multiplies the next columns and
adds. It is emitted for whatever sizes `acc` has, so LLVM sees one straight run of vector instructions. See `matmul` for
the order of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from numba.core.types import float32, int16, int32, uint8, uint32

from qkv.kernels.isa import ISA
from qkv.kernels.memory import Index, Memory, Sums, emitted
from qkv.kernels.simd import bf16_to_float
from qkv.kernels.sizes import F32, GROUP, INT4, INT4M, INT8, QUANT_BYTES, ROWS, SCALE_BYTES
from qkv.kernels.values import Value, Vector, constant, f32x8, fma, i32x8, u8x32, u16x8

DENSE_STEP = 4
"""Columns that `dense_step` takes."""

INFO = 4
BIAS4, BIAS8, OUTLIER, TOTAL = range(INFO)
"""The int32 fields of `xinfo` for a group of 32 activations.

BIAS4, BIAS8: -8 and -128 times the sum of their integers. OUTLIER: the number whose integer does not fit int8; xq holds
±127 of it, the lower 16 bits the rest, the upper ones 8 times its column. TOTAL: the bits of the float32 xs · sum.
"""


class Weights(Protocol):
    """A group of 32 columns of some vectors of rows, wherever they lie."""

    @property
    def fmt(self) -> int:
        """The weights' format."""

    def words(self) -> Iterator[tuple[int, list[Value]]]:
        """(k, w) 8 times: w[r] has the bytes of columns k … k + 3 of each row, as `ISA.add_dot` takes them."""

    def word(self, r: int, place: Value) -> Value:
        """int32 lanes whose lowest byte is the weight of each row at one column; `place` is 8 times that column."""

    def scale(self, r: int) -> Value:
        """float32."""

    def minimum(self, r: int) -> Value:
        """float32; only where the format has minimums."""


class Packed(NamedTuple):
    """`Weights` as they lie in the arena. The next block is `apart` groups further on."""

    fmt: int
    arena: Memory
    quants: Value
    scales: Value
    minimums: Value
    apart: Value
    blocks: range

    def words(self) -> Iterator[tuple[int, list[Value]]]:
        for at in range(0, QUANT_BYTES[self.fmt], 32):
            raw = [self.arena.load(u8x32, self._quants(r) + at) for r in self.blocks]
            if self.fmt == INT8:
                yield at // 8, [ISA.int8_weights(w) for w in raw]
            else:
                yield at // 8, [w & 15 for w in raw]
                yield at // 8 + 16, [(w.bits(int16) >> 4).bits(uint8) & 15 for w in raw]  # no shift of bytes exists

    def word(self, r: int, place: Value) -> Value:
        if self.fmt != INT8:  # columns from 16 on are the upper halves of the bytes
            place = (place & 127) | (place >> 7 << 2)
        words = self.arena.load(i32x8, self._quants(r) + (place & ~31).to(self.quants.element)).bits(uint32)
        words = words >> (place & 31).in_lanes(ROWS)
        return words & 15 if self.fmt != INT8 else (words & 255) ^ ISA.int8_offset

    def scale(self, r: int) -> Value:
        return ISA.half_to_float(self.arena.load(u16x8, self.scales + self.apart * (SCALE_BYTES * r)))

    def minimum(self, r: int) -> Value:
        return ISA.half_to_float(self.arena.load(u16x8, self.minimums + self.apart * (SCALE_BYTES * r)))

    def _quants(self, r: int) -> Value:
        return self.quants + self.apart * (QUANT_BYTES[self.fmt] * r)


class Activations(NamedTuple):
    """A group of 32 columns of some tokens, see `quantize_groups`. The next token is `groups` groups further on."""

    xq: Memory
    xs: Memory
    xinfo: Memory
    at: Value
    groups: Value

    def four(self, t: int, column: int, lanes: int) -> Value:
        """The bytes of 4 columns of a token, for every row."""
        return self.xq.spread(Vector(self.xq.array.dtype, 4 * lanes), self._group(t) * GROUP + column)

    def scale(self, t: int, lanes: int) -> Value:
        return self.xs.spread(Vector(float32, lanes), self._group(t))

    def info(self, t: int, field: int) -> Value:
        return self.xinfo.load(int32, self._group(t) * INFO + field)

    def _group(self, t: int) -> Value:
        return self.at + self.groups * t


def add_group(acc: Sums, w: Weights, x: Activations) -> Sums:
    """acc + the products of a group: the innermost step of every product with quantized weights."""
    lanes = acc.vector.lanes
    # The rest goes first. For one token the sums would wait for it, and the weights for its loads: it goes last.
    late = len(acc.columns) == 1
    starts = {at: constant(Vector(int32, lanes), 0) if late else _rest(w, x, *at, lanes) for at in acc}
    dots = {at: ISA.start_dot(w.fmt == INT8, start) for at, start in starts.items()}
    for column, words in w.words():
        for t in acc.columns:
            four = x.four(t, column, lanes)
            for r, word in enumerate(words):
                dots[r, t] = ISA.add_dot(dots[r, t], word, four)
    for r, t in acc:
        dot = ISA.end_dot(dots[r, t], starts[r, t])
        dot = (dot + _rest(w, x, r, t, lanes) if late else dot).to(float32)
        d, xs = w.scale(r), x.scale(t, lanes)
        acc[r, t] = fma(dot, d * xs, acc[r, t])
        if w.fmt == INT4M:
            m, total = w.minimum(r), x.info(t, TOTAL).in_lanes(lanes).bits(float32)
            acc[r, t] = fma(m, total, acc[r, t])
    return acc


def _rest(w: Weights, x: Activations, r: int, t: int, lanes: int) -> Value:
    """What the products of bytes lack: the outlier is more than its int8 says, and weights may be moved (the bias)."""
    outlier = x.info(t, OUTLIER)
    q = w.word(r, outlier.bits(uint32) >> 16).bits(int32)
    if w.fmt == INT8 and not ISA.int8_offset:
        q = ((q << 24) >> 24) & 0xFFFF
    field = {INT4: BIAS4, INT4M: None, INT8: BIAS8 if ISA.int8_offset else None}[w.fmt]
    bias = q.like(0) if field is None else x.info(t, field).in_lanes(lanes)
    # A lane is two int16: q and what is left of the outlier, then 0 and the outlier's column.
    return ISA.dot_shorts(bias, q.bits(int16), outlier.in_lanes(lanes).bits(int16))


@emitted(lambda acc: acc)
def group_step(
    fmt: int, acc: Sums, arena: Memory, quants: Index, scales: Index, minimums: Index, xq: Memory, xs: Memory,
    xinfo: Memory, at: Index, groups: Index, soon: Index,
) -> Sums:  # fmt: skip
    """The next 32 columns of an int8, int4 or int4m matrix.

    quants, scales, minimums: byte offsets of this group in the first block; at: its index in xs and xinfo for the first
    token. The next block, and the next token, are `groups` groups further on. soon: where weights will be read later.
    """
    ask_ahead(acc, arena, soon, QUANT_BYTES[fmt])
    packed = Packed(fmt, arena, quants, scales, minimums, groups, acc.rows)
    return add_group(acc, packed, Activations(xq, xs, xinfo, at, groups))


def ask_ahead(acc: Sums, arena: Memory, soon: Value, block_bytes: int) -> None:
    """Ask for as many bytes as a step takes, from `soon` on. The processor's own prefetching starts late."""
    for line in range(0, block_bytes * len(acc.rows), 64):
        arena.prefetch(soon + line)


@emitted(lambda acc: acc)
def dense_step(
    fmt: int, acc: Sums, arena: Memory, quants: Index, x: Memory, at: Index, groups: Index, soon: Index
) -> Sums:
    """The next 4 columns of an f32 or bf16 matrix.

    quants: their byte offset in the first block; at: their index in x for the first token. The next block, and the next
    token, are `groups` groups further on.
    """
    column_bytes = QUANT_BYTES[fmt] // GROUP
    ask_ahead(acc, arena, soon, DENSE_STEP * column_bytes)
    for k in range(DENSE_STEP):
        inputs = [x.spread(f32x8, at + k + groups * (GROUP * t)) for t in acc.columns]
        for r in acc.rows:
            place = quants + groups * (QUANT_BYTES[fmt] * r) + column_bytes * k
            w = arena.load(f32x8, place) if fmt == F32 else bf16_to_float.emit(arena.load(u16x8, place))
            for t, x_t in enumerate(inputs):
                acc[r, t] = fma(w, x_t, acc[r, t])
    return acc


@emitted()
def store_tile(acc: Sums, out: Memory, at: Index, stride: Index, rows: Index) -> None:
    """Write acc[r, t] to out[at + t·stride + lanes·r], but no more than `rows` rows of each token."""
    lanes = acc.vector.lanes
    with rows.builder.if_else((rows >= lanes * len(acc.rows)).ir) as (whole, in_part):
        with whole:
            for (r, t), sums in acc.items():
                out.store(at + stride * t + lanes * r, sums)
        with in_part:
            for (r, t), sums in acc.items():
                out.store_lanes(at + stride * t + lanes * r, sums, rows - lanes * r)
