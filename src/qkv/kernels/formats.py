# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""How weight matrices lie in memory, so that a product reads them once, from front to back.

All matrices of a model are in one flat uint8 array, the arena. A record of dtype `MATRIX` says where one lies and in
which format; kernels get the arena and records, so no kernel is compiled again for another model. A fused product
(q, k and v, say) is an array of records, whose formats may differ.

Rows (outputs) are padded to blocks of 8, one row for each lane of a vector; columns (inputs) to groups of 32. Padding
is zero, and the activations that meet padded columns are zero too. A segment (quants, scales, minimums) starts at a
multiple of 64 bytes and goes block by block, in each block group by group. `int4m` has a minimum m beside each scale d:

| format  | quants of a group                                  | scale            | value of a weight |
|---------|----------------------------------------------------|------------------|-------------------|
| `f32`   | for each column, 8 rows: float32                    |                  | itself            |
| `bf16`  | for each column, 8 rows: upper half of a float32    |                  | itself            |
| `int8`  | 256 bytes: row r's column 4j+t at 32j + 4r + t      | float16 × 8 rows | d·q (GGUF Q8_0)   |
| `int4`  | 128 bytes: at 32j + 4r + t row r's column 4j+t      | float16 × 8 rows | d·(q - 8) (Q4_0)  |
|         | (lower 4 bits) and column 16+4j+t (upper 4 bits)    |                  |                   |
| `int4m` | the same                                            | float16 × 8 rows | d·q + m (Q4_1)    |

So one 32-byte load holds 4 inputs of each of 8 rows, and the matching activations are 4 bytes, the same for every row.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ParameterError
from qkv.kernels.memory import spread
from qkv.kernels.simd import bf16_to_float, first_lane, half_to_float
from qkv.kernels.sizes import (
    ALIGNMENT,
    BF16,
    F32,
    FORMATS,
    GROUP,
    INT4,
    INT4M,
    INT8,
    QUANT_BYTES,
    ROWS,
    aligned,
    segments,
)
from qkv.kernels.values import f32x8, u16x8
from qkv.runtime.jit import inlined, kernel

# rows and columns as the model has them; blocks = ⌈rows/8⌉, groups = ⌈columns/32⌉; block_bytes is the size of a
# block's quants; the rest are byte offsets in the arena (scales and minimums 0 where the format has none).
_FIELDS = ("format", "rows", "columns", "blocks", "groups", "block_bytes", "quants", "scales", "minimums")
MATRIX = np.dtype([(name, np.int64) for name in _FIELDS])


def place(fmt: str, rows: int, columns: int, offset: int = 0) -> np.void:
    """The `MATRIX` record of a matrix that starts at byte `offset` of the arena, a multiple of 64."""
    if offset % ALIGNMENT:
        raise ParameterError(f"offset: a matrix starts at a multiple of {ALIGNMENT} bytes, got {offset}")
    quants, scales, _ = (aligned(size) for size in segments(fmt, rows, columns))
    kind, blocks, groups = FORMATS[fmt], -(-rows // ROWS), -(-columns // GROUP)
    scales_at = offset + quants if kind >= INT8 else 0
    minimums_at = offset + quants + scales if kind == INT4M else 0
    fields = (kind, rows, columns, blocks, groups, groups * QUANT_BYTES[kind], offset, scales_at, minimums_at)
    return np.array([fields], MATRIX)[0]


def new_arena(size: int, *, huge: bool = True) -> NDArray[np.uint8]:
    """`size` zero bytes, on huge pages where the system has them: fewer address lookups, but slow to come by."""
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]


# ------------------------------------------------------------------------------------------ reading weights back


@inlined
@kernel
def read_half(arena, at):
    """The float16 at byte `at`, as float32."""
    return first_lane(half_to_float(spread(u16x8, arena, at)))


@kernel
def dequantize_row(arena, matrix, row, out, at):
    """Write row `row` of the matrix, exactly as float32, to out[at : at + columns]. Used for embeddings."""
    block, lane = row // ROWS, row % ROWS
    for k in range(matrix.columns):
        tile = block * matrix.groups + k // GROUP
        out[at + k] = weight(arena, matrix, tile, lane, k % GROUP)


@inlined
@kernel
def weight(arena, matrix, tile, lane, k):
    """The weight at column k of a group (`tile` counts groups over all blocks) in row `lane` of its block."""
    if matrix.format == F32:
        return first_lane(spread(f32x8, arena, matrix.quants + ((tile * GROUP + k) * ROWS + lane) * 4))
    if matrix.format == BF16:
        return first_lane(bf16_to_float(spread(u16x8, arena, matrix.quants + ((tile * GROUP + k) * ROWS + lane) * 2)))
    scale = read_half(arena, matrix.scales + (tile * ROWS + lane) * 2)
    if matrix.format == INT8:
        q = np.int8(arena[matrix.quants + tile * 256 + k // 4 * 32 + lane * 4 + k % 4])
        return scale * np.float32(q)
    byte = arena[matrix.quants + tile * 128 + k % 16 // 4 * 32 + lane * 4 + k % 4]
    q = np.float32(byte & 15 if k < 16 else byte >> 4)
    if matrix.format == INT4:
        return scale * (q - np.float32(8))
    return scale * q + read_half(arena, matrix.minimums + (tile * ROWS + lane) * 2)


@kernel
def _dequantize_rows(arena, matrices, first_row, out):
    matrix = matrices[0]
    for i in range(out.size // matrix.columns):
        dequantize_row(arena, matrix, first_row + i, out, i * matrix.columns)


def unpack(
    arena: NDArray[np.uint8], matrix: np.void, first_row: int = 0, rows: int | None = None
) -> NDArray[np.float32]:
    """Rows `first_row` … of a packed matrix as float32 [rows, columns], exactly."""
    count = int(matrix["rows"]) - first_row if rows is None else rows
    if first_row < 0 or count < 0 or first_row + count > matrix["rows"]:
        raise ParameterError(f"rows: {first_row} to {first_row + count} are not in a matrix of {matrix['rows']} rows")
    out = np.empty((count, int(matrix["columns"])), np.float32)
    _dequantize_rows(arena, np.array([matrix], MATRIX), first_row, out.reshape(-1))
    return out
