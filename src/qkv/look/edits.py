"""Changes of what a model computes, for one request.

    llm.generate("…", edit=[silence("blocks.3.attn.hook_z", heads=5), add("blocks.12.hook_resid_post", vector)])

Points are named as TransformerLens names them: `blocks.3.attn.hook_z` are the outputs of layer 3's heads,
`hook_resid_pre`, `hook_resid_mid` and `hook_resid_post` the residual stream before, in and after a layer. Edits of one
point are made in the order given, while the model computes, in the prompt and in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.checks import real, shown, whole
from qkv.errors import ParameterError
from qkv.look import names
from qkv.model import probe
from qkv.model.config import ModelConfig

Positions = int | tuple[int, int | None] | None
FOREVER = 1 << 62
LARGEST = 1e30


@dataclass(frozen=True, eq=False)
class Edit:
    """One change. Made by `silence`, `replace` and `add`; checked when a request brings it."""

    point: str
    does: Literal["silence", "replace", "add"]
    values: Any = None
    heads: Any = None
    positions: Positions = None


def silence(point: str, heads: int | Sequence[int] | None = None, *, positions: Positions = None) -> Edit:
    """Make heads' outputs 0; `point` is a hook_z, and None are all its heads."""
    return Edit(point, "silence", None, heads, positions)


def replace(
    point: str, values: ArrayLike, heads: int | Sequence[int] | None = None, *, positions: Positions = None
) -> Edit:
    """Put other numbers in their place: a mean for all positions, or another run's (activation patching).

    values: [d] for one head, [heads, d] for several, [hidden] for the stream; or with an axis of positions before that.
    positions: one, or (first, end), end None for all that follow; None are all, or as many as `values` has.
    """
    return Edit(point, "replace", values, heads, positions)


def add(
    point: str,
    vector: ArrayLike,
    scale: float = 1,
    heads: int | Sequence[int] | None = None,
    *,
    positions: Positions = None,
) -> Edit:
    """Add scale · vector (steering); shapes and positions as in `replace`."""
    return Edit(point, "add", (vector, real("scale", scale, -LARGEST, LARGEST)), heads, positions)


def compiled(edits: Edit | Sequence[Edit], config: ModelConfig) -> probe.Edits | None:
    """Edits as the step takes them; None for none. Raises ParameterError, which says which edit is wrong, and how."""
    given = [edits] if isinstance(edits, Edit) else edits
    if not isinstance(given, Sequence) or not all(isinstance(edit, Edit) for edit in given):
        raise ParameterError(f"edit must be made by qkv.look's silence, replace or add, got {shown(edits)}")
    parts: list[probe.Edit] = []
    for number, edit in enumerate(given):
        try:
            parts += _parts(edit, config)
        except ParameterError as error:
            error.args = (f"edit[{number}]: {error}",)
            raise
    return probe.Edits.of(parts, config.num_hidden_layers) if parts else None


def _parts(edit: Edit, config: ModelConfig) -> list[probe.Edit]:
    layer, hook = names.parse(edit.point, config.num_hidden_layers, names.EDITABLE)
    if hook == "hook_z":
        heads, size = names.numbers("heads", edit.heads, config.num_attention_heads), config.head_dim
        place = probe.point(layer, probe.HEADS)
        shape = (size,) if edit.heads is not None and not np.iterable(edit.heads) else (len(heads), size)
    else:
        if edit.heads is not None or edit.does == "silence":
            raise ParameterError(f"heads: {edit.point} has none; name blocks.{layer}.attn.hook_z")
        heads, size, shape = (0,), config.hidden_size, (config.hidden_size,)
        which = {"hook_resid_pre": 0, "hook_resid_mid": probe.MIDDLE, "hook_resid_post": probe.POINTS}
        place = probe.point(layer, which[hook])
    values = np.zeros((1, *shape), np.float32) if edit.does == "silence" else _values(edit, shape)
    first, end = _positions(edit.positions, len(values))
    rows = values.reshape(len(values), len(heads), size)
    padded = np.pad(rows, ((0, 0), (0, 0), (0, -size % 8)))
    return [
        probe.Edit(place, head * size, edit.does == "add", first, end, padded[:, i]) for i, head in enumerate(heads)
    ]


def _values(edit: Edit, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The values with an axis of positions, of length 1 where they are for all alike."""
    given, scale = edit.values if edit.does == "add" else (edit.values, 1)
    try:
        with np.errstate(over="ignore"):
            values = (np.asarray(given, np.float64) * scale).astype(np.float32)
    except (TypeError, ValueError):
        raise ParameterError(f"values must be numbers of shape {_spelled(shape)}, got {shown(given)}") from None
    if values.shape == shape:
        values = values[None]
    if values.shape[1:] != shape or not len(values):
        raise ParameterError(
            f"values must have the shape {_spelled(shape)}, or positions before that, got {_spelled(np.shape(given))}"
        )
    if not np.isfinite(values).all():
        raise ParameterError("values has a number that is not finite as float32")
    return values


def _spelled(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _positions(given: Any, rows: int) -> tuple[int, int]:
    """The first position and the one after the last. `rows` positions have values of their own, if more than one."""
    wanted = (0, None) if given is None else given
    try:
        first, end = wanted if isinstance(wanted, tuple) else (wanted, wanted + 1)
        first = whole("positions", first, 0)
        end = (first + rows if rows > 1 else FOREVER) if end is None else whole("positions", end, first + 1)
    except (TypeError, ValueError, ParameterError):
        raise ParameterError(
            f"positions must be one, or a pair (first, end) with end None for all that follow, got {shown(given)}"
        ) from None
    if rows > 1 and end - first != rows:
        raise ParameterError(f"values has {rows} positions, and positions names {end - first}")
    return first, end
