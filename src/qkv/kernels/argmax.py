# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""What is asked of every row of logits: the largest, where it is, and whether all of them are finite."""

from __future__ import annotations

import numpy as np

from qkv.kernels.simd import (
    add,
    as_bits,
    as_float,
    f32x8,
    fma,
    lane_numbers,
    less,
    load,
    max_lanes,
    min_lanes_i32,
    select,
    splat,
    splat_i32,
    sum_lanes,
)
from qkv.runtime.jit import kernel


@kernel
def survey(x, first, end, largest, places, at):
    """The largest of x[first:end] → largest[at], and its index counted from `first` → places[at].

    Of equal ones the first. If any is not finite, largest[at] is not a number.
    """
    lowest, zero = splat(np.float32(-np.inf)), splat(np.float32(0))
    best, where, damage = lowest, zero, zero
    here = lane_numbers()
    i = first
    while i + 8 <= end:
        v = load(f32x8, x, i)
        damage = fma(v, zero, damage)  # 0 · infinity is not a number
        larger = less(best, v)
        best = select(larger, v, best)
        where = select(larger, as_float(here), where)
        here = add(here, splat_i32(np.int32(8)))
        i += 8
    value = max_lanes(best)
    place = first_of(best, where, value)
    broken = sum_lanes(damage)
    while i < end:
        broken += x[i] * np.float32(0)
        if x[i] > value:
            value, place = x[i], i - first
        i += 1
    largest[at] = value + broken
    places[at] = place


@kernel
def first_of(best, where, value):
    """The smallest of the indices in the lanes that hold `value`."""
    most = splat_i32(np.int32(0x7FFFFFFF))
    candidates = select(less(best, splat(value)), as_float(most), where)
    return min_lanes_i32(as_bits(candidates))
