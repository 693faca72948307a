"""The kernels that measure the machine do the work they are timed for. How fast is nobody's test."""

from __future__ import annotations

from functools import partial
from itertools import count

import numpy as np
import pytest

from qkv.errors import ParameterError
from qkv.measure import bandwidth, limits
from qkv.measure.limits import CHAINS, measure_limits, multiply_add, multiply_bytes
from qkv.runtime.team import Program, team


def test_multiply_adds_are_done():
    sums = np.zeros(32, np.float32)
    team().run(Program(multiply_add, (40, sums), 1))
    x = np.float32([0, 1])  # where the two halves of the chains begin
    for _ in range(40):
        x = x * np.float32(0.5) + np.float32(1)
    assert np.array_equal(sums[:8], np.full(8, CHAINS // 2 * x.sum()))


def test_products_of_bytes_are_done():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 60, 32 * CHAINS).astype(np.uint8)
    sums = np.zeros(32, np.int32)
    team().run(Program(multiply_bytes, (11, codes, sums), 1))
    rows = codes.astype(np.int64).reshape(CHAINS, 32)
    expected = sum((rows[i % 8] * rows.sum(axis=0)).reshape(8, 4).sum(axis=1) for i in range(11))
    assert np.array_equal(sums[:8], expected)


@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_impossible_threads_are_named(threads):
    with pytest.raises(ParameterError, match=f"threads must be a whole number from 1 to .*, got {threads}"):
        measure_limits(threads)


def test_limits_are_rates(monkeypatch):
    """With a clock that moves one second at each look, a rate is what one run does."""
    monkeypatch.setattr(limits, "Reader", partial(bandwidth.Reader, size=1 << 20))
    monkeypatch.setattr(limits, "ROUNDS", 100)
    measured = measure_limits(2, clock=count(0.0).__next__)
    assert measured.bytes_per_second == 1 << 20
    assert measured.flop_per_second == 2 * 100 * CHAINS * 2 * 8  # threads, rounds, chains, operations, lanes
    assert measured.flop_per_second_int8 == 2 * 100 * CHAINS * 2 * 32
