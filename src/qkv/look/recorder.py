"""Collects what a request's steps had inside, as they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import QkvError
from qkv.model.readback import Tapped, TappedHeads
from qkv.runtime.memory import free_memory

Array = NDArray[Any]


class Recorder:
    """A `Watcher` of some layers that keeps q and z of some heads, for a text of up to `capacity` tokens.

    With all heads the steps' own memory is kept: nothing is copied. Raises QkvError for more than is free.
    """

    def __init__(self, layers: Sequence[int], heads: Sequence[int], capacity: int) -> None:
        self.layers, self.heads = tuple(layers), tuple(heads)
        self.length = 0
        self._capacity = capacity
        self._parts: list[Tapped] = []

    def take(self, first: int, tapped: Tapped) -> None:
        """Keep what positions first … had, but for those that are known."""
        known, end = self.length - first, first + len(next(iter(tapped.streams.values())))
        if end > self.length:
            self._parts.append(self._chosen(tapped, known))
            self.length = end
            if not first:
                self._check_room()

    def attention(self, name: str, layer: int) -> Array:
        """q or z [T, heads, d], k or v [T, H_kv, d] of a layer."""
        return _joined([getattr(part.heads[layer], name) for part in self._parts])

    def stream(self, layer: int) -> Array:
        """The residual stream [T, hidden] before a layer; the one after the last counts as before another."""
        return _joined([part.streams[layer] for part in self._parts])

    def _chosen(self, tapped: Tapped, known: int) -> Tapped:
        heads, streams = {}, {at: stream[known:] for at, stream in tapped.streams.items()}
        for layer, had in tapped.heads.items():
            q, z, k, v = (part[known:] for part in had)
            if self.heads != tuple(range(q.shape[1])):
                q, z = q[:, self.heads], z[:, self.heads]
                streams = {at: stream.copy() for at, stream in streams.items()}  # else they hold all heads' memory
            heads[layer] = TappedHeads(q, z, k, v)
        return Tapped(heads, streams)

    def _check_room(self) -> None:
        arrays = [*(part for had in self._parts[0].heads.values() for part in had), *self._parts[0].streams.values()]
        needed = sum(part.nbytes for part in arrays) * (self._capacity / self.length - 1)
        free = free_memory()
        if free is not None and needed > free:
            raise QkvError(
                f"a look at {self._capacity:,} tokens takes {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are "
                "free: choose fewer layers or heads, or a shorter text"
            )


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
