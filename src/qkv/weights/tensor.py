"""A tensor as its file stores it: raw bytes by rows, and the exact float32 values they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# How each format stores numbers: (numbers in a block, bytes of a block). A row is a whole number of blocks.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
SLICE = 1 << 20  # numbers converted at a time: bounds the memory beside the result


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a model file; nothing is read from disk until `rows` or `to_float32` looks at it."""

    name: str
    shape: tuple[int, ...]  # NumPy order: (outputs, inputs) for a matrix
    dtype: str  # a key of BLOCKS
    data: npt.NDArray[np.uint8]  # [rows, bytes per row], as stored; a vector is one row
    row_order: npt.NDArray[np.intp] | None = None  # row i of the tensor is stored row row_order[i]

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The values, exact, with the tensor's shape. Needs the result's memory and a few megabytes."""
        rows, columns = self.data.shape[0], self.shape[-1]
        result = np.empty((rows, columns), np.float32)
        step = max(1, SLICE // columns)
        for start in range(0, rows, step):
            result[start : start + step] = decode(self.dtype, self.rows(start, start + step))
        return result.reshape(self.shape)

    def rows(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """uint8 [rows, bytes per row]: rows start … stop-1 in the tensor's order.

        A read-only view where no reordering is needed.
        """
        return self.data[start:stop] if self.row_order is None else self.data[self.row_order[start:stop]]

    def same_values(self, other: StoredTensor) -> bool:
        """Whether both hold the same numbers; stops at the first slice that differs."""
        if self.shape != other.shape:
            return False
        step = max(1, SLICE // self.shape[-1])
        for start in range(0, self.data.shape[0], step):
            mine, theirs = self.rows(start, start + step), other.rows(start, start + step)
            if self.dtype == other.dtype and np.array_equal(mine, theirs):
                continue
            if not np.array_equal(decode(self.dtype, mine), decode(other.dtype, theirs), equal_nan=True):
                return False
        return True


def decode(dtype: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """uint8 [rows, bytes per row] in the format `dtype` -> float32 [rows, columns]. Exact for F32, F16 and BF16."""
    if dtype == "F32":
        return raw.view("<f4")
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    import gguf  # takes 0.1 s, and checkpoints in floating point never need it

    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales give NaN or infinity; whoever loads decides
        values: Any = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    return values
