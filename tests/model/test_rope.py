"""RoPE: the tables of every scaling against transformers', and what the rotation must keep."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkv.model.rope import (
    Divisors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    llama3_divisors,
    rope_frequencies,
    rotate,
    yarn_attention_factor,
)

HEAD_SIZES = [16, 64, 80, 96, 128]
THETAS = [1e4, 1e5, 5e5, 1e6, 5e6]


def units_apart(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance of two float32 arrays of positive numbers, in units in the last place."""
    assert a.dtype == b.dtype == np.float32
    return int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max())


def transformers_table(d: int, theta: float, **block: object) -> tuple[np.ndarray, float]:
    """transformers' frequencies and attention factor for a block of `rope_parameters`."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=4 * d,
        num_attention_heads=4,
        head_dim=d,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": theta, **block},
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.numpy(), embedding.attention_scaling


def test_pairs_turn_by_their_distance():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 32))
    rope = Rope(32, 1e4)

    def dot(m: int, n: int) -> float:
        rotations = [rope.rotation(np.array([p]), np.float64) for p in (m, n)]
        return float((rotate(q, *rotations[0]) * rotate(k, *rotations[1])).sum())

    assert dot(7, 3) == pytest.approx(dot(104, 100), abs=1e-4)  # angles are rounded to float32
    assert dot(7, 3) != pytest.approx(dot(8, 3), abs=1e-2)
    assert dot(0, 0) == pytest.approx(float((q * k).sum()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_positions_are_not_rounded_onto_each_other(dtype):
    """In bfloat16 these would be 256, 1000, 4096 and 15936. The first pair's frequency is 1."""
    positions = np.array([257, 1001, 4095, 15962])
    cos, sin = Rope(128, 1e6).rotation(positions, dtype)
    np.testing.assert_allclose(cos[:, 0], np.cos(positions), atol=1e-12 if dtype is np.float64 else 1e-7)
    np.testing.assert_allclose(sin[:, 0], np.sin(positions), atol=1e-12 if dtype is np.float64 else 1e-7)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_frequencies_are_powers_of_theta(d, theta):
    expected = theta ** (-np.arange(0, d, 2) / d)
    np.testing.assert_allclose(rope_frequencies(d, theta), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (LinearScaling(2.5), "linear, factor 2.5"),
        (Llama3Scaling(8.0, 1.0, 4.0, 8192), "llama3, factor 8, first trained on 8,192 positions"),
        (YarnScaling(4.0, 32_768, 1.1), "yarn, factor 4, first trained on 32,768 positions"),
        (Divisors((1.0, 2.5, 32.0)), "the file's own divisors, 1 to 32"),
    ],
)
def test_scalings_in_words(scaling, text):
    assert str(scaling) == text


def test_linear_scaling_slows_everything_down():
    positions = np.array([3, 40])
    scaled = Rope(32, 1e4, LinearScaling(4.0)).rotation(4 * positions, np.float64)
    plain = Rope(32, 1e4).rotation(positions, np.float64)
    np.testing.assert_allclose(scaled, plain, atol=1e-5)


def test_llama3s_three_bands():
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)  # Llama 3.2
    plain, scaled = rope_frequencies(64, 5e5), rope_frequencies(64, 5e5, scaling)
    turns = 8192 * plain / (2 * math.pi)
    assert np.array_equal(scaled[turns > 4], plain[turns > 4])
    assert np.array_equal(scaled[turns < 1], plain[turns < 1] / 32)
    between = (turns > 1) & (turns < 4)
    assert between.sum() == 3
    assert np.all(scaled[between] < plain[between])
    assert np.all(scaled[between] > plain[between] / 32)


def test_divisors_are_llama3s_bands_worked_out():
    """A GGUF file has the divisors where config.json has the rule: the same bits."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    divisors = llama3_divisors(rope_frequencies(128, 5e5), scaling)
    as_file = Divisors(tuple(float(value) for value in divisors))
    assert np.array_equal(rope_frequencies(128, 5e5, as_file), rope_frequencies(128, 5e5, scaling))
    assert 1 == divisors.min() < divisors.max() == 8


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    scaling = YarnScaling(4.0, 32_768, yarn_attention_factor(4.0))  # Qwen3's published setting
    plain, scaled = rope_frequencies(128, 1e6), rope_frequencies(128, 1e6, scaling)
    turns = 32_768 * plain / (2 * math.pi)
    assert np.array_equal(scaled[turns > 64], plain[turns > 64])
    np.testing.assert_allclose(scaled[turns < 0.5], plain[turns < 0.5] / 4, rtol=1e-6)
    assert Rope(128, 1e6, scaling).attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    cos, sin = Rope(128, 1e6, scaling).rotation(np.array([5]), np.float64)
    np.testing.assert_allclose(cos**2 + sin**2, (1 + 0.1 * math.log(4)) ** 2)


@pytest.mark.oracle
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_tables_equal_transformers(d, theta):
    """Within one unit in the last place; most are equal."""
    for scaling, block in [
        (None, {"rope_type": "default"}),
        (LinearScaling(2.5), {"rope_type": "linear", "factor": 2.5}),
    ]:
        expected, _ = transformers_table(d, theta, **block)
        assert units_apart(rope_frequencies(d, theta, scaling), expected) <= 1


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(32.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 8192), (4.0, 1.0, 2.0, 64)]
)
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_llama3_tables_equal_transformers(d, theta, factor, low, high, original):
    expected, _ = transformers_table(
        d,
        theta,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    assert units_apart(rope_frequencies(d, theta, Llama3Scaling(factor, low, high, original)), expected) <= 2


@pytest.mark.oracle
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (8.0, 0.5)])
@pytest.mark.parametrize(("factor", "original"), [(4.0, 32_768), (2.5, 64), (16.0, 4096)])
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_yarn_tables_equal_transformers(d, theta, factor, original, fast, slow, truncate):
    expected, attention_factor = transformers_table(
        d,
        theta,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    scaling = YarnScaling(factor, original, yarn_attention_factor(factor), fast, slow, truncate)
    assert units_apart(rope_frequencies(d, theta, scaling), expected) <= 2
    assert scaling.attention_factor == attention_factor


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("d", "theta", "scaling", "block"),
    [
        (
            64,
            5e5,
            Llama3Scaling(32.0, 1.0, 4.0, 8192),  # Llama 3.2
            {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 8192},
        ),
        (
            128,
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 8192),  # Llama 3.1
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 8192},
        ),
        (
            128,
            1e6,
            YarnScaling(4.0, 32_768, yarn_attention_factor(4.0)),  # Qwen3 and Qwen2.5
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        ),
    ],
    ids=["llama-3.2", "llama-3.1", "qwen"],
)
def test_published_scalings_equal_transformers(d, theta, scaling, block):
    expected, attention_factor = transformers_table(d, theta, **block)
    assert units_apart(rope_frequencies(d, theta, scaling), expected) <= 1
    assert Rope(d, theta, scaling).attention_factor == attention_factor
