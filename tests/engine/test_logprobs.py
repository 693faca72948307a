"""Log-probabilities against their definition, float64 NumPy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.logprobs import log_normalizer, token_logprobs, top_logprobs


def log_softmax(logits):
    """By the definition, over the last axis."""
    x = np.asarray(logits, np.float64)
    return x - np.log(np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)) - x.max(-1, keepdims=True)


def test_rows_of_a_large_vocabulary():
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((7, 151_936)) * 4).astype(np.float32)
    ids = rng.integers(0, 151_936, 7)
    found = token_logprobs(logits, ids)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, log_softmax(logits)[np.arange(7), ids], rtol=0, atol=1e-11)
    rows = [token_logprobs(logits[i : i + 1], ids[i : i + 1])[0] for i in range(7)]
    assert found.tolist() == rows  # the bits do not depend on what comes together


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30))
def test_always_finite_and_at_most_zero(logits):
    row = np.array(logits, np.float32)
    found = token_logprobs(np.tile(row, (len(row), 1)), np.arange(len(row)))
    assert np.all(np.isfinite(found)) and np.all(found <= 0)
    json.dumps(found.tolist(), allow_nan=False)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_likeliest_in_order_ties_by_id(count):
    logits = np.round(np.random.default_rng(2).standard_normal(20_011) * 8).astype(np.float32)
    expected = np.lexsort((np.arange(len(logits)), -logits))[:count]
    top = top_logprobs(logits, count, log_normalizer(logits))
    assert [token for token, _ in top] == expected.tolist()
    np.testing.assert_allclose([p for _, p in top], log_softmax(logits)[expected], rtol=0, atol=1e-12)


def test_no_more_than_the_vocabulary_has():
    logits = np.array([1, 3, 2], np.float32)
    assert [token for token, _ in top_logprobs(logits, 20, log_normalizer(logits))] == [1, 2, 0]
