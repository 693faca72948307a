"""Sizes that planning needs as well as kernels: nothing here, nor what it imports, loads Numba."""

from __future__ import annotations

from typing import Any

from qkv.errors import ParameterError

BLOCK = 32
"""Positions in a block of the KV cache."""

STEP_TOKENS = 512
"""The most tokens of one step; longer prompts take several."""

CACHE_KINDS = ("f32", "f16", "int8")
"""How a cache can keep its numbers. The place of a kind here is what kernels know it by."""

GROUP = 32
"""Neighbouring numbers that share a scale, in weights, in activations and in an int8 cache."""

ROWS = 8
"""Rows of a weight matrix that lie together."""

ALIGNMENT = 64

F32, BF16, INT8, INT4, INT4M = range(5)
FORMATS = {"f32": F32, "bf16": BF16, "int8": INT8, "int4": INT4, "int4m": INT4M}
"""How a weight matrix can keep its numbers, and what kernels know that by; `formats` has the layouts."""
QUANT_BYTES = {F32: 4 * GROUP * ROWS, BF16: 2 * GROUP * ROWS, INT8: GROUP * ROWS, INT4: 128, INT4M: 128}
"""Of one group of 8 rows."""
SCALE_BYTES = 2 * ROWS
"""Of one group of 8 rows: float16."""

_NUMBER_BYTES = {"f32": 4, "f16": 2, "int8": 1}


def blocks_for(positions: int) -> int:
    """How many blocks hold that many positions."""
    return -(-positions // BLOCK)


def half_block_bytes(kind: str, head_dim: int) -> int:
    """Bytes of the keys, or of the values, of one head in one block. Raises ParameterError for an unknown kind."""
    if kind not in CACHE_KINDS:
        raise ParameterError(f"cache: unknown kind {kind!r}; choose one of {', '.join(CACHE_KINDS)}")
    if kind == "int8" and head_dim % GROUP:
        raise ParameterError(
            f"cache: int8 needs heads of a multiple of {GROUP} dimensions, this model's have {head_dim}; "
            'use cache="f16"'
        )
    scales = 4 * BLOCK * (head_dim // GROUP) if kind == "int8" else 0
    return BLOCK * head_dim * _NUMBER_BYTES[kind] + scales


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def segments(fmt: str, rows: int, columns: int) -> tuple[int, int, int]:
    """Bytes of the quants, scales and minimums of a packed matrix. Raises ParameterError."""
    if fmt not in FORMATS:
        raise ParameterError(f"format: unknown weight format {fmt!r}; choose one of {', '.join(FORMATS)}")
    if rows < 1 or columns < 1:
        raise ParameterError(f"shape: a weight matrix needs rows and columns, got {rows} × {columns}")
    kind = FORMATS[fmt]
    tiles = -(-rows // ROWS) * -(-columns // GROUP)
    scales = tiles * SCALE_BYTES
    return tiles * QUANT_BYTES[kind], scales if kind >= INT8 else 0, scales if kind == INT4M else 0


def packed_bytes(fmt: str, rows: int, columns: int) -> int:
    """How many bytes of the arena a matrix takes, a multiple of 64. Raises ParameterError."""
    return sum(aligned(size) for size in segments(fmt, rows, columns))


def format_name(matrix: Any) -> str:
    """The name of the format of a `formats.MATRIX` record."""
    return list(FORMATS)[int(matrix["format"])]
