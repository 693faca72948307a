# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""What is asked of every row of logits: the largest, where it is, and whether all of them are finite."""

from __future__ import annotations

import numpy as np

from qkv.kernels.memory import load
from qkv.kernels.simd import fma, lane_numbers, max_lanes, min_lanes, select, splat, sum_lanes
from qkv.kernels.values import f32x8, i32x8
from qkv.runtime.jit import kernel


@kernel
def survey(x, first, end, largest, places, at):
    """The largest of x[first:end] → largest[at], and its index counted from `first` → places[at].

    Of equal ones the first. If any is not finite, largest[at] is not a number.
    """
    best, damage = splat(f32x8, -np.inf), splat(f32x8, 0)
    where, here = splat(i32x8, 0), lane_numbers()
    i = first
    while i + 8 <= end:
        v = load(f32x8, x, i)
        damage = fma(v, 0, damage)  # 0 · infinity is not a number
        larger = best < v
        best = select(larger, v, best)
        where = select(larger, here, where)
        here += 8
        i += 8
    value, broken = max_lanes(best), sum_lanes(damage)
    place = min_lanes(select(best < value, 0x7FFFFFFF, where))  # among the lanes that hold `value`
    while i < end:
        broken += x[i] * np.float32(0)
        if x[i] > value:
            value, place = x[i], i - first
        i += 1
    largest[at] = value + broken
    places[at] = place
