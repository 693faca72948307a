"""Stored tensors: memory, row order, comparison."""

from __future__ import annotations

import tracemalloc

import numpy as np

from qkv.weights.tensor import SLICE, StoredTensor


def stored(values: np.ndarray, row_order: np.ndarray | None = None) -> StoredTensor:
    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(values.shape[0], -1)
    return StoredTensor("t", values.shape, "F32", data, row_order)


def test_rows_come_in_the_tensors_order():
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    order = np.array([2, 0, 3, 1])
    tensor = stored(values, order)
    assert np.array_equal(tensor.to_float32(), values[order])
    assert np.array_equal(tensor.rows().view(np.float32), values[order])


def test_conversion_needs_the_result_and_a_slice():
    rows, columns = 4096, 1024  # 16 MiB of float32, four slices
    data = np.zeros((rows, columns // 32 * 18), np.uint8)
    tensor = StoredTensor("t", (rows, columns), "Q4_0", data)
    tensor.to_float32()  # imports and caches
    tracemalloc.start()
    result = tensor.to_float32()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.nbytes == rows * columns * 4
    assert peak < result.nbytes + 16 * SLICE


def test_same_values_compares_numbers_not_bytes():
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    half = values.astype(np.float16)
    f16 = StoredTensor("h", half.shape, "F16", half.view(np.uint8).reshape(3, -1))
    assert stored(values).same_values(stored(values.copy()))
    assert stored(half.astype(np.float32)).same_values(f16)
    assert not stored(values).same_values(f16)
    assert not stored(values).same_values(stored(values[:2]))
    changed = values.copy()
    changed[2, 4] += 1
    assert not stored(values).same_values(stored(changed))
