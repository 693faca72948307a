"""The pointwise kernels against the reference, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.kernels.pointwise import add_row, copy_row, rms_norm_row, rope_row, swiglu_row
from qkv.model.reference import rms_norm, silu
from qkv.model.rope import Rope, rotate
from qkv.runtime.jit import kernel


def rows(n: int, size: int, seed: int = 0) -> np.ndarray:
    """n random numbers, then zeros up to `size`; around them 3 numbers that must not be read or written."""
    x = np.full(3 + size + 3, 77, np.float32)
    x[3 : 3 + size] = 0
    x[3 : 3 + n] = np.random.default_rng(seed).standard_normal(n)
    return x


@kernel
def run_norm(x, n, size, w, eps, out):
    rms_norm_row(x, 3, n, size, w, 3, eps, out, 3)


@kernel
def run_rope(x, d, cos, sin):
    rope_row(x, 3, d, cos, sin, 0)


@kernel
def run_swiglu(gate, up, size, out):
    swiglu_row(gate, 3, up, 3, size, out, 3)


@kernel
def run_add_and_copy(x, y, size, z):
    copy_row(x, 3, z, 3, size)
    add_row(x, 3, y, 3, size)


@pytest.mark.parametrize(("n", "size"), [(32, 32), (576, 576), (1024, 1024), (50, 64), (1, 32)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(n, size, eps):
    x, w, out = rows(n, size), rows(n, size, 1), rows(n, size, 2)
    run_norm(x, n, size, w, np.float32(eps), out)
    expected = rms_norm(x[3 : 3 + n].astype(np.float64), w[3 : 3 + n].astype(np.float64), eps)
    np.testing.assert_allclose(out[3 : 3 + n], expected, rtol=1e-5)
    assert np.all(out[3 + n : 3 + size] == 0)
    assert np.all(out[[0, 1, 2, -1, -2, -3]] == 77)


@pytest.mark.parametrize("d", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("position", [0, 1, 1001, 15962])
def test_rope(d, position):
    x = rows(d, d)
    cos, sin = Rope(d, 1e6).rotation(np.array([position]), np.float32)
    expected = rotate(x[None, None, 3 : 3 + d].astype(np.float64), *(a.astype(np.float64) for a in (cos, sin)))
    run_rope(x, d, cos.ravel(), sin.ravel())
    np.testing.assert_allclose(x[3 : 3 + d], expected[0, 0], atol=1e-6)


def test_swiglu():
    gate, up, out = rows(64, 64), rows(64, 64, 1), rows(64, 64, 2)
    gate[3:11] = [-1e4, -100, -88, -20, 20, 88, 100, 1e4]
    run_swiglu(gate, up, 64, out)
    expected = silu(gate[3:67].astype(np.float64)) * up[3:67]
    np.testing.assert_allclose(out[3:67], expected, rtol=2e-6, atol=1e-30)


def test_add_and_copy():
    x, y, z = rows(40, 64), rows(40, 64, 1), rows(0, 64)
    before = x.copy()
    run_add_and_copy(x, y, 64, z)
    assert np.array_equal(z[3:67], before[3:67])
    assert np.array_equal(x[3:67], before[3:67] + y[3:67])
    assert np.array_equal(x[[0, -1]], before[[0, -1]])
