"""What is measured, what it needs of the machine, and what it has to reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.worker import BATCH_DEPTH
from qkv.model.config import ModelConfig
from qkv.model.cost import decode_cost, prefill_cost, total

KINDS = ("prefill", "decode", "batch")
MOST = 1 << 20
BURST_TOKENS = 8


@dataclass(frozen=True, order=True)
class Point:
    """A step to time: "decode" at depth n, "prefill" of n tokens, or "batch" of n sequences at depth 128."""

    kind: str
    n: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.n}"

    @property
    def steps(self) -> int:
        """Steps of one burst: about a quarter of a second of work on a small machine."""
        return 1 if self.kind == "prefill" else BURST_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return 1 if self.kind == "decode" else self.n

    @property
    def positions(self) -> int:
        """Positions that one sequence needs."""
        return BATCH_DEPTH if self.kind == "batch" else self.n


def parse(text: str) -> Point:
    """ "decode:2048". Raises ValueError with a sentence for people."""
    found = re.fullmatch(r"(prefill|decode|batch):(\d{1,9})", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no point; write one of {', '.join(KINDS)}, a colon and a number: decode:2048")
    point = Point(found[1], int(found[2]))
    if not 1 <= point.n <= (256 if point.kind == "batch" else MOST):
        raise ValueError(f"{text}: the number must be from 1 to {256 if point.kind == 'batch' else MOST:,}")
    return point


def in_order(points: list[Point]) -> list[Point]:
    """Prompts first, then decoding from shallow to deep (which fills the cache once), then batches."""
    return sorted(set(points), key=lambda point: (KINDS.index(point.kind), point.n))


@dataclass(frozen=True)
class Need:
    """What one step cannot do without."""

    bytes: float
    operations: float


def need(
    point: Point, config: ModelConfig, cache: str, weight_bytes: int, head_bytes: int, step_tokens: int = 512
) -> Need:
    """Bytes from memory and executed operations of a step, counted from the model's shape and the packed weights.

    Operations are those of `model/cost.py`. So are the cache's bytes; those of the weights are what lies in memory
    (files mix formats): all of it once a step, of a longer prompt's steps all but the head, which only the last reads.
    """
    if point.kind == "prefill":
        parts = prefill_cost(config, point.n, cache=cache)
        passes = -(-point.n // step_tokens)
    else:
        context, batch = (point.n, 1) if point.kind == "decode" else (BATCH_DEPTH, point.n)
        # A burst steps over the positions behind the point; this is the one in its middle.
        parts = decode_cost(config, context + 1 + BURST_TOKENS // 2, batch, cache=cache)
        passes = 1
    summed = total(parts)
    return Need(passes * (weight_bytes - head_bytes) + head_bytes + summed.cache_bytes, summed.executed)


@dataclass(frozen=True)
class Bar:
    """The least ratio of qkv's speed to a peer's, or the least fraction of the read bandwidth.

    `cache` is qkv's; the peer has f16 against f16, and its fastest cache against any other.
    """

    model: str
    point: Point
    least: float
    cache: str = "f16"
    peer: str = "llama.cpp"


def _bars(model: str, **least: float) -> list[Bar]:
    """decode_128=1.6 → a bar for decode:128; decode_128_int8=3.0 → for the int8 cache."""
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


def bar_for(model: str, point: Point, cache: str, peer: str) -> float | None:
    """The least ratio asked for, None where nothing is asked."""
    for bar in BARS:
        if (bar.model, bar.point, bar.cache, bar.peer) == (model, point, cache, peer):
            return bar.least
    return None
