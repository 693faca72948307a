"""What `explain convex` shows, against loops over positions and heads."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.explain import convex
from qkv.explain.convex import compute, random_heads
from qkv.model.attention import attention_head, attention_weights


@pytest.fixture(scope="module")
def heads():
    return random_heads()


@pytest.fixture(scope="module")
def result(heads):
    return compute(*heads)


def test_places_by_loops(heads, result):
    q, k, v = heads
    T, H, d = q.shape
    for h in range(H):
        o = attention_head(q[:, h], k[:, h // 2], v[:, h // 2])
        weights = attention_weights(q[:, h], k[:, h // 2])
        for i in range(1, T):
            seen = v[: i + 1, h // 2].astype(float)
            for c in range(0, d, 7):
                low, high = seen[:, c].min(), seen[:, c].max()
                assert result.places[i - 1, h, c] == pytest.approx((o[i, c] - low) / (high - low), abs=1e-6)
            assert result.weight[i - 1, h] == pytest.approx(weights[i].max(), rel=1e-5)


def test_nothing_is_outside(result):
    assert result.outside.tolist() == [0, 0, 0, 0]
    assert result.places.min() > -1e-5
    assert result.places.max() < 1 + 1e-5


def test_what_is_outside_is_counted(heads, monkeypatch):
    q, k, v = heads
    right = convex.attention

    def wrong(q, k, v):
        o = right(q, k, v)
        o[5, 64:74] = 100  # ten coordinates of head 1
        return o

    monkeypatch.setattr(convex, "attention", wrong)
    found = compute(q, k, v)
    assert found.outside.tolist() == [0, 10, 0, 0]
    assert found.overshoot > 1e6


def test_norms_follow_the_values(heads, result):
    q, k, v = heads
    for factor, norms in zip(result.factors, result.norms, strict=True):
        for h in range(4):
            o = attention_weights(q[:, h].astype(float), k[:, h // 2].astype(float)) @ (
                factor * v[:, h // 2].astype(float)
            )
            assert norms[h] == pytest.approx(np.mean(np.sqrt((o**2).sum(axis=1))), rel=1e-4)
        assert norms == pytest.approx(factor * result.norms[result.factors.index(1.0)], rel=1e-5)


def test_equal_values_have_a_place_too():
    ones = np.ones((4, 1, 16), np.float32)
    assert np.all(np.isfinite(compute(ones, ones, ones).places))


@pytest.mark.parametrize("width", [80, 120])
def test_report(result, width):
    text = convex.report(result, "random", width)
    assert max(map(len, text.splitlines())) <= width
    for h in range(4):
        assert f"{np.median(result.places[:, h]):.3f}" in text
    assert f"0 of {result.places.size:,} coordinates are outside" in text
    shares = [float(line.split()[-2]) for line in text.splitlines() if line.endswith(" %")]
    assert len(shares) == 20
    assert sum(shares) == pytest.approx(100, abs=1)
