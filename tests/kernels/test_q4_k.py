"""Q4_K as int4m: every number against the `gguf` package and the format's definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from ggufblocks import dequantized, q4_k_bound, q4_k_parts
from qkv.errors import ModelFileError, ParameterError
from qkv.kernels import formats, packing, sizes

SHAPES = [(8, 256), (13, 512), (1, 256), (40, 768)]
TINY, LARGE = 2.0**-24, 1039.0  # the smallest half; the largest integer that times 63 is below the largest half


def random_blocks(rows, columns, scales=(0.001, 0.01), seed=7):
    """Any bytes whatever, with d and dmin drawn from `scales`."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
    numbers = rng.uniform(*scales, (rows, columns // 256, 2)).astype(np.float16)
    blocks[..., :4] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


def packed(blocks, rows, columns):
    """An arena that was used before, the matrix in it, and whether its scales fit."""
    arena = np.full(sizes.packed_bytes("int4m", rows, columns), 0xAA, np.uint8)
    matrix = formats.place("int4m", rows, columns)
    return arena, matrix, packing.pack_q4_k(arena, matrix, 0, blocks)


def check(blocks, rows, columns):
    """Each weight is float16(d·scale)·q + float16(-dmin·minimum), rounded once: within 2^-11 of its two terms."""
    arena, matrix, fits = packed(blocks, rows, columns)
    assert fits
    values = formats.unpack(arena, matrix)
    d, m, q = q4_k_parts(blocks)
    rounded = d.astype(np.float16).astype(np.float64) * q + m.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(values, rounded.astype(np.float32).reshape(rows, columns))
    exact = dequantized("Q4_K", blocks)
    assert (np.abs(values.astype(np.float64) - exact) <= q4_k_bound(blocks)).all()
    return values, exact


@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_scales_are_rounded(shape):
    values, exact = check(random_blocks(*shape), *shape)
    assert (values != exact).any()


@pytest.mark.parametrize("scales", [(TINY, 2.0**-14), (-(2.0**-14), 2.0**-14), (-1e-3, 1e-3), (1.0, LARGE)])
def test_extreme_scales(scales):
    check(random_blocks(16, 512, scales), 16, 512)


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-17, 2.0**-5, -0.5, 1.0, 31 * 2.0**-10, 1024.0])
def test_scales_that_are_halves_already_keep_every_number(scale):
    """5 bits times 6 are within a half's 11, and so is what stays a multiple of 2^-24 below 2^-14."""
    values, exact = check(random_blocks(9, 512, (scale, scale)), 9, 512)
    np.testing.assert_array_equal(values, exact)


def test_no_scale_is_too_small():
    """Every subnormal d, its scales any: below 2^-14 the product is exact, so none is flushed or rounded."""
    blocks = random_blocks(1024, 256).reshape(1024, 144)
    blocks[:, :4] = np.stack([np.arange(1024), np.zeros(1024)], axis=1).astype(np.uint16).view(np.uint8)
    values, exact = check(blocks, 1024, 256)
    d, _, _ = q4_k_parts(blocks)
    small = (d < 2.0**-14).repeat(32, axis=-1).reshape(1024, 256)
    assert small.mean() > 0.05
    np.testing.assert_array_equal(values[small], exact[small])


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("row", [0, 12])
def test_scales_beyond_half_precision_are_reported(at, sign, row):
    blocks = random_blocks(13, 512)
    block = blocks[row, 144:]
    block[4:16] = 0xFF  # all scales and minimums 63
    for number, fits in ((1039.0, True), (1040.0, False), (65504.0, False)):
        block[at : at + 2] = np.float16([sign * number]).view(np.uint8)
        assert packed(blocks, 13, 512)[2] is fits


def test_tile_bytes_are_where_the_layout_says():
    blocks = random_blocks(8, 256)
    arena, _, _ = packed(blocks, 8, 256)
    _, _, q = q4_k_parts(blocks)  # [row, group, 32]
    q = q.astype(np.uint8)
    tiles = q[..., :16] | q[..., 16:] << 4  # [row, group, 4j + t]
    assert arena[:1024].tobytes() == tiles.reshape(8, 8, 4, 4).transpose(1, 2, 0, 3).tobytes()


def test_packing_in_ranges_is_packing_at_once():
    blocks = random_blocks(29, 512)
    whole, matrix, _ = packed(blocks, 29, 512)
    pieces = np.full_like(whole, 0x55)
    for first, end in ((24, 29), (0, 16), (16, 24)):
        assert packing.pack_q4_k(pieces, matrix, first, blocks[first:end])
    np.testing.assert_array_equal(pieces, whole)


def test_padding_is_zero_even_in_used_memory():
    arena, matrix, _ = packed(random_blocks(9, 256), 9, 256)
    whole = np.array([matrix], formats.MATRIX)
    whole["rows"] = 16
    assert (formats.unpack(arena, whole[0])[9:] == 0).all()


@pytest.mark.parametrize("at", [1, 3])
def test_scales_that_are_not_finite_are_refused_by_name(at):
    blocks = random_blocks(8, 512)
    blocks[3, 144 + at] |= 0x7C
    with pytest.raises(ModelFileError, match=r"^blk\.0\.k: a block's scale is not finite"):
        packing.pack_q4_k(formats.new_arena(8192), formats.place("int4m", 8, 512), 0, blocks, "blk.0.k")


def test_what_does_not_fit_is_refused():
    arena, blocks = formats.new_arena(8192), random_blocks(8, 256)
    for fmt, columns in (("int8", 256), ("int4", 256), ("int4m", 896)):
        with pytest.raises(ParameterError, match=rf"^k_proj: Q4_K rows of {columns} numbers .* {fmt}$"):
            packing.pack_q4_k(arena, formats.place(fmt, 8, columns), 0, blocks, "k_proj")
    matrix = formats.place("int4m", 8, 512)
    with pytest.raises(ParameterError, match=r"^k_proj: expected rows of 288 items"):
        packing.pack_q4_k(arena, matrix, 0, blocks, "k_proj")
    with pytest.raises(ParameterError, match=r"^k_proj: GGUF blocks are uint8, got int8"):
        packing.pack_q4_k(arena, matrix, 0, random_blocks(8, 512).view(np.int8), "k_proj")
    with pytest.raises(ParameterError, match="arena"):
        packing.pack_q4_k(arena[:100], matrix, 0, random_blocks(8, 512), "k_proj")
