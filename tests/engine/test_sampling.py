"""The chosen token against a plain computation of the distribution, in float64, and its corners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.params import SamplingParams
from qkv.engine.sampling import candidates, sample, uniform


def params(**fields) -> SamplingParams:
    return SamplingParams(seed=fields.pop("seed", 1), **fields)


def plain(logits, temperature, min_p=0.0, top_k=0, top_p=1.0) -> dict[int, float]:
    """The distribution by its definition, with Python floats and full sorts."""
    scaled = [float(x - max(logits)) / temperature for x in logits]
    e = [np.exp(x) for x in scaled]
    p = {i: x / sum(e) for i, x in enumerate(e) if min_p == 0 or scaled[i] >= np.log(min_p)}
    ranked = sorted(p, key=lambda i: (-e[i], i))
    if top_k > 0:
        ranked = ranked[:top_k]
    total, kept, before = sum(p[i] for i in ranked), [], 0.0
    for i in ranked:
        if kept and before >= top_p and top_p < 1:  # 1 is off: rounding must not make a cut of it
            break
        kept.append(i)
        before += p[i] / total
    norm = sum(p[i] for i in kept)
    return {i: p[i] / norm for i in kept}


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0, -1, 1, 3, 10**9]),
    st.sampled_from([0.0, 0.1, 0.8, 0.95, 1.0]),
)
def test_candidates_equal_the_definition(logits, temperature, min_p, top_k, top_p):
    ids, p = candidates(
        np.array(logits, np.float32), params(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    )
    expected = plain(logits, temperature, min_p, top_k, top_p)
    # Sums of probabilities that land on a threshold may round either way: compare where the sets agree.
    common = set(ids.tolist()) & set(expected)
    assert abs(len(ids) - len(expected)) <= 1 or min_p == 1.0
    assert len(common) >= min(len(ids), len(expected))
    assert len(set(ids.tolist())) == len(ids)
    if set(ids.tolist()) == set(expected):
        np.testing.assert_allclose(p / p.sum(), [expected[i] for i in ids.tolist()], rtol=1e-9)


def test_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id():
    logits = np.array([1, 5, 5, 2], np.float32)
    for zero in (0, 0.0, -0.0):
        assert sample(logits, SamplingParams(temperature=zero), position=3) == 1


@pytest.mark.parametrize("fields", [{"temperature": 1e-4}, {"temperature": 1e-300}, {"temperature": 1, "top_p": 1e-4}])
def test_extremes_act_like_argmax(fields):
    logits = np.array([1, 3, 2], np.float32)
    assert {sample(logits, params(**fields), position=i) for i in range(50)} == {1}


def test_top_p_zero_keeps_one_token_and_top_k_beyond_the_vocabulary_keeps_all():
    logits = np.zeros(5, np.float32)
    assert candidates(logits, params(temperature=1, top_p=0))[0].tolist() == [0]
    assert candidates(logits, params(temperature=1, top_k=9_999_999))[0].tolist() == [0, 1, 2, 3, 4]
    logits[3] = 1
    assert candidates(logits, params(temperature=1, top_k=9_999_999, top_p=0))[0].tolist() == [3]


def test_temperature_comes_before_top_p():
    """Logits [3, 2, 1] at temperature 0.5: {0} alone already holds 0.87 ≥ 0.8; without the temperature it would not."""
    logits = np.array([3, 2, 1], np.float32)
    assert candidates(logits, params(temperature=0.5, top_p=0.8))[0].tolist() == [0]


def test_min_p_works_on_a_large_vocabulary():
    logits = np.zeros(151_936, np.float32)
    logits[[7, 100_000]] = [10, 9.5]
    assert candidates(logits, params(temperature=1, min_p=0.5))[0].tolist() == [7, 100_000]


@pytest.mark.parametrize(
    "fields", [{"top_k": 20}, {"top_k": 5000}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 300, "top_p": 0.9}]
)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_a_large_vocabulary_is_searched_without_losing_anyone(fields, spread):
    """Against full sorts, with many ties (logits rounded to a grid)."""
    logits = np.round(np.random.default_rng(3).standard_normal(20_011) * spread * 8) / 8
    logits = logits.astype(np.float32)
    ids, p = candidates(logits, params(temperature=0.7, **fields))
    e = np.exp((logits - logits.max()).astype(np.float64) / 0.7)
    order = np.lexsort((np.arange(len(e)), -e))[: fields.get("top_k", len(e))]
    probabilities = e[order] / e[order].sum()
    kept = max(1, int(np.count_nonzero(np.cumsum(probabilities) - probabilities < fields.get("top_p", 1.1))))
    assert abs(len(ids) - kept) <= 1  # the sum that reaches top_p may round either way
    assert np.array_equal(ids[: kept - 1], order[: kept - 1])
    np.testing.assert_allclose(p[: kept - 1], probabilities[: kept - 1], rtol=1e-9)


def test_draws_follow_the_distribution():
    logits = np.array([0, 1, 2, -1], np.float32)
    n = 4000
    counts = np.bincount([sample(logits, params(temperature=1), position=i) for i in range(n)], minlength=4)
    expected = np.exp(logits) / np.exp(logits).sum() * n
    assert (((counts - expected) ** 2) / expected).sum() < 16.3  # χ², 3 degrees of freedom, p = 0.001


def test_randomness_is_keyed_by_seed_choice_and_position():
    assert uniform(1, 0, 5) == uniform(1, 0, 5)
    draws = {uniform(s, c, p) for s in range(5) for c in range(5) for p in range(5)}
    assert len(draws) == 125
    assert all(0 <= u < 1 for u in draws)
    first_tokens = {sample(np.zeros(50, np.float32), params(temperature=2, seed=s), position=9) for s in range(200)}
    assert len(first_tokens) > 30  # the first token varies too
