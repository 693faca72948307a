# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Products with many tokens: quantized weights are unpacked once, and then meet all tokens.

A *panel* is a block of 8 rows as bytes: no nibbles, no float16. Where registers are 512 bits wide it is four blocks,
two side by side in each of two vectors. It lies in the thread's scratch memory, small enough for the near caches, and
tiles of 4 tokens run over it. The sums are those of `matmul`, in the same order: a token's numbers have the same bits.

    for each group of 32 columns:  8 words: byte 4·l + t of word j is row l's column 4j + t
                                   the scales of the rows, and their minimums, as float32
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.core.types import float32, int8, int32, uint8

from qkv.kernels.isa import ISA
from qkv.kernels.memory import Index, Memory, Sums, emitted, zeros
from qkv.kernels.sizes import GROUP, INT4M, INT8, QUANT_BYTES, ROWS, SCALE_BYTES
from qkv.kernels.tiles import Activations, Packed, add_group, store_tile
from qkv.kernels.values import Value, Vector
from qkv.runtime.jit import inlined, kernel

VECTORS, TOKENS = ISA.panel_blocks, 4
"""Vectors and tokens of a tile: as many sums as the registers hold, a running one and one of the group for each."""
FEW_TOKENS = 2 * TOKENS
"""Fewer tokens than these are not worth a panel."""
MANY_TOKENS = 16 if ISA.panel_blocks == 2 else 0
"""For up to so many, a group is unpacked when it is needed, twice as many tokens at a time: a whole panel of 32 rows
would not stay in the nearest cache, and what 16 tokens do with it is too little to pay for the way."""

LANES = ROWS * ISA.panel_blocks
_SUMS = Vector(float32, LANES)
WORDS = GROUP // 4
SCALES, MINIMUMS, GROUP_SIZE = WORDS * LANES, (WORDS + 1) * LANES, (WORDS + 2) * LANES  # in float32 elements


def panel_size(columns: int) -> int:
    """Float32 elements of scratch memory that a panel of so many columns takes."""
    return -(-columns // GROUP) * GROUP_SIZE * VECTORS


@emitted()
def unpack_group(
    fmt: int, arena: Memory, quants: Index, scales: Index, minimums: Index, apart: Index, scratch: Memory, at: Index
) -> None:
    """Unpack a group of 32 columns to scratch[at:].

    quants, scales, minimums: its byte offsets in the first block; in the second they are `apart` groups further on.
    """
    # No asking ahead: it was measured to cost more than it brings.
    blocks = range(ISA.panel_blocks)
    packed = Packed(fmt, arena, quants, scales, minimums, apart, blocks)
    for column, words in packed.words():
        scratch.store(at + column // 4 * LANES, _side_by_side(words))
    scratch.store(at + SCALES, _side_by_side([packed.scale(b) for b in blocks]))
    if fmt == INT4M:
        scratch.store(at + MINIMUMS, _side_by_side([packed.minimum(b) for b in blocks]))


def _side_by_side(parts: list[Value]) -> Value:
    return parts[0] if len(parts) == 1 else parts[0].joined(parts[1])


class Panel(NamedTuple):
    """`tiles.Weights` of a panel. The group begins at scratch[group]; that of the next vector `apart` further on."""

    fmt: int
    scratch: Memory
    group: Value
    apart: Value

    def words(self) -> Iterator[tuple[int, list[Value]]]:
        kind = Vector(int8 if self.fmt == INT8 and not ISA.int8_offset else uint8, 4 * LANES)
        for j in range(WORDS):
            yield 4 * j, [self.scratch.load(kind, self._at(r) + j * LANES) for r in range(VECTORS)]

    def word(self, r: int, place: Value) -> Value:
        words = self.scratch.load(Vector(int32, LANES), self._at(r) + (place >> 5).to(types.intp) * LANES)
        return ISA.byte_at(words, place)

    def scale(self, r: int) -> Value:
        return self.scratch.load(_SUMS, self._at(r) + SCALES)

    def minimum(self, r: int) -> Value:
        return self.scratch.load(_SUMS, self._at(r) + MINIMUMS)

    def _at(self, r: int) -> Value:
        return self.group + self.apart * r


@emitted(lambda acc: acc)
def panel_step(
    fmt: int, acc: Sums, scratch: Memory, group: Index, apart: Index, xq: Memory, xs: Memory, xinfo: Memory, at: Index,
    groups: Index,
) -> Sums:  # fmt: skip
    """The next 32 columns, of a `Panel` at `group`; `at` and `groups` as in `group_step`."""
    return add_group(acc, Panel(fmt, scratch, group, apart), Activations(xq, xs, xinfo, at, groups))


@emitted()
def fence(at: Index) -> None:
    """Nothing: but what comes later in the program is not loaded earlier, into registers that are not there."""
    at.builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


@cache
def panel_product(fmt: int) -> Any:
    """The kernel for blocks of one quantized format and at least FEW_TOKENS tokens."""
    quant_bytes, blocks_of_vector = QUANT_BYTES[fmt], ISA.panel_blocks
    blocks_of_panel = VECTORS * blocks_of_vector
    unpacks_late = MANY_TOKENS > 0

    @inlined
    @kernel
    def unpack(arena, matrix, block, g, scratch, at, vector_size):
        """Group g of the panel's blocks, from `block` on."""
        for r in range(VECTORS):
            # A panel that the matrix does not fill repeats its last block; what comes of it is not stored.
            first = min(block + r * blocks_of_vector, matrix.blocks - 1)
            apart = matrix.groups if first + 1 < matrix.blocks else 0
            tile = first * matrix.groups + g
            unpack_group(
                fmt, arena, matrix.quants + tile * quant_bytes, matrix.scales + tile * SCALE_BYTES,
                matrix.minimums + tile * SCALE_BYTES, apart, scratch, at + r * vector_size,
            )  # fmt: skip

    @inlined
    @kernel
    def tile(scratch, at, groups, inputs, token, outputs, out_at, rows):
        acc = zeros(_SUMS, VECTORS, TOKENS)
        for g in range(groups):
            acc = panel_step(
                fmt, acc, scratch, at + g * GROUP_SIZE, groups * GROUP_SIZE, inputs.xq, inputs.xs, inputs.xinfo,
                token * groups + g, groups,
            )  # fmt: skip
        store_tile(acc, outputs.numbers, out_at + token * outputs.stride, outputs.stride, rows)

    @inlined
    @kernel
    def double_tile(arena, matrix, block, scratch, at, inputs, token, outputs, out_at, rows):
        """Twice as many tokens, and no more, so that unpacked weights need not be kept."""
        groups, later = matrix.groups, token + TOKENS
        xq, xs, xinfo = inputs.xq, inputs.xs, inputs.xinfo
        a, b = zeros(_SUMS, VECTORS, TOKENS), zeros(_SUMS, VECTORS, TOKENS)
        for g in range(groups):
            unpack(arena, matrix, block, g, scratch, at, GROUP_SIZE)
            fence(at)
            a = panel_step(fmt, a, scratch, at, GROUP_SIZE, xq, xs, xinfo, token * groups + g, groups)
            fence(at)
            b = panel_step(fmt, b, scratch, at, GROUP_SIZE, xq, xs, xinfo, later * groups + g, groups)
        store_tile(a, outputs.numbers, out_at + token * outputs.stride, outputs.stride, rows)
        store_tile(b, outputs.numbers, out_at + later * outputs.stride, outputs.stride, rows)

    @kernel
    def product(arena, matrix, inputs, outputs, token, token_end, first, end, scratch, at):
        """Blocks first … end-1 times tokens token … token_end-1."""
        # The last tile repeats tokens of the one before rather than being smaller.
        for block in range(first, end, blocks_of_panel):
            rows = min(matrix.rows, end * ROWS) - block * ROWS
            place = outputs.at + block * ROWS
            if unpacks_late and token_end - token <= MANY_TOKENS:
                for t in range(token, token_end, 2 * TOKENS):
                    start = min(t, token_end - 2 * TOKENS)
                    double_tile(arena, matrix, block, scratch, at, inputs, start, outputs, place, rows)
                continue
            for g in range(matrix.groups):
                unpack(arena, matrix, block, g, scratch, at + g * GROUP_SIZE, matrix.groups * GROUP_SIZE)
            for t in range(token, token_end, TOKENS):
                start = min(t, token_end - TOKENS)
                tile(scratch, at, matrix.groups, inputs, start, outputs, place, rows)

    return product
