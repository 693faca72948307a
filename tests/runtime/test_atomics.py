import threading
import time

import numpy as np
import pytest
from team_samples import swap_float_control

from qkv.runtime import atomics
from qkv.runtime.jit import kernel


@kernel
def add_many(array, times):
    for _ in range(times):
        atomics.fetch_add(array, 3, 2)


@kernel
def count_with_compare_exchange(array, times):
    for _ in range(times):
        while True:
            seen = atomics.load(array, 1)
            if atomics.compare_exchange(array, 1, seen, seen + 1):
                break
            atomics.pause()


@kernel
def each_once(array):
    before = atomics.fetch_add(array, 0, 5)
    replaced = atomics.exchange(array, 1, 7)
    refused = atomics.compare_exchange(array, 1, 8, 9)
    accepted = atomics.compare_exchange(array, 1, 7, 9)
    atomics.store(array, 2, atomics.load(array, 1) + 1)
    atomics.yield_thread()
    return before, replaced, refused, accepted


@kernel
def clock():
    return atomics.microseconds()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_each_operation_alone(dtype):
    array = np.array([10, 20, 30, 40], dtype)
    assert each_once(array) == (10, 20, False, True)
    assert array.tolist() == [15, 9, 10, 40]


@pytest.mark.parametrize(
    ("function", "expected"), [(add_many, [0, 0, 0, 800_000]), (count_with_compare_exchange, [0, 400_000, 0, 0])]
)
def test_nothing_is_lost_among_four_threads(function, expected):
    array = np.zeros(4, np.int64)
    function(array, 0)
    threads = [threading.Thread(target=function, args=(array, 100_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert array.tolist() == expected


def test_clock_is_the_systems_monotonic_one():
    clock()
    before, read, after = time.monotonic_ns() // 1000, clock(), time.monotonic_ns() // 1000
    assert before <= read <= after


@pytest.mark.parametrize("array", [np.zeros(4, np.float64), np.zeros((2, 2), np.int64), np.zeros(8, np.int64)[::2]])
def test_other_arrays_are_refused_when_compiling(array):
    with pytest.raises(Exception, match=r"each_once|fetch_add"):
        each_once(array)


@pytest.mark.skipif(not atomics.ON_X86, reason="MXCSR is a register of x86")
def test_float_control_is_what_was_set():
    original = swap_float_control(0x9FC0)
    assert swap_float_control(original) & 0xFFC0 == 0x9FC0
