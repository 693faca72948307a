"""Products against NumPy in float64, and the same bits from every tile, range of rows, mode and processor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numba.core.caching import NullCache

from qkv.kernels import formats, matmul, packing, sizes
from qkv.kernels.isa import ISA
from qkv.kernels.isa.x86 import AVX2
from qkv.kernels.matmul import TOKEN_CHUNK, Inputs, Outputs, matmul_for, quantize_groups
from qkv.kernels.panels import panel_size
from qkv.kernels.tiles import BIAS4, BIAS8, INFO, OUTLIER, TOTAL

FORMATS = list(sizes.FORMATS)
TOKENS = (1, 2, 3, 5, 8, 15, 16, 17, 33)


def normal(*shape, seed=0, scale=2.0):
    """Normal numbers whose scale differs from group to group of 32 in the last dimension."""
    rng = np.random.default_rng(seed)
    groups = np.exp(rng.normal(scale=scale, size=(*shape[:-1], -(-shape[-1] // 32))))
    values: np.ndarray = rng.normal(size=shape) * np.repeat(groups, 32, axis=-1)[..., : shape[-1]]
    return values.astype(np.float32)


def quantized(x):
    """x [T, K padded to 32] → xq, xs, xinfo, flat."""
    groups = x.size // 32
    xq, xs, xinfo = np.zeros(x.size, np.int8), np.zeros(groups, np.float32), np.zeros(INFO * groups, np.int32)
    quantize_groups(x.reshape(-1), 0, xq, xs, xinfo, 0, groups)
    return xq, xs, xinfo


def integers(x):
    """The activations' integers [groups, 32], outliers whole, put together from what the kernel made."""
    xq, _, xinfo = quantized(x)
    whole = xq.reshape(-1, 32).astype(np.int64)
    info = xinfo.reshape(-1, INFO)
    whole[np.arange(len(whole)), info[:, OUTLIER] >> 19] += info[:, OUTLIER].astype(np.uint16).astype(np.int16)
    return whole


def scratch_for(matrix):
    return np.full(3 + panel_size(int(matrix["columns"])), np.nan, np.float32)


def product(arena, matrix, x, ranges=None):
    """The kernel's out [T, rows], with a margin around it that must stay as it is."""
    tokens, rows = len(x), int(matrix["rows"])
    stride = rows + 5
    out = np.full(3 + tokens * stride, np.float32(-77))
    kernel = matmul_for(tuple(FORMATS))
    shifted = np.concatenate([np.full(7, np.nan, np.float32), x.reshape(-1)])
    for first, end in ranges or [(0, int(matrix["blocks"]))]:
        inputs, outputs = Inputs(shifted, 7, *quantized(x), tokens), Outputs(out, 3, stride)
        kernel(arena, matrix, inputs, outputs, first, end, 0, scratch_for(matrix), 3)
    table = out[3:].reshape(tokens, stride)
    assert (out[:3] == -77).all() and (table[:, rows:] == -77).all()
    return table[:, :rows]


def padded(x):
    return np.ascontiguousarray(np.pad(x, ((0, 0), (0, -x.shape[1] % 32))))


def used_activations(fmt, x):
    """What the product's activations stand for, in float64."""
    if fmt in ("f32", "bf16"):
        return x.astype(np.float64)
    _, xs, _ = quantized(x)
    return (integers(x) * xs.astype(np.float64)[:, None]).reshape(x.shape)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(13, 96), (72, 50), (8, 32), (1, 1)])
def test_products_are_those_of_numpy(fmt, shape):
    w, x = normal(*shape), padded(normal(max(TOKENS), shape[1], seed=1))
    arena, matrix = packing.quantize(w, fmt)
    weights = np.pad(formats.unpack(arena, matrix), ((0, 0), (0, -shape[1] % 32))).astype(np.float64)
    inputs = used_activations(fmt, x)
    want = inputs @ weights.T
    # Each rounding of a running sum is at most half an ulp of what the magnitudes add up to.
    magnitude = np.abs(inputs) @ np.abs(weights).T
    if fmt == "int4m":
        magnitude += np.abs(inputs).sum(1, keepdims=True) * np.abs(weights).max() * 8  # d·q and m nearly cancel
    roundings = shape[1] + 2 if fmt in ("f32", "bf16") else 2 * (shape[1] // 32 + 1) + 2
    for tokens in TOKENS:
        got = product(arena, matrix, x[:tokens])
        assert (np.abs(got - want[:tokens]) <= roundings * 2.0**-24 * magnitude[:tokens]).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_token_alone_gives_the_bits_of_a_batch(fmt):
    arena, matrix = packing.quantize(normal(45, 160), fmt)
    x = normal(TOKEN_CHUNK + 7, 160, seed=2)
    together = product(arena, matrix, x)
    for tokens in TOKENS:
        np.testing.assert_array_equal(product(arena, matrix, x[:tokens]), together[:tokens])
    alone = np.concatenate([product(arena, matrix, row[None]) for row in x])
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_split_of_the_rows_gives_the_same_bits(fmt):
    arena, matrix = packing.quantize(normal(77, 64), fmt)
    x = normal(9, 64, seed=3)
    whole = product(arena, matrix, x)
    for ranges in ([(i, i + 1) for i in range(10)], [(5, 10), (0, 5)], [(0, 3), (9, 10), (3, 9)]):
        np.testing.assert_array_equal(product(arena, matrix, x, ranges), whole)


@pytest.mark.parametrize("fmt", ["int8", "int4", "int4m"])
def test_sums_are_in_the_order_of_the_contract(fmt):
    """acc = fma(float(Σ Q·X), d·xs, acc), then fma(m, xs·ΣX, acc): every rounding, from float64 of exact products."""
    arena, matrix = packing.quantize(normal(24, 256), fmt)
    x = normal(3, 256, seed=4)
    xs = quantized(x)[1].reshape(3, 8)
    whole = integers(x).reshape(3, 8, 32)
    assert np.abs(whole).max() > 127  # there are outliers
    blocks = 3
    scales = arena[int(matrix["scales"]) :][: blocks * 8 * 16].view(np.float16).reshape(blocks, 8, 8)
    scales = scales.transpose(0, 2, 1).reshape(24, 8).astype(np.float32)
    weights = formats.unpack(arena, matrix).reshape(24, 8, 32).astype(np.float64)
    minimums = np.zeros((24, 8))
    if fmt == "int4m":
        minimums = arena[int(matrix["minimums"]) :][: blocks * 8 * 16].view(np.float16).reshape(blocks, 8, 8)
        minimums = minimums.transpose(0, 2, 1).reshape(24, 8).astype(np.float64)
    with np.errstate(all="ignore"):
        q = np.nan_to_num(np.rint((weights - minimums[..., None]) / scales[..., None]))
    acc = np.zeros((3, 24), np.float32)
    for g in range(8):
        dots = np.einsum("rk,tk->tr", q[:, g], whole[:, g].astype(np.float64))
        scale = (scales[:, g][None] * xs[:, g, None]).astype(np.float32)
        acc = (dots * scale.astype(np.float64) + acc).astype(np.float32)
        if fmt == "int4m":
            total = (xs[:, g] * whole[:, g].sum(1).astype(np.float32)).astype(np.float32)[:, None]
            acc = (minimums[:, g][None] * total.astype(np.float64) + acc).astype(np.float32)
    np.testing.assert_array_equal(product(arena, matrix, x), acc)


def test_extreme_bytes_do_not_overflow():
    """Q8_0 files may hold -128, Q4_0 blocks may hold the same nibble 32 times; activations reach ±127."""
    x = np.tile(np.array([[127.0], [-127.0]], np.float32), (20, 64))
    cases = (("int8", "Q8_0", 0x80), ("int8", "Q8_0", 0x7F), ("int4", "Q4_0", 0xFF), ("int4", "Q4_0", 0))
    for fmt, kind, byte in cases:
        blocks = np.full((8, 2, 34 if fmt == "int8" else 18), byte, np.uint8)
        blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        blocks = blocks.reshape(8, -1)
        arena, matrix = np.zeros(sizes.packed_bytes(fmt, 8, 64), np.uint8), formats.place(fmt, 8, 64)
        packing.pack_gguf(arena, matrix, 0, blocks)
        weights = dequantize(blocks, getattr(GGMLQuantizationType, kind))
        for tokens in (2, 9, 40):
            np.testing.assert_array_equal(product(arena, matrix, x[:tokens]), x[:tokens] @ weights.T)


def numpy_quantization(x):
    """The contract of `quantize_groups`, in NumPy: integers [groups, 32] and steps."""
    groups = x.reshape(-1, 32)
    second, largest = np.sort(np.abs(groups), axis=1)[:, -2:].T
    with np.errstate(all="ignore"):
        d = np.maximum(second / np.float32(127), largest / np.float32(32767))
        d[d < np.float32(2.0**-126)] = 0
        inverse = np.where(d == 0, np.float32(0), np.float32(1) / d)
    return np.rint(groups * inverse[:, None]).astype(np.int64), d


def test_activation_quantization_is_that_of_numpy():
    x = normal(64, 256, seed=5, scale=20)
    x[0, :32], x[1, :32], x[2, :32] = 0, 1e-42, -3.4e38
    x[3, :32] = np.arange(-16, 16) + 0.5  # ties, after scaling by a power of two
    x[3, 0] = 127
    x[4, :64] *= np.float32(2.0**-120)
    x[5, :32] = 0
    x[5, 17] = -3  # nothing but an outlier
    x[6, :32] = 1
    x[6, 31] = 1e30
    whole, d = numpy_quantization(x)
    xq, xs, xinfo = quantized(x)
    info = xinfo.reshape(-1, INFO)
    np.testing.assert_array_equal(xs, d)
    np.testing.assert_array_equal(integers(x), whole)
    np.testing.assert_array_equal(xq.reshape(-1, 32), np.clip(whole, -127, 127))
    np.testing.assert_array_equal(info[:, BIAS4], -8 * whole.sum(1))
    np.testing.assert_array_equal(info[:, BIAS8], -128 * whole.sum(1))
    total = np.ascontiguousarray(info[:, TOTAL]).view(np.float32)
    np.testing.assert_array_equal(total, d * whole.sum(1).astype(np.float32))
    column = info[:, OUTLIER] >> 19
    assert set(column[np.abs(whole).max(1) > 127]) == set(range(32))  # outliers everywhere


def test_the_outlier_costs_the_other_activations_nothing():
    """Against plain int8, whose step would be 50/127 and whose error up to half of that."""
    x = normal(64, 256, seed=8, scale=0)
    x[:, ::32] = 50
    assert np.abs(used_activations("int8", x) - x).max() < 50 / 127 / 2 / 10


def test_activations_that_are_not_finite_stay_so():
    x = np.ones((3, 64), np.float32)
    x[0, 5], x[1, 40], x[2, 0] = np.nan, np.inf, -np.inf
    _, xs, _ = quantized(x)
    assert not np.isfinite(xs.reshape(3, 2)[[0, 1, 2], [0, 1, 0]]).any()
    arena, matrix = packing.quantize(normal(8, 64), "int8")
    assert not np.isfinite(product(arena, matrix, x)).any()


def test_no_reference_is_counted_and_nothing_raises():
    from purity import assert_pure

    arena, matrix = packing.quantize(normal(8, 32), "int4")
    x, out = normal(1, 32), np.zeros(8, np.float32)
    inputs, outputs = Inputs(x.reshape(-1), 0, *quantized(x), 1), Outputs(out, 0, 8)
    arguments = (arena, matrix, inputs, outputs, 0, 1, 0, scratch_for(matrix), 0)
    assert_pure(matmul_for(tuple(FORMATS)), *arguments)
    assert_pure(quantize_groups, x.reshape(-1), 0, *quantized(x), 0, 1)
    assert_pure(formats.dequantize_row, arena, matrix, 3, out, 0)


def test_only_the_formats_asked_for_are_compiled():
    matmul._product.cache_clear()
    matmul_for.cache_clear()
    kernel = matmul_for(("int8", "int4"))
    arena, matrix = packing.quantize(normal(8, 32), "int8")
    x, out = normal(1, 32), np.zeros(8, np.float32)
    inputs, outputs = Inputs(x.reshape(-1), 0, *quantized(x), 1), Outputs(out, 0, 8)
    arguments = (arena, matrix, inputs, outputs, 0, 1, 0, scratch_for(matrix), 0)
    kernel._cache = NullCache()  # a stored kernel would compile nothing at all
    kernel(*arguments)
    compiled = {fmt for fmt, kind in sizes.FORMATS.items() if matmul._product(kind).part.overloads}
    assert compiled == {"int8", "int4"}
    np.testing.assert_array_equal(out, product(arena, matrix, x)[0])


def digest() -> str:
    """A hash of products in every format; run in other modes and for other processors by the test below."""
    everything = hashlib.sha256()
    for fmt in FORMATS:
        arena, matrix = packing.quantize(normal(45, 192, seed=6), fmt)
        everything.update(arena.tobytes())
        everything.update(product(arena, matrix, normal(23, 192, seed=7)).tobytes())
        everything.update(formats.unpack(arena, matrix).tobytes())
    return everything.hexdigest()


MODES = {
    "portable": {"QKV_SIMD": "portable"},
    "checked": {"QKV_SIMD": "checked"},
    "avx2": {"QKV_SIMD": "avx2"},
    "plain Numba": {"QKV_PLAIN_NUMBA": "1"},
    "AVX2 without VNNI": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"},
    "generic processor": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}


@pytest.mark.parametrize(  # each compiles everything; the light suite does it once
    "mode", [mode if mode == "generic processor" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_every_mode_gives_the_same_bits(mode):
    if "avx2" in mode.lower() and not isinstance(ISA, AVX2):
        pytest.skip("this processor has no AVX2")
    result = subprocess.run(
        [sys.executable, "-c", "import test_matmul as t, qkv.kernels.memory as m; print(t.digest(), m.faults())"],
        env={**os.environ, **MODES[mode]},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [digest(), "0"]
