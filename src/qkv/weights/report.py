"""What loading a model did: formats and bytes in its files and in memory, what was converted, what was assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qkv.kernels.sizes import format_name, packed_bytes
from qkv.model.layers import matrix_names
from qkv.weights.checkpoint import Checkpoint
from qkv.weights.choices import OWN_FORMAT
from qkv.weights.tensor import StoredTensor

if TYPE_CHECKING:
    from qkv.model.compiled import PackedWeights

ROUNDED = ("Q4_K", "int4m")
"""The conversion that keeps the quants and rounds their scales."""

EXACT = {("F32", "f32"), ("F16", "f32"), ("BF16", "f32"), ("BF16", "bf16"), *OWN_FORMAT.items()} - {ROUNDED}
"""Conversions that change no number."""


@dataclass(frozen=True)
class Amount:
    """How much of one format there is."""

    format: str
    count: int  # tensors or matrices
    bytes: int


@dataclass(frozen=True)
class LoadReport:
    """The load report of a model."""

    path: str
    stored: tuple[Amount, ...]
    """The tensors as the files have them, most bytes first."""
    packed: tuple[Amount, ...]
    """The matrices as they are in memory, most bytes first; norms and biases, float32, are not among them."""
    requantized: tuple[str, ...]
    """Matrices whose numbers were rounded: "197 matrices from BF16 to int8". Empty if all are as in the files.

    Q4_K keeps its 4 bits: "168 matrices from Q4_K to int4m: kept at 4 bits, scales rounded to half precision".
    """
    notes: tuple[str, ...]
    """Defaults assumed for missing keys, tensors that are not used, and what else the files had to say."""
    seconds: float
    """How long packing took."""


def report(checkpoint: Checkpoint, weights: PackedWeights, seconds: float) -> LoadReport:
    """The report of `weights`, packed from `checkpoint` in that time."""
    names = matrix_names(checkpoint.config)
    packed: list[tuple[str, int]] = []
    changed: Counter[tuple[str, str]] = Counter()
    for name, matrix in dict(zip(names, weights.matrices, strict=True)).items():  # a tied table once
        fmt = format_name(matrix)
        packed.append((fmt, packed_bytes(fmt, int(matrix["rows"]), int(matrix["columns"]))))
        if (checkpoint.tensors[name].dtype, fmt) not in EXACT:
            changed[checkpoint.tensors[name].dtype, fmt] += 1
    return LoadReport(
        path=str(checkpoint.path),
        stored=stored_amounts(checkpoint.tensors.values()),
        packed=_amounts(packed),
        requantized=tuple(_change(conversion, count) for conversion, count in sorted(changed.items())),
        notes=(*checkpoint.notes, *weights.notes),
        seconds=seconds,
    )


def _change(conversion: tuple[str, str], count: int) -> str:
    old, new = conversion
    how = ": kept at 4 bits, scales rounded to half precision" if conversion == ROUNDED else ""
    return f"{count} matrices from {old} to {new}{how}"


def stored_amounts(tensors: Iterable[StoredTensor]) -> tuple[Amount, ...]:
    """How much of each type these tensors of a file are, most bytes first."""
    return _amounts((tensor.dtype, tensor.data.nbytes) for tensor in tensors)


def _amounts(items: Iterable[tuple[str, int]]) -> tuple[Amount, ...]:
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for kind, bytes_ in items:
        count[kind] += 1
        size[kind] += bytes_
    return tuple(Amount(kind, count[kind], bytes_) for kind, bytes_ in size.most_common())
