# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""What a step shows and changes on its way: taps copy rows of numbers, edits replace them or add to them.

Both work at the points of a decoder, which are numbered in the order in which a step comes to them. Layer i has three:
the residual stream before it, its heads' outputs z, and the stream between attention and MLP. One more is the stream
after the last layer. A step in which nobody asks for either looks at one number a token and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.kernels.formats import new_arena
from qkv.kernels.pointwise import add_row, copy_row
from qkv.runtime.jit import kernel

Array = NDArray[Any]

STREAM, HEADS, MIDDLE = range(3)
"""The points of a layer."""
POINTS = 3
"""How many a layer has."""

EDIT = np.dtype([(name, np.int64) for name in ("adds", "column", "size", "first", "end", "values", "stride")])
"""A change of the columns from `column` on, for positions first … end - 1. Its row of values for the first of them
begins at `values`, and `stride` further on for each position after that."""


class Probe(NamedTuple):
    """What kernels copy and change in a step; `StepInput` says which rows are a token's."""

    tap_at: Array  # int64 [points]: where in `taps` the rows of a point begin; -1: it has none
    taps: Array  # float32: rows of the stream, or rows of q and z
    starts: Array  # int64: for each edited sequence the first edit of every point, and where the last point's end
    edits: Array  # EDIT records
    values: Array  # float32


def point(layer: int, which: int) -> int:
    """The number of a layer's point. The stream after the last layer is the STREAM of the layer that would follow."""
    return POINTS * layer + which


def point_count(layers: int) -> int:
    """How many points a decoder of so many layers has."""
    return POINTS * layers + 1


class Edit(NamedTuple):
    """One change at a point, for positions first … end - 1 of a sequence."""

    point: int
    column: int
    """Of the stream's or of z's row, a multiple of 8."""
    adds: bool
    """Whether the values are added; else they replace what is there."""
    first: int
    end: int
    values: NDArray[np.float32]
    """[positions, size], or [1, size] for all positions alike; size is a multiple of 8."""


@dataclass(frozen=True, eq=False)
class Edits:
    """All changes that a sequence gets, as kernels read them: see `Probe`."""

    starts: NDArray[np.int64]
    edits: NDArray[Any]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, edits: Iterable[Edit], layers: int) -> Edits:
        """The edits of a decoder of so many layers. Those of one point are made in the order given."""
        ordered = sorted(edits, key=lambda edit: edit.point)
        ends = np.cumsum([edit.values.size for edit in ordered])
        records = np.zeros(len(ordered), EDIT)
        for record, edit, end in zip(records, ordered, ends, strict=True):
            rows, size = edit.values.shape
            record["adds"], record["column"], record["size"] = edit.adds, edit.column, size
            record["first"], record["end"] = edit.first, edit.end
            record["values"], record["stride"] = end - edit.values.size, size if rows > 1 else 0
        starts = np.searchsorted([edit.point for edit in ordered], np.arange(point_count(layers) + 1))
        values = np.concatenate([np.zeros(0, np.float32), *(edit.values.ravel() for edit in ordered)])
        return cls(starts.astype(np.int64), records, values)


def new_probe(edited: Sequence[Edits] = (), sizes: Sequence[int] = ()) -> Probe:
    """The probe of a step with these edited sequences, and with room for so many tapped numbers at each point."""
    starts, edits, values = [], [np.zeros(0, EDIT)], [np.zeros(0, np.float32)]
    for one in edited:
        records = one.edits.copy()
        records["values"] += sum(map(len, values))
        starts.append(one.starts + sum(map(len, edits)))
        edits.append(records)
        values.append(one.values)
    ends = np.cumsum(sizes, dtype=np.int64)
    return Probe(
        tap_at=np.where(np.array(sizes, np.int64) > 0, ends - np.array(sizes, np.int64), -1),
        taps=new_arena(4 * sum(sizes), huge=False).view(np.float32),
        starts=np.concatenate([np.zeros(0, np.int64), *starts]),
        edits=np.concatenate(edits),
        values=values[1] if len(values) == 2 else np.concatenate(values),
    )


# ------------------------------------------------------------------------------------------ in the step


@kernel
def probe_stream(s, t, place):
    """Change token t's residual stream at a point, and copy it."""
    size, x, probe = s.shape.hidden_row, s.buffers.x, s.probe
    change(s, t, place, x, t * size)
    if s.input.tap_row[t] >= 0 and probe.tap_at[place] >= 0:
        copy_row(x, t * size, probe.taps, probe.tap_at[place] + s.input.tap_row[t] * size, size)


@kernel
def probe_heads(s, t, place):
    """Change token t's heads' outputs; copy its queries, as attention got them, and these outputs."""
    size, probe = s.shape.o_row, s.probe
    change(s, t, place, s.buffers.o, t * size)
    if s.input.tap_row[t] >= 0 and probe.tap_at[place] >= 0:
        at = probe.tap_at[place] + s.input.tap_row[t] * 2 * size
        copy_row(s.buffers.qkv, t * s.shape.qkv_row, probe.taps, at, s.shape.heads * s.shape.head_dim)
        copy_row(s.buffers.o, t * size, probe.taps, at + size, size)


@kernel
def change(s, t, place, x, at):
    """Make the edits of token t's sequence at a point, in the row of numbers that begins at x[at]."""
    probe, position = s.probe, s.input.positions[t]
    if s.input.edits_at[t] >= 0:
        starts = s.input.edits_at[t] + place
        for e in range(probe.starts[starts], probe.starts[starts + 1]):
            edit = probe.edits[e]
            if edit.first <= position and position < edit.end:
                values = edit.values + (position - edit.first) * edit.stride
                if edit.adds != 0:
                    add_row(x, at + edit.column, probe.values, values, edit.size)
                else:
                    copy_row(probe.values, values, x, at + edit.column, edit.size)
