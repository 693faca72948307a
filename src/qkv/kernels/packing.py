# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""From the numbers of a model file to the layouts of `formats`, a range of rows at a time.

`pack` quantizes float rows, `pack_gguf` rearranges GGUF blocks without changing a number, `pack_q4_k` keeps the quants
of Q4_K and rounds its scales to float16. All write a range of rows into a matrix's place in the arena, take little
memory beside it, and release the GIL: several threads may pack different rows at once. A range starts at a multiple of
8 rows and ends at one, or at the matrix's last row.

The quantization rules are those of GGUF: `int8` as Q8_0 (d = max|w|/127), `int4` as Q4_0 (d = w/-8 for the w of largest
magnitude), `int4m` as Q4_1 (d = (max - min)/15, m = min).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from qkv.errors import ModelFileError, ParameterError
from qkv.kernels.formats import MATRIX, new_arena, place
from qkv.kernels.memory import load, store
from qkv.kernels.q4_k import BLOCK_BYTES, BLOCK_WEIGHTS, pack_q4_k_rows
from qkv.kernels.simd import (
    absolute,
    bf16_to_float,
    float_to_bf16,
    float_to_half,
    floor_to_int,
    fma,
    half_to_float,
    inverse,
    maximum,
    minimum,
    round_to_int,
    select,
    splat,
    sum_lanes,
    to_float,
)
from qkv.kernels.sizes import BF16, F32, GROUP, INT4, INT4M, INT8, ROWS, SCALE_BYTES, format_name, packed_bytes
from qkv.kernels.values import Vector, f32x8, i32x8, u16x8
from qkv.runtime.jit import kernel

_FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
_SOURCES = {np.dtype(np.float32): _FLOAT32, np.dtype(np.uint16): _BFLOAT16, np.dtype(np.float16): _FLOAT16}
_GGUF = {INT8: ("Q8_0", 34), INT4: ("Q4_0", 18), INT4M: ("Q4_1", 20)}  # type, bytes of a block of 32 weights

u8x2 = Vector(types.uint8, 2)
u8x4 = Vector(types.uint8, 4)


def pack(
    arena: NDArray[np.uint8], matrix: np.void, first_row: int, values: NDArray[Any], name: str = "weights"
) -> None:
    """Quantize `values` [n, columns] into rows `first_row` … of the matrix.

    values: float32, float16, or bfloat16 as its bits in uint16. Raises ModelFileError, with `name`, for a number that
    is not finite.
    """
    _check_range(arena, matrix, first_row, values.shape, int(matrix["columns"]), name)
    if values.dtype not in _SOURCES:
        raise ParameterError(f"{name}: cannot pack {values.dtype} numbers; give float32, float16 or bfloat16 bits")
    columns = int(matrix["groups"]) * GROUP
    row, block = np.zeros(columns + ROWS, np.float32), np.zeros(columns * ROWS, np.float32)
    finite = _pack_rows(
        arena, np.array([matrix], MATRIX), first_row, _read_only_bytes(values), _SOURCES[values.dtype], values.shape[0],
        row, block, np.zeros(32, np.uint8),
    )  # fmt: skip
    if not finite:
        raise ModelFileError(
            f"{name}: rows {first_row} to {first_row + len(values) - 1} hold a number that is not finite"
        )


def pack_gguf(
    arena: NDArray[np.uint8], matrix: np.void, first_row: int, blocks: NDArray[np.uint8], name: str = "weights"
) -> None:
    """Rearrange GGUF blocks, uint8 [n, bytes of a row], into rows `first_row` … of the matrix, number for number.

    The matrix's format says what the blocks are: Q8_0 for int8, Q4_0 for int4, Q4_1 for int4m.
    """
    kind = int(matrix["format"])
    if kind not in _GGUF:
        raise ParameterError(f"{name}: no GGUF block is stored as {format_name(matrix)}")
    block_bytes = _GGUF[kind][1]
    if matrix["columns"] % GROUP:
        raise ModelFileError(f"{name}: {matrix['columns']} columns are not a whole number of blocks of {GROUP}")
    groups = int(matrix["groups"])
    _check_range(arena, matrix, first_row, blocks.shape, groups * block_bytes, name)
    if blocks.dtype != np.uint8:
        raise ParameterError(f"{name}: GGUF blocks are uint8, got {blocks.dtype}")
    _check_scales(blocks, block_bytes, (block_bytes - GROUP * (8 if kind == INT8 else 4) // 8) // 2, name)
    _pack_blocks(arena, np.array([matrix], MATRIX), first_row, _read_only_bytes(blocks), block_bytes, len(blocks))


def pack_q4_k(
    arena: NDArray[np.uint8], matrix: np.void, first_row: int, blocks: NDArray[np.uint8], name: str = "weights"
) -> bool:
    """Pack GGUF's Q4_K blocks, uint8 [n, bytes of a row], into rows `first_row` … of an int4m matrix.

    The quants stay. A group's scale is float16(d·scale) and its minimum float16(-dmin·minimum): relative errors of at
    most 2^-11, so a weight d·q + m is off by at most 2^-11·(|d·q| + |m|). Nothing is lost to underflow: both products
    are integer multiples of 2^-24, so those below 2^-14 are exact as subnormal halves. Returns False if one is beyond
    ±65504, the largest float16; the matrix then needs another format.
    """
    columns = int(matrix["columns"])
    if int(matrix["format"]) != INT4M or columns % BLOCK_WEIGHTS:
        raise ParameterError(f"{name}: Q4_K rows of {columns} numbers cannot be packed as {format_name(matrix)}")
    _check_range(arena, matrix, first_row, blocks.shape, columns // BLOCK_WEIGHTS * BLOCK_BYTES, name)
    if blocks.dtype != np.uint8:
        raise ParameterError(f"{name}: GGUF blocks are uint8, got {blocks.dtype}")
    _check_scales(blocks, BLOCK_BYTES, 2, name)
    scales, words = np.zeros((2, BLOCK_WEIGHTS // GROUP * ROWS), np.float32), np.zeros(128 * ROWS, np.uint8)
    fits: bool = pack_q4_k_rows(
        arena, np.array([matrix], MATRIX), first_row, _read_only_bytes(blocks), len(blocks), scales.reshape(-1), words
    )
    return fits


def quantize(values: NDArray[Any], fmt: str) -> tuple[NDArray[np.uint8], np.void]:
    """An arena of its own with `values` [rows, columns] in it, and its record."""
    rows, columns = values.shape
    arena, matrix = new_arena(packed_bytes(fmt, rows, columns)), place(fmt, rows, columns)
    pack(arena, matrix, 0, values)
    return arena, matrix


def compile_all() -> None:
    """Compile what `pack`, `pack_gguf` and `pack_q4_k` use, or load it from the disk, by packing no rows."""
    matrix = place("int8", ROWS, GROUP)
    arena = new_arena(packed_bytes("int8", ROWS, GROUP))
    pack(arena, matrix, 0, np.zeros((0, GROUP), np.float32))
    pack_gguf(arena, matrix, 0, np.zeros((0, _GGUF[INT8][1]), np.uint8))
    matrix = place("int4m", ROWS, BLOCK_WEIGHTS)
    pack_q4_k(new_arena(packed_bytes("int4m", ROWS, BLOCK_WEIGHTS)), matrix, 0, np.zeros((0, BLOCK_BYTES), np.uint8))


def _check_range(
    arena: NDArray[np.uint8], matrix: np.void, first_row: int, shape: tuple[int, ...], width: int, name: str
) -> None:
    size = packed_bytes(format_name(matrix), int(matrix["rows"]), int(matrix["columns"]))
    if matrix["quants"] < 0 or matrix["quants"] + size > arena.size:
        raise ParameterError(f"{name}: the arena of {arena.size} bytes does not hold this matrix")
    if len(shape) != 2 or shape[1] != width:
        raise ParameterError(f"{name}: expected rows of {width} items, got an array of shape {shape}")
    end = first_row + shape[0]
    if first_row < 0 or first_row % ROWS or end > matrix["rows"] or (end % ROWS and end != matrix["rows"]):
        raise ParameterError(
            f"{name}: rows {first_row} to {end} of {matrix['rows']} are no range of whole blocks of {ROWS} rows"
        )


def _check_scales(blocks: NDArray[np.uint8], block_bytes: int, numbers: int, name: str) -> None:
    """The float16 `numbers` at the start of each block must be finite: not all bits of the exponent set."""
    for each in range(numbers):
        upper = blocks[:, 2 * each + 1 :: block_bytes]
        if ((upper & 0x7C) == 0x7C).any():
            raise ModelFileError(f"{name}: a block's scale is not finite; the file is damaged")


def _read_only_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """A flat view; read-only always, so that mapped files and ordinary arrays share one compiled kernel."""
    view = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    view.flags.writeable = False
    return view


# ------------------------------------------------------------------------------------------ quantizing


@kernel
def _pack_rows(arena, matrices, first_row, source, kind, count, row, block, rest):
    """Returns whether every number was finite.

    Scratch: `row`, zeros, has room for one row; `block` for 8, a column after the other; `rest`, zeros, for 32 bytes.
    """
    matrix = matrices[0]
    not_finite = splat(f32x8, 0)
    for i in range((count + ROWS - 1) // ROWS):
        for lane in range(ROWS):
            exists = i * ROWS + lane < count
            if exists:
                _read_row(source, i * ROWS + lane, kind, matrix.columns, row, rest)
            for k in range(matrix.groups * GROUP):
                block[k * ROWS + lane] = row[k] if exists else np.float32(0)
        for k in range(matrix.columns):
            not_finite = fma(load(f32x8, block, k * ROWS), 0, not_finite)  # 0 · infinity is not a number
        _pack_block(arena, matrix, first_row // ROWS + i, block)
    return sum_lanes(not_finite) == np.float32(0)


@kernel
def _read_row(source, number, kind, columns, row, rest):
    """Convert one row of the file to float32. Its last few numbers go through `rest`: after them the file may end."""
    size = 4 if kind == _FLOAT32 else 2
    at, whole = number * columns * size, columns // 8 * 8
    for k in range(0, whole, 8):
        store(row, k, _floats(source, at + k * size, kind))
    for byte in range((columns - whole) * size):
        rest[byte] = source[at + whole * size + byte]
    store(row, whole, _floats(rest, 0, kind))


@kernel
def _floats(source, at, kind):
    if kind == _FLOAT32:
        return load(f32x8, source, at)
    if kind == _BFLOAT16:
        return bf16_to_float(load(u16x8, source, at))
    return half_to_float(load(u16x8, source, at))


@kernel
def _pack_block(arena, matrix, b, block):
    """Store 8 rows, given as float32 [columns, 8]: lanes are rows from here on."""
    for g in range(matrix.groups):
        tile = b * matrix.groups + g
        at = g * GROUP * ROWS
        scales, minimums = matrix.scales + tile * SCALE_BYTES, matrix.minimums + tile * SCALE_BYTES
        if matrix.format == F32:
            for k in range(GROUP):
                store(arena, matrix.quants + (tile * GROUP + k) * 32, load(f32x8, block, at + k * ROWS))
        elif matrix.format == BF16:
            for k in range(GROUP):
                bits = float_to_bf16(load(f32x8, block, at + k * ROWS))
                store(arena, matrix.quants + (tile * GROUP + k) * 16, bits)
        elif matrix.format == INT8:
            _pack_int8(arena, matrix.quants + tile * 256, scales, block, at)
        elif matrix.format == INT4:
            _pack_int4(arena, matrix.quants + tile * 128, scales, block, at)
        else:
            _pack_int4m(arena, matrix.quants + tile * 128, scales, minimums, block, at)


@kernel
def _round_half_away(x):
    """The nearest int32, ties away from zero: how GGUF's Q8_0 rounds."""
    magnitude = absolute(x)
    whole = to_float(floor_to_int(magnitude))
    rounded = select(magnitude - whole < 0.5, whole, whole + 1)
    return round_to_int(select(x < 0, 0 - rounded, rounded))


@kernel
def _pack_int8(arena, quants, scales, block, at):
    largest = splat(f32x8, 0)
    for k in range(GROUP):
        largest = maximum(absolute(load(f32x8, block, at + k * ROWS)), largest)
    d = largest / 127
    steps = inverse(d)
    store(arena, scales, float_to_half(d))
    for j in range(GROUP // 4):
        word = splat(i32x8, 0)
        for t in range(4):
            q = _round_half_away(load(f32x8, block, at + (4 * j + t) * ROWS) * steps)
            word |= (q & 255) << 8 * t
        store(arena, quants + 32 * j, word)


@kernel
def _pack_int4(arena, quants, scales, block, at):
    largest = splat(f32x8, 0)
    for k in range(GROUP):
        w = load(f32x8, block, at + k * ROWS)
        largest = select(absolute(largest) < absolute(w), w, largest)
    d = largest / -8
    store(arena, scales, float_to_half(d))
    _pack_nibbles(arena, quants, block, at, splat(f32x8, 0), d, 8.5)


@kernel
def _pack_int4m(arena, quants, scales, minimums, block, at):
    lowest = load(f32x8, block, at)
    highest = lowest
    for k in range(1, GROUP):
        w = load(f32x8, block, at + k * ROWS)
        lowest = minimum(w, lowest)
        highest = maximum(w, highest)
    d = (highest - lowest) / 15
    store(arena, scales, float_to_half(d))
    store(arena, minimums, float_to_half(lowest))
    _pack_nibbles(arena, quants, block, at, lowest, d, 0.5)


@kernel
def _pack_nibbles(arena, quants, block, at, origin, d, shift):
    """q = ⌊(w - origin)/d + shift⌋ within 0 … 15: two of a row in each byte, 16 columns apart."""
    steps = inverse(d)
    for j in range(GROUP // 8):
        word = splat(i32x8, 0)
        for t in range(8):  # 4 lower halves of bytes, then 4 upper halves
            k = 4 * j + t % 4 + t // 4 * 16
            q = floor_to_int((load(f32x8, block, at + k * ROWS) - origin) * steps + shift)
            word |= maximum(minimum(q, 15), 0) << 8 * (t % 4) + t // 4 * 4
        store(arena, quants + 32 * j, word)


# ------------------------------------------------------------------------------------------ rearranging


@kernel
def _pack_blocks(arena, matrices, first_row, source, block_bytes, count):
    """A GGUF block: its scale, its minimum if any, and its quants in the order that our tiles spread 4 by 4."""
    matrix = matrices[0]
    has_minimum = matrix.format == INT4M
    quant_bytes = GROUP if matrix.format == INT8 else GROUP // 2
    for i in range((count + ROWS - 1) // ROWS * ROWS):
        block, lane = (first_row + i) // ROWS, i % ROWS
        for g in range(matrix.groups):
            tile = block * matrix.groups + g
            scale = matrix.scales + (tile * ROWS + lane) * 2
            minimum = matrix.minimums + (tile * ROWS + lane) * 2
            quants = matrix.quants + tile * quant_bytes * ROWS + lane * 4
            if i < count:
                at = (i * matrix.groups + g) * block_bytes
                store(arena, scale, load(u8x2, source, at))
                if has_minimum:
                    store(arena, minimum, load(u8x2, source, at + 2))
                at += block_bytes - quant_bytes
                for j in range(quant_bytes // 4):
                    store(arena, quants + 32 * j, load(u8x4, source, at + 4 * j))
            else:  # rows of padding
                arena[scale], arena[scale + 1] = 0, 0
                if has_minimum:
                    arena[minimum], arena[minimum + 1] = 0, 0
                for j in range(quant_bytes):
                    arena[quants + j // 4 * 32 + j % 4] = 0
