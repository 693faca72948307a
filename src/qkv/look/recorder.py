"""Collects what a request's steps had inside, as they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.model.readback import Tapped, TappedHeads

Array = NDArray[Any]


class Recorder:
    """A `Watcher` of some layers that keeps q and z of some heads, for up to `capacity` positions.

    Arrays have their final size from the start: memory is taken when it is written, and nothing is moved later.
    """

    def __init__(self, layers: Sequence[int], heads: Sequence[int], capacity: int) -> None:
        self.layers, self.heads = tuple(layers), tuple(heads)
        self.length = 0
        self._capacity = capacity
        self._kept: dict[tuple[str, int], Array] = {}

    def take(self, first: int, tapped: Tapped) -> None:
        """Copy what positions first … had."""
        parts: dict[tuple[str, int], Array] = {("stream", at): stream for at, stream in tapped.streams.items()}
        for layer, had in tapped.heads.items():
            every = self.heads == tuple(range(had.q.shape[1]))
            chosen = had if every else had._replace(q=had.q[:, self.heads], z=had.z[:, self.heads])
            parts |= {(name, layer): part for name, part in chosen._asdict().items()}
        if not self._kept:
            self._kept = _rooms(parts, self._capacity)
        for key, part in parts.items():
            self._kept[key][first : first + len(part)] = part
            self.length = max(self.length, first + len(part))

    def attention(self, layer: int) -> TappedHeads:
        """q and z [T, heads, d], k and v [T, H_kv, d] of a layer."""
        return TappedHeads(*(self._kept[name, layer][: self.length] for name in TappedHeads._fields))

    def stream(self, layer: int) -> Array:
        """The residual stream [T, hidden] before a layer; the one after the last counts as before another."""
        return self._kept["stream", layer][: self.length]


def _rooms(parts: Mapping[tuple[str, int], Array], capacity: int) -> dict[tuple[str, int], Array]:
    """Arrays for `capacity` rows like these, in one piece of memory: the system gives large pages to large pieces."""
    sizes = [capacity * part[0].nbytes for part in parts.values()]
    memory, ends = np.empty(sum(sizes), np.uint8), np.cumsum(sizes)
    return {
        key: memory[end - size : end].view(part.dtype).reshape(capacity, *part.shape[1:])
        for (key, part), size, end in zip(parts.items(), sizes, ends, strict=True)
    }
