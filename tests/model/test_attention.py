"""The specification of attention (docs/specification.md), as properties that hold for every shape and every value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.model.attention import attention, attention_head, attention_scores, attention_weights, future, softmax


@st.composite
def heads(draw, dtype=np.float32):
    """q [T, H, d], k and v [S, H_kv, d] of random shapes, with scores from flat to saturated."""
    group, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    T, past = draw(st.integers(1, 20)), draw(st.integers(0, 20))
    d = draw(st.sampled_from([2, 8, 32, 128]))
    scale = draw(st.sampled_from([1e-6, 0.1, 1.0, 10.0, 1e4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((T, group * kv_heads, d)) * scale
    k = rng.standard_normal((past + T, kv_heads, d))
    v = rng.standard_normal((past + T, kv_heads, d)) * draw(st.sampled_from([1e-3, 1.0, 1e3]))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


@given(heads())
def test_rows_sum_to_one_and_the_future_is_exactly_zero(qkv):
    q, k, _ = qkv
    weights = attention_weights(q[:, 0], k[:, 0])
    assert np.all(weights >= 0)
    np.testing.assert_allclose(weights.sum(axis=-1, dtype=np.float64), 1, atol=1e-6)
    assert np.all(weights[future(*weights.shape)] == 0)


@given(heads())
def test_outputs_lie_in_the_convex_hull_of_the_values_seen(qkv):
    q, k, v = qkv
    o = attention_head(q[:, 0], k[:, 0], v[:, 0])
    T, S = len(q), len(k)
    for i in range(T):
        seen = v[: S - T + i + 1, 0]
        # Each coordinate of a sum of S rounded products can leave the hull by some ulp of the largest term.
        slack = 4 * np.spacing(np.abs(seen).max(axis=0)) * math.sqrt(len(seen))
        assert np.all(o[i] >= seen.min(axis=0) - slack)
        assert np.all(o[i] <= seen.max(axis=0) + slack)


@given(heads(), st.data())
def test_changing_a_position_leaves_earlier_outputs_the_same_bits(qkv, data):
    q, k, v = qkv
    T, S = len(q), len(k)
    before = attention(q, k, v)
    t = data.draw(st.integers(S - T, S - 1))
    k[t] += 1
    v[t] = -v[t] - 3
    q[t - (S - T)] += 1
    after = attention(q, k, v)
    earlier = t - (S - T)
    assert np.array_equal(before[:earlier], after[:earlier])


@given(heads())
def test_no_nan_for_any_shape(qkv):
    assert np.isfinite(attention(*qkv)).all()


@given(heads(np.float64))
def test_against_a_plain_loop(qkv):
    """Every output from the formula: o_i = Σ_j A_ij v_j, query head h on key/value head h // group."""
    q, k, v = qkv
    (T, H, d), (S, H_kv, _) = q.shape, k.shape
    o = attention(q, k, v)
    for i in range(0, T, 7):
        for h in range(H):
            g = h // (H // H_kv)
            s = [sum(q[i, h] * k[j, g]) / math.sqrt(d) for j in range(S - T + i + 1)]
            e = [math.exp(x - max(s)) for x in s]
            expected = sum(w * v[j, g] for j, w in enumerate(e)) / sum(e)
            np.testing.assert_allclose(o[i, h * d : (h + 1) * d], expected, rtol=1e-9, atol=1e-12 * np.abs(v).max())


@given(heads())
def test_output_scale_follows_the_values(qkv):
    q, k, v = qkv
    assert np.array_equal(attention(q, k, v * 4), attention(q, k, v) * 4)  # a power of two is exact


@pytest.mark.parametrize("d", [16, 64, 128, 1024])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_variance_of_the_dot_is_d_sigma_4(d, sigma):
    """E<q,k> = 0 and Var<q,k> = d·σ⁴, so the scaled score has variance σ⁴ whatever d is."""
    n = 200
    rng = np.random.default_rng(d)
    q, k = rng.standard_normal((2, n, d)) * sigma
    scores = attention_scores(q, k)
    # n² dots, but only n independent rows on each side: the relative error of the variance is about √(2/n)·small.
    assert scores.var() == pytest.approx(sigma**4, rel=0.1)
    assert abs(scores.mean()) < 0.1 * sigma**2
    assert (scores * math.sqrt(d)).var() == pytest.approx(d * sigma**4, rel=0.1)


def test_minus_infinity_before_the_softmax_and_what_the_alternatives_give():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((6, 6)).astype(np.float32)
    mask = future(6, 6)
    right = softmax(np.where(mask, np.float32(-np.inf), scores))
    large = softmax(np.where(mask, np.float32(-1e9), scores))
    assert np.array_equal(right, large)  # e^-1e9 is 0 in float32
    small = softmax(np.where(mask, np.float32(-10), scores))
    assert not np.array_equal(right, small)
    afterwards = np.where(mask, 0, softmax(scores))
    assert np.all(afterwards.sum(axis=-1)[:-1] < 0.999)  # the denominator still counts the future


@settings(max_examples=30)
@given(st.integers(1, 130))
def test_one_new_position_against_all_at_once(S):
    """A cached step (T = 1) is the last row of the whole square."""
    rng = np.random.default_rng(S)
    q, k, v = (rng.standard_normal((S, n, 16)) for n in (4, 2, 2))
    np.testing.assert_allclose(attention(q[-1:], k, v), attention(q, k, v)[-1:], rtol=1e-12, atol=1e-14)
