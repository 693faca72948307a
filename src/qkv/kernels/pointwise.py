# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""What happens to one token's numbers between the products: norms, rotation, SwiGLU, sums.

A token's numbers lie in a row of a flat float32 array, padded with zeros to a multiple of 32, so every loop here runs
in whole vectors and padding never changes a sum. Sums are made in 8 lanes that are added by a fixed tree.
"""

from __future__ import annotations

import numpy as np

from qkv.kernels.memory import load, store
from qkv.kernels.simd import exp, fma, splat, sum_lanes
from qkv.kernels.values import f32x8
from qkv.runtime.jit import kernel


@kernel
def add_row(x, x_at, y, y_at, size):
    """x += y, over `size` numbers: the residual connection, or a bias."""
    for i in range(0, size, 8):
        store(x, x_at + i, load(f32x8, x, x_at + i) + load(f32x8, y, y_at + i))


@kernel
def copy_row(source, source_at, target, target_at, size):
    """target = source, over `size` numbers."""
    for i in range(0, size, 8):
        store(target, target_at + i, load(f32x8, source, source_at + i))


@kernel
def rms_norm_row(x, x_at, n, size, weights, weights_at, eps, out, out_at):
    """x / √(mean(x²) + ε) · weight → out, for the n numbers of a row padded to `size` (the mean is over n)."""
    squares = splat(f32x8, 0)
    for i in range(0, size, 8):
        v = load(f32x8, x, x_at + i)
        squares = fma(v, v, squares)
    factor = np.float32(1) / np.sqrt(sum_lanes(squares) / np.float32(n) + eps)
    for i in range(0, size, 8):
        store(out, out_at + i, load(f32x8, x, x_at + i) * factor * load(f32x8, weights, weights_at + i))


@kernel
def rope_row(x, at, d, cos, sin, rotation_at):
    """Rotate each pair (x_i, x_{i + d/2}) of one head in place; cos and sin [d/2] are its position's."""
    half = d // 2
    for i in range(0, half, 8):
        first, second = load(f32x8, x, at + i), load(f32x8, x, at + half + i)
        c, s = load(f32x8, cos, rotation_at + i), load(f32x8, sin, rotation_at + i)
        store(x, at + i, first * c - second * s)
        store(x, at + half + i, second * c + first * s)


@kernel
def swiglu_row(gate, gate_at, up, up_at, size, out, out_at):
    """silu(gate) · up → out, with silu(g) = g / (1 + e^-g)."""
    for i in range(0, size, 8):
        g = load(f32x8, gate, gate_at + i)
        silu = g / (1 + exp(0 - g))
        store(out, out_at + i, silu * load(f32x8, up, up_at + i))
