"""The bars: what qkv has to reach, and at which points."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.measure.speed import Point


@dataclass(frozen=True)
class Bar:
    """The least ratio of qkv's speed to a peer's.

    `cache` is qkv's; against f16 the peer has f16, against int8 whichever makes it fastest.
    """

    model: str
    point: Point
    least: float
    cache: str = "f16"
    peer: str = "llama.cpp"


def _bars(model: str, **least: float) -> list[Bar]:
    """decode_128=1.6 → a bar for decode:128; decode_2048_int8=2.3 → one for the int8 cache."""
    bars = []
    for text, value in least.items():
        kind, n, *cache = text.split("_")
        bars.append(Bar(model, Point(kind, int(n)), value, *cache))
    return bars


BARS = [
    *_bars("q4_0", decode_128=1.6, decode_2048=1.8, decode_8192=1.9, decode_2048_int8=2.3, decode_8192_int8=3.0),
    *_bars("q4_0", prefill_512=2.0, prefill_2048=2.0, batch_8=2.5),
    Bar("q4_0", Point("prefill", 512), 1.0, peer="ik_llama.cpp"),
    *_bars("q8_0", decode_128=1.4, prefill_512=1.5),
    *_bars("smollm2", decode_128=2.0, prefill_512=3.0, batch_8=3.0),
    *_bars("q4_k", decode_128=1.4),
]
FRACTION_BARS = {("q4_0", Point("decode", 128)): 0.90, ("q8_0", Point("decode", 128)): 0.90}
"""The least fraction of the read bandwidth, with an f16 cache."""


def bar_for(model: str, point: Point, cache: str, peer: str) -> float | None:
    """The least ratio asked for, None where nothing is asked."""
    for bar in BARS:
        if (bar.model, bar.point, bar.cache, bar.peer) == (model, point, cache, peer):
            return bar.least
    return None


def has_bar(model: str, point: Point) -> bool:
    """Whether anything is asked of a model at a point."""
    return any((bar.model, bar.point) == (model, point) for bar in BARS)
