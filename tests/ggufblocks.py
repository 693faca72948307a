"""Blocks of random bytes in every quantized type of GGUF, and what the `gguf` package makes of them."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from qkv.weights.tensor import BLOCKS

SCALES = {  # where a block has its float16 scale, and its minimum's if it has one, of a size that centres the numbers
    "Q4_0": {0: 1}, "Q4_1": {0: 1, 2: -7.5}, "Q5_0": {0: 1}, "Q5_1": {0: 1, 2: -15.5}, "Q8_0": {0: 1},
    "Q2_K": {80: 1, 82: 1.5}, "Q3_K": {108: 1}, "Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5}, "Q6_K": {208: 1},
    "IQ4_NL": {0: 1}, "IQ4_XS": {0: 1},
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Random quants and inner scales, with block scales that make the numbers about as large as weights are."""
    rng = np.random.default_rng(seed)
    size, width = BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows, columns // size, width), dtype=np.uint8)

    def scaled(scale: float) -> NDArray[np.uint8]:
        for at, factor in SCALES[kind].items():
            blocks[..., at : at + 2] = np.float16([scale * factor]).view(np.uint8)
        return blocks.reshape(rows, -1)

    deviation = dequantized(kind, scaled(1.0)).std()
    return scaled(1.5 / np.sqrt(columns) / deviation).copy()


def dequantized(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def q4_k_parts(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """d·scale, -dmin·minimum [blocks, 8, 1] and quants [blocks, 8, 32], by the format's definition; exact."""
    blocks = blocks.reshape(-1, 144)
    d, dmin = blocks[:, :4].copy().view(np.float16).astype(np.float64).T[..., None]
    scale, minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].copy())
    quants = blocks[:, 16:].reshape(-1, 4, 1, 32) >> np.array([[0], [4]], np.uint8) & 15
    return (d * scale)[..., None], -(dmin * minimum)[..., None], quants.reshape(-1, 8, 32).astype(np.float64)


def q4_k_bound(blocks: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How far a weight d·q + m may be from gguf's when d and m are rounded to halves, [rows, columns].

    2^-11 of each term, and one rounding to float32 in either's sum.
    """
    d, m, q = q4_k_parts(blocks)
    bound = (2.0**-11 + 2.0**-23) * (np.abs(d * q) + np.abs(m))
    return bound.reshape(len(blocks), -1)
