"""Every vector operation against NumPy, and the same bits from every mode and processor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types

from qkv.errors import ParameterError
from qkv.kernels import isa, simd
from qkv.kernels.isa import ISA
from qkv.kernels.memory import emitted, load, spread, store, store_lanes
from qkv.kernels.values import Value, f32x8, i8x8, i8x32, i16x16, i32x8, u8x32, u16x8

# Not `qkv.runtime.jit.kernel`: a cached test kernel would not notice that simd.py has changed.
compiled = numba.njit(nogil=True, error_model="numpy")


@compiled
def float_operations(a, b, c, out):
    """out[k, …] = operation k of a, b, c."""
    for i in range(0, a.size, 8):
        x, y, z = load(f32x8, a, i), load(f32x8, b, i), load(f32x8, c, i)
        at = i
        for result in (
            x + y,
            x - y,
            x * y,
            x / y,
            simd.fma(x, y, z),
            simd.minimum(x, y),
            simd.maximum(x, y),
            simd.select(x < y, x, z),
            simd.absolute(x),
            simd.splat(f32x8, a[i]),
            spread(f32x8, b, i + 3),
            simd.exp(x),
        ):
            store(out, at, result)
            at += a.size


def float_oracle(a, b, c):
    wide = a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)
    with np.errstate(all="ignore"):
        return [
            a + b,
            a - b,
            a * b,
            a / b,
            (wide[0] * wide[1] + wide[2]).astype(np.float32),
            np.where(a < b, a, b),
            np.where(a > b, a, b),
            np.where(a < b, a, c),
            np.abs(a),
            np.repeat(a[::8], 8),
            np.repeat(b[3::8], 8),
        ]


def test_float_operations_are_those_of_numpy():
    a, b, c = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    out = np.zeros((12, 64), np.float32)
    float_operations(a, b, c, out.reshape(-1))
    for k, want in enumerate(float_oracle(a, b, c)):
        if k == 4:  # the oracle's product is exact in float64, its sum rounds twice: at most the last bit differs
            np.testing.assert_array_max_ulp(out[k], want, 1)
        else:
            np.testing.assert_array_equal(out[k], want, err_msg=f"operation {k}")


def test_fma_rounds_once():
    a = np.full(8, 1 + 2.0**-12, np.float32)
    out = np.zeros((12, 8), np.float32)
    float_operations(a, a, -np.full(8, 1 + 2.0**-11, np.float32), out.reshape(-1))
    assert (out[4] == 2.0**-24).all()  # a·a rounds to 1 + 2^-11 in float32: two roundings would give 0


# What matrix products are made of, for kernels.
multiply_add_bytes = emitted(lambda: i16x16)(ISA.multiply_add_bytes)
multiply_add_shorts = emitted(lambda: i32x8)(ISA.multiply_add_shorts)
dot_shorts = emitted(lambda: i32x8)(ISA.dot_shorts)
add_pairs = emitted(lambda: i32x8)(ISA.add_pairs)
with_sign_of = emitted(lambda: i8x32)(ISA.with_sign_of)


@emitted(lambda: i32x8)
def dot_int8(total: Value, w: Value, x: Value) -> Value:
    """total + w·x over fours of signed bytes, as `ISA` wants it done."""
    sums = ISA.add_pairs(ISA.multiply_add_bytes(x.bits(types.uint8).like(1), x))
    start = total - sums * ISA.int8_offset
    weights = ISA.int8_weights(w)
    return ISA.end_dot(ISA.add_dot(ISA.start_dot(True, start), weights, x), start)


@compiled
def integer_operations(u, s, t, out16, out32, signs):
    for i in range(0, u.size, 32):
        x, y, z = load(u8x32, u, i), load(i8x32, s, i), load(i8x32, t, i)
        sums = multiply_add_bytes(x, z)
        store(out16, i // 2, sums)
        store(out16, i // 2 + u.size // 2, multiply_add_bytes(x & 15, spread(i8x32, t, i)))
        store(signs, i, with_sign_of(z, y))
        pairs = multiply_add_shorts(sums, load(i16x16, out16, i // 2 + u.size // 2))
        total = simd.splat(i32x8, simd.sum_lanes(add_pairs(sums)))
        store(out32, i // 4, pairs)
        store(out32, i // 4 + u.size // 4, simd.lane_numbers() + total)
        store(out32, i // 4 + u.size // 2, simd.dot_nibbles(total, x & 15, z))
        store(out32, i // 4 + u.size // 4 * 3, dot_int8(total, y, z))
        store(out32, i // 4 + u.size, dot_shorts(total, sums, sums))


def products(a, b):
    return np.clip((a.astype(np.int64) * b).reshape(-1, 2).sum(1), -32768, 32767)


def integer_data():
    rng = np.random.default_rng(2)
    u = rng.integers(0, 256, 512).astype(np.uint8)
    s = rng.integers(-128, 128, 512).astype(np.int8)
    t = rng.integers(-127, 128, 512).astype(np.int8)
    u[:4], s[4:8], t[:8], s[8:10], t[8:10] = 255, -128, 127, 0, 5  # saturation, |-128|, sign(0)
    return u, s, t


def test_integer_operations_are_those_of_numpy():
    u, s, t = integer_data()
    out16, out32, signs = np.zeros((2, 256), np.int16), np.zeros((5, 128), np.int32), np.zeros(512, np.int8)
    integer_operations(u, s, t, out16.reshape(-1), out32.reshape(-1), signs)
    np.testing.assert_array_equal(out16[0], products(u, t))
    four = np.tile(t.reshape(-1, 32)[:, :4], 8).reshape(-1)
    np.testing.assert_array_equal(out16[1], products(u & 15, four))
    np.testing.assert_array_equal(signs, t * np.sign(s))
    np.testing.assert_array_equal(out32[0], (out16[0].astype(np.int64) * out16[1]).reshape(-1, 2).sum(1))
    total = out16[0].astype(np.int64).reshape(-1, 16).sum(1)[:, None]
    np.testing.assert_array_equal(out32[1].reshape(-1, 8), total + np.arange(8))
    for k, weights in ((2, u & 15), (3, s)):
        fours = (weights.astype(np.int64) * t).reshape(-1, 8, 4).sum(2)
        np.testing.assert_array_equal(out32[k].reshape(-1, 8), total + fours)
    squares = (out16[0].astype(np.int64) ** 2).reshape(-1, 8, 2).sum(2)
    np.testing.assert_array_equal(out32[4].reshape(-1, 8), (total + squares).astype(np.int32))


@compiled
def conversions(bits, floats, small, out, halves, whole, bytes_out):
    for i in range(0, bits.size, 8):
        store(out, i, simd.half_to_float(load(u16x8, bits, i)))
        store(out, i + bits.size, simd.bf16_to_float(load(u16x8, bits, i)))
    for i in range(0, floats.size, 8):
        store(halves, i, simd.float_to_half(load(f32x8, floats, i)))
    for i in range(0, small.size, 8):
        number = simd.round_to_int(load(f32x8, small, i))
        store(whole, i, number)
        store(bytes_out, i, simd.narrow(number))
        store(out, i + 2 * bits.size, simd.to_float(load(i8x8, bytes_out, i)))


def conversion_data():
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    steps = np.arange(0, 2**32, 65537, dtype=np.uint64).astype(np.uint32).view(np.float32)  # every exponent
    halves = bits.view(np.float16).astype(np.float32)
    middles = ((halves[:31743].astype(np.float64) + halves[1:31744]) / 2).astype(np.float32)  # exact ties
    edges = np.array(
        [65504, 65519.99, 65520, 1e9, np.inf, -np.inf, np.nan, 2**-24, 2**-25, 2**-26, 0, -0.0], np.float32
    )
    floats = np.concatenate([steps, halves, middles, -middles, edges])
    floats = np.concatenate([floats, np.zeros(-floats.size % 8, np.float32)])
    ties = np.arange(-254, 254, dtype=np.float32) / 2
    small = np.concatenate([ties, np.random.default_rng(3).uniform(-127, 127, 508).astype(np.float32)])
    return bits, floats, small


def run_conversions():
    bits, floats, small = conversion_data()
    out = np.zeros((3, 65536), np.float32)
    halves = np.zeros(floats.size, np.uint16)
    whole, narrowed = np.zeros(small.size, np.int32), np.zeros(small.size, np.int8)
    conversions(bits, floats, small, out.reshape(-1), halves, whole, narrowed)
    return out, halves, whole, narrowed


def test_conversions_are_those_of_numpy():
    bits, floats, small = conversion_data()
    out, halves, whole, narrowed = run_conversions()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out[0], bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(out[1].view(np.uint32), bits.astype(np.uint32) << 16)
    real = ~np.isnan(floats)
    want = np.clip(floats[real], -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(halves[real], want.view(np.uint16))
    assert np.isnan(halves[~real].view(np.float16)).all()
    np.testing.assert_array_equal(whole, np.rint(small))
    np.testing.assert_array_equal(narrowed, np.rint(small))
    np.testing.assert_array_equal(out[2, : small.size], np.rint(small))


def exponentials(x):
    out = np.zeros((12, x.size), np.float32)
    float_operations(x, x, x, out.reshape(-1))
    return out[11]


def test_exp_is_within_two_ulp():
    x = np.concatenate([np.linspace(-87.3, 88.3, 40000), np.linspace(-1, 1, 10000)]).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    error = np.abs(exponentials(x) - want) / np.spacing(want.astype(np.float32))
    assert error.max() < 2


def test_exp_at_the_edges():
    x = np.array([0, -0.0, -np.inf, -1e30, -88, -1000, np.nan, 1e30], np.float32)
    got = exponentials(x)
    assert (got[:2] == 1).all() and (got[2:6] == 0).all() and np.isnan(got[6]) and np.isfinite(got[7])


@compiled
def horizontal(a, out):
    for i in range(0, a.size, 8):
        out[0, i // 8] = simd.sum_lanes(load(f32x8, a, i))
        out[1, i // 8] = simd.max_lanes(load(f32x8, a, i))


def test_horizontal_sums_use_one_tree():
    a = np.random.default_rng(4).normal(size=800).astype(np.float32)
    out = np.zeros((2, 100), np.float32)
    horizontal(a, out)
    v = a.reshape(-1, 8).T
    np.testing.assert_array_equal(out[0], ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])))
    np.testing.assert_array_equal(out[1], v.max(0))


@compiled
def store_some_lanes(a, out):
    for count in range(-1, 10):
        store_lanes(out, 10 * (count + 1), load(f32x8, a, 0), count)


def test_store_lanes_writes_no_more_than_asked():
    a, out = np.arange(1, 9, dtype=np.float32), np.zeros(110, np.float32)
    store_some_lanes(a, out)
    for count, row in zip(range(-1, 10), out.reshape(11, 10), strict=True):
        assert row.tolist() == [*range(1, min(max(count, 0), 8) + 1), *[0] * (10 - min(max(count, 0), 8))]


@compiled
def out_of_bounds(a, out):
    for at in (-1, 0, a.size - 8, a.size - 7, 2**40):
        store(out, at, load(f32x8, a, at) + spread(f32x8, a, at))


def digest() -> str:
    """A hash of what every operation gives; run in other modes and for other processors by the tests below."""
    everything = hashlib.sha256()
    a, b, c = np.random.default_rng(5).normal(scale=20, size=(3, 4096)).astype(np.float32)
    a[:8] = 0, -0.0, np.inf, -np.inf, np.nan, 1e-42, 3e38, -3e38
    out = np.zeros((12, 4096), np.float32)
    float_operations(a, b, c, out.reshape(-1))
    out16, out32, signs = np.zeros(512, np.int16), np.zeros(640, np.int32), np.zeros(512, np.int8)
    integer_operations(*integer_data(), out16, out32, signs)
    for array in (out, out16, out32, signs, *run_conversions()):
        everything.update(array.tobytes())
    return everything.hexdigest()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


MODES = {
    "portable": {"QKV_SIMD": "portable"},
    "checked": {"QKV_SIMD": "checked"},
    "generic processor": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "QKV_SIMD": "auto"},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_bits(mode):
    result = python("import test_simd; print(test_simd.digest())", **MODES[mode])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest()


def test_a_generic_processor_gets_the_portable_form():
    result = python("from qkv.kernels.isa import ISA; print(ISA.name)", **MODES["generic processor"])
    assert result.stdout.split() == ["portable"], result.stderr


def test_every_processor_gets_the_best_of_its_instruction_sets():
    """By its features, as LLVM names them; one that lacks part of what a set needs gets the next."""
    wide, base = "+avx512f,+avx512bw,+avx512dq,+avx512vl", "+avx,+avx2,+fma,+f16c"
    cases = {
        f"{base},{wide},+avx512vnni": "vnni512",
        f"{base},+avx512vnni,+avx512vl": "vnni",
        f"{base},+avxvnni": "vnni",
        f"{base},+avx512vnni,{wide.replace('+avx512vl', '-avx512vl')}": "avx2",
        f"{base},{wide}": "avx512",
        base: "avx2",
        "+avx,+avx2": "portable",
        "+sse4.2,+avx512f": "portable",
    }
    for spelled, name in cases.items():
        features = frozenset(word[1:] for word in spelled.split(",") if word.startswith("+"))
        assert isa.chosen_set("auto", features).name == name, spelled
        assert isa.chosen_set("portable", features).name == "portable"
        if "+f16c" in spelled:
            assert isa.chosen_set("avx2", features).name == "avx2"
        else:
            with pytest.raises(ParameterError, match=r"^QKV_SIMD: this processor has no avx2; choose auto, portable"):
                isa.chosen_set("avx2", features)


def test_checked_mode_counts_what_leaves_an_array():
    code = """
import numpy as np, test_simd
from qkv.kernels.memory import faults
a, out = np.arange(1, 25, dtype=np.float32), np.zeros(24, np.float32)
test_simd.out_of_bounds(a, out)
print(faults(), faults(), *out)
"""
    result = python(code, QKV_SIMD="checked")
    assert result.returncode == 0, result.stderr
    numbers = [float(word) for word in result.stdout.split()]
    # Faults: at -1 and 2^40 both loads and the store, at size-7 the vector load and the store.
    assert numbers[:2] == [8, 0]
    assert numbers[2:] == [*range(2, 10), *[0] * 8, *range(34, 42)]


def test_an_unknown_mode_is_refused_in_one_line():
    result = python("import qkv.kernels.simd", QKV_SIMD="fast")
    assert result.returncode != 0
    assert (
        "QKV_SIMD: unknown mode 'fast'; choose one of auto, avx2, portable, checked" in result.stderr.splitlines()[-1]
    )
