"""How fast a model's steps are here: bursts of them at chosen points, and what a step needs of the machine.

A point is decoding at a depth, prefill of a number of tokens, or decoding of several sequences at once. The tokens are
random: what they are does not change the work.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np

from qkv.engine.session import Session
from qkv.errors import ParameterError
from qkv.kernels.sizes import STEP_TOKENS, blocks_for, format_name, packed_bytes
from qkv.model.compiled import CompiledDecoder, PackedWeights, kv_block_bytes
from qkv.model.config import ModelConfig
from qkv.model.cost import decode_cost, prefill_cost, total
from qkv.model.feed import Feed, PagedCache

KINDS = ("prefill", "decode", "batch")
BATCH_DEPTH = 128
"""How many positions each sequence of a batch holds."""
BURST_STEPS = 8
HEADROOM = 2 * BURST_STEPS
"""Positions behind a point's depth that a burst may use."""
MOST_TOKENS = 1 << 20
MOST_SEQUENCES = 256


@dataclass(frozen=True, order=True)
class Point:
    """What a step does: "decode" at depth n, "prefill" of n tokens, or "batch", n sequences at `BATCH_DEPTH`."""

    kind: str
    n: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError(f"point: {self.kind!r} is none of {', '.join(KINDS)}")
        most = MOST_SEQUENCES if self.kind == "batch" else MOST_TOKENS
        if not 1 <= self.n <= most:
            raise ParameterError(f"point: the number of {self.kind} must be from 1 to {most:,}, got {self.n}")

    @classmethod
    def parse(cls, text: str) -> Point:
        """ "decode:2048". Raises ParameterError."""
        found = re.fullmatch(r"([a-z]+):(\d{1,9})", text.strip())
        if found is None:
            raise ParameterError(f"point: {text!r} is not a kind, a colon and a number, like decode:2048")
        return cls(found[1], int(found[2]))

    def __str__(self) -> str:
        return f"{self.kind}:{self.n}"

    @property
    def steps(self) -> int:
        """Steps of one burst."""
        return 1 if self.kind == "prefill" else BURST_STEPS

    @property
    def tokens(self) -> int:
        """Tokens of one step. (A prompt counts as one step, though the decoder takes several for a long one.)"""
        return 1 if self.kind == "decode" else self.n

    @property
    def depth(self) -> int:
        """Positions of a sequence before a step, and for a prompt after it."""
        return BATCH_DEPTH if self.kind == "batch" else self.n

    @property
    def sequences(self) -> int:
        return self.n if self.kind == "batch" else 1


def in_order(points: list[Point]) -> list[Point]:
    """Each once: prompts, then decoding from shallow to deep (which fills the cache once), then batches."""
    return sorted(set(points), key=lambda point: (KINDS.index(point.kind), point.n))


class Bursts:
    """A decoder and the sequences it holds. One point after the other: `prepare`, then any number of `burst`."""

    def __init__(
        self, config: ModelConfig, weights: PackedWeights, points: list[Point], *, cache: str, threads: int
    ) -> None:
        """`points`: all that will be measured. Raises ParameterError."""
        depth = max(point.depth for point in points) + HEADROOM
        sequences = max(point.sequences for point in points)
        blocks = max(blocks_for(depth), sequences * blocks_for(BATCH_DEPTH + HEADROOM))
        self.decoder = CompiledDecoder(
            config,
            weights,
            cache=cache,
            context=depth,
            threads=threads,
            outputs=sequences,
            cache_bytes=blocks * kv_block_bytes(config, cache),
        )
        self.session = Session(self.decoder)
        self.ids = np.random.default_rng(0).integers(0, config.vocab_size, 1 << 12).tolist()
        self.held: list[PagedCache] = []

    def prepare(self, point: Point) -> None:
        """Have the sequences that the point needs: of its depth, or an empty one for a prompt."""
        depth = 0 if point.kind == "prefill" else point.depth
        while len(self.held) > point.sequences:
            self.session.release(self.held.pop())
        for cache in self.held:
            if cache.length > depth:
                self.session.release(cache)
        self.held += [PagedCache() for _ in range(point.sequences - len(self.held))]
        for cache in self.held:
            if cache.length < depth:
                self.session.run(self._tokens(cache.length, depth - cache.length), cache)

    def burst(self, point: Point) -> float:
        """Seconds of `point.steps` steps. Afterwards the sequences are what they were."""
        if point.kind == "prefill":
            prompt = self._tokens(0, point.n)
            began = time.perf_counter()
            self.session.run(prompt, self.held[0])
            seconds = time.perf_counter() - began
            self.session.release(self.held[0])
            return seconds
        self._step(0)  # wakes threads that have gone to sleep
        began = time.perf_counter()
        for number in range(1, 1 + point.steps):
            self._step(number)
        seconds = time.perf_counter() - began
        for cache in self.held:
            cache.length = point.depth
        return seconds

    def close(self) -> None:
        """Let go of the memory."""
        self.decoder.close()

    def _step(self, number: int) -> None:
        tokens = self._tokens(number * len(self.held), len(self.held))
        self.session.step([Feed(cache, [token]) for cache, token in zip(self.held, tokens, strict=True)])

    def _tokens(self, first: int, count: int) -> list[int]:
        return [self.ids[i % len(self.ids)] for i in range(first, first + count)]


@dataclass(frozen=True)
class Need:
    """What one step cannot do without: bytes from memory, and operations."""

    bytes: float
    operations: float


def need(point: Point, config: ModelConfig, weights: PackedWeights, cache: str) -> Need:
    """What a step at the point needs."""
    head = weights.matrices[-1]
    head_bytes = packed_bytes(format_name(head), int(head["rows"]), int(head["columns"]))
    return need_of_bytes(point, config, weights.bytes_per_token, head_bytes, cache)


def need_of_bytes(point: Point, config: ModelConfig, weight_bytes: int, head_bytes: int, cache: str) -> Need:
    """The same from the bytes that a step of one token reads of all weights, and of the head among them.

    The operations, and the bytes of the cache, are those that `model/cost.py` counts as executed. Those of the weights
    are what lies in memory, since files mix formats: all of it once a step, and of the several steps of a long prompt
    all but the head, which only the last one needs.
    """
    if point.kind == "prefill":
        parts = prefill_cost(config, point.n, cache=cache)
        steps = -(-point.n // STEP_TOKENS)
    else:
        # The steps of a burst are at the positions behind the depth; this is the one in the middle.
        parts = decode_cost(config, point.depth + 1 + BURST_STEPS // 2, point.sequences, cache=cache)
        steps = 1
    summed = total(parts)
    return Need(steps * (weight_bytes - head_bytes) + head_bytes + summed.cache_bytes, summed.executed)
