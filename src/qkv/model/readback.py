"""What a step leaves behind for whoever looks: tapped numbers, and keys and values as the cache holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.kernels.kvcache import KV_INT8, NUMBER_BYTES, Pool
from qkv.kernels.sizes import BLOCK, GROUP
from qkv.model.feed import Feed
from qkv.model.forward import Shape
from qkv.model.probe import HEADS, POINTS, STREAM, Probe, point, point_count

NUMBERS = {4: np.float32, 2: np.float16, 1: np.int8}


class TappedHeads(NamedTuple):
    """What T neighbouring tokens had in one layer's attention."""

    q: NDArray[np.float32]
    """[T, H, d], normed and rotated: what was multiplied with the keys."""
    z: NDArray[np.float32]
    """[T, H, d]: the heads' outputs."""
    k: NDArray[Any]
    """[T, H_kv, d], float16 or float32: exactly what the cache holds."""
    v: NDArray[Any]


@dataclass(frozen=True)
class Tapped:
    """What the tokens of a feed had in a step, of the layers that were asked for."""

    heads: dict[int, TappedHeads]
    streams: dict[int, NDArray[np.float32]]
    """Layer → the residual stream [T, hidden] before it; the one after the last layer counts as before another."""


def tap_sizes(shape: Shape, layers: Sequence[int], count: int, rows: int) -> list[int]:
    """How many numbers each point of a decoder of `count` layers needs for the taps of these layers, over `rows` rows.

    A layer's tap has its heads, and the stream before it and after it. With any layer goes the stream after the last.
    """
    sizes = [0] * point_count(count)
    for layer in layers:
        sizes[point(layer, HEADS)] = rows * 2 * shape.o_row
        for at in (layer, layer + 1, count):
            sizes[point(at, STREAM)] = rows * shape.hidden_row
    return sizes


def read_tap(probe: Probe, shape: Shape, pool: Pool, feed: Feed, rows: range) -> Tapped:
    """What the layers that a feed taps had, once the step is over; `rows` are its rows of the probe's taps."""
    heads, streams = {}, {}
    end, last = feed.cache.length, len(probe.tap_at) // POINTS
    for layer in feed.taps:
        for at in (layer, layer + 1, last):
            streams[at] = _rows(probe, point(at, STREAM), rows, shape.hidden_row)[:, : shape.hidden]
        pairs = _rows(probe, point(layer, HEADS), rows, 2 * shape.o_row).reshape(-1, 2, shape.o_row)
        size = shape.heads * shape.head_dim
        q, z = (pairs[:, i, :size].reshape(-1, shape.heads, shape.head_dim) for i in (0, 1))
        heads[layer] = TappedHeads(q, z, *cached(pool, feed.cache.blocks, layer, end - len(feed.ids), end))
    return Tapped(heads, streams)


def _rows(probe: Probe, place: int, rows: range, width: int) -> NDArray[np.float32]:
    """Rows [T, width] of a tapped point."""
    at = int(probe.tap_at[place])
    return probe.taps[at + rows.start * width : at + rows.stop * width].reshape(-1, width)


def cached(pool: Pool, blocks: Sequence[int], layer: int, first: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values [end - first, H_kv, d] of positions first … end - 1 of the sequence whose blocks these are."""
    used = blocks[first // BLOCK : -(-end // BLOCK)]
    halves = pool.bytes.reshape(-1, pool.layers, pool.kv_heads, 2, pool.half)[used, layer]
    keys, values = (np.ascontiguousarray(halves[:, :, part]) for part in (0, 1))
    d, wanted = pool.head_dim, slice(first % BLOCK, first % BLOCK + end - first)
    k = _numbers(pool, keys, (d, BLOCK), 2).transpose(0, 3, 1, 2)
    v = _numbers(pool, values, (BLOCK, d), 3).transpose(0, 2, 1, 3)
    return k.reshape(-1, pool.kv_heads, d)[wanted], v.reshape(-1, pool.kv_heads, d)[wanted]


def _numbers(pool: Pool, half: NDArray[np.uint8], shape: tuple[int, int], grouped: int) -> NDArray[Any]:
    """[blocks, H_kv, *shape] of the keys' or the values' bytes. Along the axis `grouped`, 32 int8 share a scale."""
    size = NUMBER_BYTES[pool.kind]
    count = size * BLOCK * pool.head_dim
    numbers = half[..., :count].view(NUMBERS[size]).reshape(*half.shape[:2], *shape)
    if pool.kind != KV_INT8:
        return numbers
    groups = [*numbers.shape]
    groups[grouped] //= GROUP
    scales = half[..., count:].view(np.float32).reshape(groups)
    return numbers * np.repeat(scales, GROUP, axis=grouped)
