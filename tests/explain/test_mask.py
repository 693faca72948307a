"""What `explain mask` shows, against plain loops and the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkv.explain import mask
from qkv.explain.mask import compute, first_difference, random_heads
from qkv.model.attention import attention_head, attention_weights


@pytest.fixture(scope="module")
def heads():
    return random_heads()


@pytest.fixture(scope="module")
def cases(heads):
    return compute(*heads)


def by_loops(scores, hidden, fill):
    """Softmax of each row in float64, hidden scores replaced by `fill`."""
    rows = []
    for i in range(len(scores)):
        s = [fill if hidden[i, j] else float(scores[i, j]) for j in range(len(scores))]
        e = [math.exp(x - max(s)) for x in s]
        rows.append([x / math.fsum(e) for x in e])
    return np.array(rows)


def test_minus_infinity_is_the_definition_bit_for_bit(heads, cases):
    q, k, v = heads
    assert np.array_equal(cases[0].variants[0].weights, attention_weights(q, k))
    assert np.array_equal(cases[0].variants[0].outputs, attention_head(q, k, v))


def test_the_variants_by_loops(heads, cases):
    v = heads[2].astype(float)
    for case in cases:
        for variant, fill in zip(case.variants, (-math.inf, -1e9, -1e4), strict=False):
            if np.isnan(variant.weights).any():
                continue
            weights = by_loops(case.scores, case.hidden, fill)
            np.testing.assert_allclose(variant.weights, weights, atol=1e-6)
            np.testing.assert_allclose(variant.outputs, weights @ v, atol=1e-5)
            assert variant.hidden_weight == pytest.approx(np.max(weights * case.hidden), abs=1e-6)
    for case in (cases[0], cases[2]):
        weights = by_loops(case.scores, np.zeros_like(case.hidden), 0) * ~case.hidden
        np.testing.assert_allclose(case.variants[3].weights, weights, atol=1e-6)
        np.testing.assert_allclose(case.variants[3].row_sums, weights.sum(axis=1), atol=1e-6)


def test_what_is_equal_and_what_is_not(cases):
    plain, low, nothing = cases
    assert [v.name for v in plain.variants] == ["-∞ before", "-1e9 before", "-1e4 before", "0 afterwards"]
    assert [v.first_difference is None for v in plain.variants] == [True, True, True, False]
    assert np.all(plain.variants[3].row_sums[:-1] < 0.999)
    assert low.scores[0, 0] == -20_000
    assert [v.first_difference is None for v in low.variants] == [True, True, False]
    assert low.variants[2].hidden_weight > 0.1
    assert np.all(np.isnan(nothing.variants[0].weights[0]))
    assert not np.any(np.isnan(nothing.variants[0].weights[1:]))
    for variant in nothing.variants[1:3]:
        assert np.array_equal(variant.weights[0], np.full(8, 1 / 8))  # all the same, hidden or not
        assert variant.first_difference[0] == 0
    assert nothing.variants[3].row_sums[0] == 0


def test_first_difference():
    a = np.array([[1.0, np.nan], [3, 4]])
    assert first_difference(a, a.copy()) is None
    b = a.copy()
    b[1, 0] = np.nextafter(3, 4)
    assert first_difference(a, b) == (1, 0, 3.0, np.nextafter(3, 4))
    b[0, 1] = 2
    assert first_difference(a, b)[:2] == (0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_any_heads_show_the_same(seed):
    """Whatever the numbers, -1e9 is equal, and -1e4 leaks where the first score is less than that.

    The low scores are in the order of the others, whatever the sign of the first, and weigh what they weigh.
    """
    plain, low, _ = compute(*random_heads(seed))
    assert plain.variants[1].first_difference is None
    assert low.variants[1].first_difference is None
    assert low.variants[2].weights[0, 0] == 0
    assert np.all(np.diff(low.scores) * np.diff(plain.scores) >= 0)  # equal where rounded to the same
    np.testing.assert_allclose(low.variants[0].weights, plain.variants[0].weights, atol=0.002)  # rounded at 20,000


@pytest.mark.parametrize("width", [80, 120])
def test_report(cases, width):
    text = mask.report(cases, "random q, k and v", width)
    assert max(map(len, text.splitlines())) <= width
    sums = cases[0].variants[3].row_sums
    assert f"0 afterwards  {sums.min():.4f} … {sums.max():.4f}" in text
    assert text.count("none: equal bits") == 6
    for variant in cases[0].variants:
        assert all(f" {total:.2f}" in text for total in variant.row_sums)
