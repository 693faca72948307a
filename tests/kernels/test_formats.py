"""Layouts against a NumPy transposition, numbers against the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from qkv.errors import ModelFileError, ParameterError
from qkv.kernels import formats, packing, sizes

GGUF = {"int8": GGMLQuantizationType.Q8_0, "int4": GGMLQuantizationType.Q4_0, "int4m": GGMLQuantizationType.Q4_1}
SHAPES = [(8, 32), (13, 64), (1, 32), (40, 96)]


def weights(rows, columns, seed=0):
    """Normal numbers whose scale differs from group to group, with a group of zeros and one of tiny numbers."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(scale=3, size=(rows, -(-columns // 32), 1)))
    values = (rng.normal(size=(rows, -(-columns // 32), 32)) * scale).reshape(rows, -1)[:, :columns]
    values[0, :32] = 0
    values[-1, -32:] *= 1e-30
    return values.astype(np.float32)


def bf16_bits(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16)  # cut, not rounded: any bfloat16 will do


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", GGUF)
def test_quantizing_is_that_of_gguf(fmt, shape):
    values = weights(*shape)
    arena, matrix = packing.quantize(values, fmt)
    want = dequantize(quantize(values, GGUF[fmt]), GGUF[fmt])
    np.testing.assert_array_equal(formats.unpack(arena, matrix), want)


def random_blocks(fmt, rows, columns):
    """Blocks of any bytes whatever, with scales that are finite: -128 in Q8_0, negative scales, subnormal scales."""
    rng = np.random.default_rng(7)
    size = {"int8": 34, "int4": 18, "int4m": 20}[fmt]
    blocks = rng.integers(0, 256, (rows, columns // 32, size), dtype=np.uint8)
    for upper in range(1, 4 if fmt == "int4m" else 2, 2):
        blocks[..., upper] &= 0xBB  # clears one exponent bit: never infinite
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", GGUF)
def test_gguf_blocks_keep_every_number(fmt, shape):
    blocks = random_blocks(fmt, *shape)
    arena = np.full(sizes.packed_bytes(fmt, *shape), 0xAA, np.uint8)
    matrix = formats.place(fmt, *shape)
    packing.pack_gguf(arena, matrix, 0, blocks)
    np.testing.assert_array_equal(formats.unpack(arena, matrix), dequantize(blocks, GGUF[fmt]))


@pytest.mark.parametrize("columns", [32, 45, 71])
@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_exact_formats_keep_every_bit(fmt, columns):
    values = (bf16_bits(weights(13, columns)).astype(np.uint32) << 16).view(np.float32)
    source = values if fmt == "f32" else bf16_bits(values)
    arena, matrix = packing.quantize(source, fmt)
    np.testing.assert_array_equal(formats.unpack(arena, matrix), values)


@pytest.mark.parametrize("fmt", sizes.FORMATS)
def test_sources_of_equal_value_pack_equally(fmt):
    halves = np.random.default_rng(3).normal(size=(11, 50)).astype(np.float16)
    of_half, _ = packing.quantize(halves, fmt)
    of_float, _ = packing.quantize(halves.astype(np.float32), fmt)
    assert of_half.tobytes() == of_float.tobytes()
    bits = bf16_bits(weights(11, 50))
    of_bits, _ = packing.quantize(bits, fmt)
    of_float, _ = packing.quantize((bits.astype(np.uint32) << 16).view(np.float32), fmt)
    assert of_bits.tobytes() == of_float.tobytes()


@pytest.mark.oracle
def test_float32_rounds_to_the_nearest_bfloat16():
    torch = pytest.importorskip("torch")
    values = weights(16, 64, seed=9)
    arena, matrix = packing.quantize(values, "bf16")
    want = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(formats.unpack(arena, matrix), want)


def test_tile_bytes_are_where_the_layout_says():
    blocks = random_blocks("int4", 8, 64)
    arena, matrix = np.zeros(sizes.packed_bytes("int4", 8, 64), np.uint8), formats.place("int4", 8, 64)
    packing.pack_gguf(arena, matrix, 0, blocks)
    file = blocks.reshape(8, 2, 18)
    # [row, group, j, t] → [group, j, row, t]
    quants = file[..., 2:].reshape(8, 2, 4, 4).transpose(1, 2, 0, 3).reshape(-1)
    scales = file[..., :2].transpose(1, 0, 2).reshape(-1)
    assert arena[:256].tobytes() == quants.tobytes()
    assert arena[int(matrix["scales"]) :][:32].tobytes() == scales.tobytes()


@pytest.mark.parametrize("fmt", sizes.FORMATS)
def test_packing_in_ranges_is_packing_at_once(fmt):
    values = weights(29, 70)
    arena, matrix = packing.quantize(values, fmt)
    parts = np.full(len(arena) + 64, 0x55, np.uint8)
    moved = formats.place(fmt, 29, 70, offset=64)
    for first, end in ((24, 29), (0, 16), (16, 24)):
        packing.pack(parts, moved, first, values[first:end])
    used = [(64 + int(matrix[name]), name) for name in ("quants", "scales", "minimums")]
    np.testing.assert_array_equal(formats.unpack(parts, moved), formats.unpack(arena, matrix), err_msg=str(used))
    np.testing.assert_array_equal(formats.unpack(parts, moved, 5, 9), formats.unpack(arena, matrix)[5:14])
    assert (parts[:64] == 0x55).all()


@pytest.mark.parametrize("fmt", sizes.FORMATS)
def test_padding_is_zero_even_in_used_memory(fmt):
    rows, columns = 9, 33
    arena = np.full(sizes.packed_bytes(fmt, rows, columns), 0xFF, np.uint8)
    matrix = formats.place(fmt, rows, columns)
    packing.pack(arena, matrix, 0, weights(rows, columns))
    whole = np.array([matrix], formats.MATRIX)
    whole["rows"], whole["columns"] = 16, 64  # look at the padding too
    padded = formats.unpack(arena, whole[0])
    assert (padded[9:] == 0).all()
    if fmt != "int4m":  # its grid need not contain 0; the activations that meet this padding are 0
        assert (padded[:, 33:] == 0).all()


def test_segments_start_at_64_bytes():
    matrix = formats.place("int4m", 8, 96, offset=128)
    offsets = [int(matrix[name]) for name in ("quants", "scales", "minimums")]
    assert offsets == [128, 128 + 384, 128 + 384 + 64]
    assert sizes.packed_bytes("int4m", 8, 96) == 384 + 64 + 64


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(bad):
    values = weights(16, 64)
    values[11, 63] = bad
    with pytest.raises(ModelFileError, match=r"blk\.0\.k: rows 0 to 15 hold a number that is not finite"):
        packing.pack(formats.new_arena(4096), formats.place("int8", 16, 64), 0, values, "blk.0.k")


@pytest.mark.parametrize("fmt", GGUF)
def test_scales_that_are_not_finite_are_refused_by_name(fmt):
    blocks = random_blocks(fmt, 8, 64)
    blocks[3, 1 if fmt != "int4m" else 3] = 0x7C
    with pytest.raises(ModelFileError, match=r"blk\.0\.k: .* not finite"):
        packing.pack_gguf(formats.new_arena(4096), formats.place(fmt, 8, 64), 0, blocks, "blk.0.k")


def test_what_does_not_fit_is_refused():
    matrix = formats.place("int8", 20, 64)
    arena = formats.new_arena(sizes.packed_bytes("int8", 20, 64))
    for first, values in ((4, weights(8, 64)), (0, weights(7, 64)), (16, weights(8, 64)), (0, weights(8, 32))):
        with pytest.raises(ParameterError, match="k_proj: "):
            packing.pack(arena, matrix, first, values, "k_proj")
    with pytest.raises(ParameterError, match="float64"):
        packing.pack(arena, matrix, 0, np.zeros((8, 64)), "k_proj")
    with pytest.raises(ParameterError, match="unknown weight format 'int3'"):
        formats.place("int3", 8, 32)
    with pytest.raises(ParameterError, match="arena"):
        packing.pack(arena[:100], matrix, 0, weights(8, 64), "k_proj")
