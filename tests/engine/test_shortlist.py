"""The largest are always on the list, and what is forbidden never is."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.engine.logprobs import shortlist


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 20_011])
@pytest.mark.parametrize("count", [1, 2, 20, 300])
@pytest.mark.parametrize("finite", [0.0, 0.001, 0.5, 1.0])
def test_the_largest_are_on_the_list(size, count, finite):
    rng = np.random.default_rng(size + count)
    logits = np.round(rng.standard_normal(size) * 8).astype(np.float32)  # many ties
    logits[rng.random(size) >= finite] = -np.inf
    ids = shortlist(logits, count)
    largest = np.lexsort((np.arange(size), -logits))[:count]
    assert set(ids) >= {token for token in largest if logits[token] > -np.inf}
    assert np.all(np.diff(ids) > 0) and np.all(logits[ids] > -np.inf)


def test_a_short_list_is_short():
    logits = np.random.default_rng(0).standard_normal(151_936).astype(np.float32)
    assert len(shortlist(logits, 20)) < 100
