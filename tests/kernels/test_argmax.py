"""The survey of a row against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.kernels.argmax import survey


def surveyed(x, first=0, end=None):
    largest, places = np.full(3, -7, np.float32), np.full(3, -7)
    survey(x, first, len(x) if end is None else end, largest, places, 1)
    assert largest[0] == largest[2] == -7
    assert places[0] == places[2] == -7
    return largest[1], places[1]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 31, 64, 1000])
def test_the_largest_and_the_first_of_equals(size):
    rng = np.random.default_rng(size)
    for _ in range(50):
        x = rng.integers(-3, 3, size + 5).astype(np.float32)
        value, place = surveyed(x, 5)
        assert (value, place) == (x[5:].max(), x[5:].argmax())
        value, place = surveyed(x, 0, size)
        assert (value, place) == (x[:size].max(), x[:size].argmax())


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_anywhere(damage):
    for at in range(37):
        x = np.random.default_rng(at).normal(size=37).astype(np.float32)
        x[at] = damage
        assert np.isnan(surveyed(x)[0])
    assert np.isnan(surveyed(np.full(16, damage, np.float32))[0])


def test_huge_numbers_are_finite():
    x = np.array([-3.4e38, 3.4e38, 1e-45, 0, 0, 0, 0, 0, 3.4e38], np.float32)
    assert surveyed(x) == (np.float32(3.4e38), 1)
