"""From a checkpoint to weights in memory as the kernels want them: packed matrices in one arena, vectors beside it.

Rows are packed straight from the mapped file, a slice at a time and by several threads, so that loading needs the
result's memory and little more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ModelFileError
from qkv.kernels.formats import MATRIX, new_arena, place
from qkv.kernels.packing import pack, pack_gguf, pack_q4_k
from qkv.kernels.sizes import format_name, packed_bytes
from qkv.model.compiled import PackedWeights
from qkv.model.config import ModelConfig
from qkv.model.layers import TABLE, matrix_names, vector_sizes
from qkv.progress import Progress, silent
from qkv.weights.choices import OWN_FORMAT, matrix_formats
from qkv.weights.mapped import let_go
from qkv.weights.tensor import StoredTensor, decode

SLICE = 1 << 20  # numbers packed at a time by one thread: bounds the memory beside the result


def load_weights(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    wanted: str | None = None,
    threads: int = 1,
    progress: Progress = silent,
) -> PackedWeights:
    """Pack every tensor of a model.

    wanted: one of `choices.CHOICES`; None keeps what a kernel can read as it is, and makes the rest int8.
    A Q4_K matrix with a scale beyond float16 becomes int8 too, and `notes` says so. Only packing finds such a scale;
    all matrices are then packed again.
    Raises ParameterError for an unknown format, ModelFileError for numbers that are not finite.
    """
    names = matrix_names(config)
    formats = matrix_formats(config, tensors, wanted)
    notes: tuple[str, ...] = ()
    arena, placed = _place_all(formats, tensors)
    if too_large := _pack_all(arena, placed, tensors, threads, progress):
        formats |= dict.fromkeys(too_large, "int8")
        notes = (f"Q4_K scales too large for half precision made these matrices int8: {', '.join(sorted(too_large))}",)
        del arena  # before there is another one
        arena, placed = _place_all(formats, tensors)
        _pack_all(arena, placed, tensors, threads, progress)
    return PackedWeights(
        arena=arena,
        matrices=np.array([placed[name] for name in names], MATRIX),
        vectors=_vectors(config, tensors),
        formats=frozenset(formats.values()),
        bytes_per_token=arena.nbytes if config.tie_word_embeddings else arena.nbytes - _size(placed[TABLE]),
        notes=notes,
    )


def _size(matrix: Any) -> int:
    return packed_bytes(format_name(matrix), int(matrix["rows"]), int(matrix["columns"]))


# ------------------------------------------------------------------------------------------ matrices


def _place_all(
    formats: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """An arena for matrices of these formats, and each one's place in it."""
    placed: dict[str, Any] = {}
    size = 0
    for name, fmt in formats.items():
        rows, columns = tensors[name].shape
        placed[name] = place(fmt, rows, columns, size)
        size += packed_bytes(fmt, rows, columns)
    return new_arena(size), placed


def _pack_all(
    arena: NDArray[np.uint8],
    placed: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    threads: int,
    progress: Progress,
) -> set[str]:
    """Returns the names of matrices with scales too large for their format."""
    too_large = set()
    total = sum(tensors[name].data.nbytes for name in placed)
    done = 0
    progress("loading", 0, total)
    with ThreadPoolExecutor(threads, thread_name_prefix="qkv-load") as pool:
        jobs = {
            pool.submit(_pack_slice, arena, placed[name], tensors[name], first, last): (name, last - first)
            for name in placed
            for first, last in _slices(tensors[name])
        }
        try:
            for job in as_completed(jobs):
                name, rows = jobs[job]
                if not job.result():
                    too_large.add(name)
                done += rows * tensors[name].data.shape[1]
                progress("loading", done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return too_large


def _slices(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    rows, columns = tensor.shape
    step = max(8, SLICE // columns // 8 * 8)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _pack_slice(arena: NDArray[np.uint8], matrix: Any, tensor: StoredTensor, first: int, last: int) -> bool:
    """Pack rows first … last-1. False if the matrix cannot have this format, because a scale is too large for it."""
    raw = tensor.rows(first, last)
    fits = True
    own = OWN_FORMAT.get(tensor.dtype) == format_name(matrix)
    if own and tensor.dtype == "Q4_K":
        fits = pack_q4_k(arena, matrix, first, raw, tensor.name)
    elif own:
        pack_gguf(arena, matrix, first, raw, tensor.name)
    elif tensor.dtype == "BF16":
        pack(arena, matrix, first, raw.view("<u2"), tensor.name)
    elif tensor.dtype == "F16":
        pack(arena, matrix, first, raw.view("<f2"), tensor.name)
    else:
        pack(arena, matrix, first, decode(tensor.dtype, raw), tensor.name)
    if tensor.row_order is None:
        let_go(tensor.data[first:last])
    return fits


# ------------------------------------------------------------------------------------------ vectors


def _vectors(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> NDArray[np.float32]:
    """Norms and biases, one behind the other, each padded with zeros as `layers.vector_sizes` says."""
    return np.concatenate([_padded(tensors[name], size) for name, size in vector_sizes(config).items()])


def _padded(tensor: StoredTensor, size: int) -> NDArray[np.float32]:
    values = tensor.to_float32()
    if not np.isfinite(values).all():
        raise ModelFileError(f"{tensor.name}: holds a number that is not finite; the file is damaged")
    vector = np.zeros(size, np.float32)
    vector[: len(values)] = values
    return vector
