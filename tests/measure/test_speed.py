"""Bursts do the steps they are timed for and leave the sequences alone; needs are the counts of model/cost.py."""

from __future__ import annotations

import numpy as np
import pytest

from decoders import packed
from qkv.errors import ParameterError
from qkv.kernels.sizes import packed_bytes
from qkv.measure.speed import BATCH_DEPTH, BURST_STEPS, Bursts, Point, in_order, need, need_of_bytes
from qkv.model.compiled import PackedWeights
from qkv.model.config import PRESETS
from qkv.model.cost import Part, decode_cost, prefill_cost
from tiny import random_tensors, tiny_config

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]
CONFIG = tiny_config()
POINTS = [Point("prefill", 40), Point("decode", 20), Point("decode", 50), Point("batch", 3)]


@pytest.fixture(scope="module")
def weights() -> PackedWeights:
    return packed(CONFIG, random_tensors(CONFIG))


@pytest.fixture
def bursts(weights):
    made = Bursts(CONFIG, weights, POINTS, cache="f32", threads=2)
    yield made
    made.close()


def steps_of(bursts: Bursts, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """(position, tokens) of every feed of every step from now on."""
    seen: list[list[tuple[int, int]]] = []
    step = bursts.decoder.step

    def noted(feeds, **options):
        seen.append([(feed.cache.length, len(feed.ids)) for feed in feeds])
        return step(feeds, **options)

    monkeypatch.setattr(bursts.decoder, "step", noted)
    return seen


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_burst_does_its_steps_and_leaves_no_trace(bursts, monkeypatch, point):
    bursts.prepare(point)
    lengths, free = [cache.length for cache in bursts.held], bursts.session.pool.free
    for _ in range(3):
        seen = steps_of(bursts, monkeypatch)
        assert bursts.burst(point) > 0
        if point.kind == "prefill":
            assert seen == [[(0, point.n)]]
        else:
            assert seen == [[(point.depth + i, 1)] * point.sequences for i in range(1 + BURST_STEPS)]
        assert [cache.length for cache in bursts.held] == lengths
    assert lengths == [0 if point.kind == "prefill" else point.depth] * point.sequences
    assert bursts.session.pool.free >= free - point.sequences  # a block for the steps of a burst


def test_points_in_any_order_fill_what_is_missing(bursts, monkeypatch):
    for point in [POINTS[2], POINTS[1], POINTS[3], POINTS[0], POINTS[2]]:
        bursts.prepare(point)
        assert [cache.length for cache in bursts.held] == [
            0 if point.kind == "prefill" else point.depth
        ] * point.sequences
    seen = steps_of(bursts, monkeypatch)
    bursts.prepare(POINTS[2])
    assert seen == []  # it is there already
    bursts.prepare(Point("decode", 60))
    assert seen == [[(50, 10)]]


def test_a_deeper_sequence_begins_with_the_same_tokens(bursts):
    """What was filled in two pieces is what is filled in one."""
    bursts.prepare(Point("decode", 20))
    bursts.prepare(Point("decode", 50))
    pieces = bursts.session.run([5], bursts.held[0])
    bursts.prepare(Point("prefill", 40))
    bursts.prepare(Point("decode", 50))
    assert np.array_equal(bursts.session.run([5], bursts.held[0]), pieces)


def test_points_as_text():
    assert Point.parse(" decode:2048 ") == Point("decode", 2048)
    for point in POINTS:
        assert Point.parse(str(point)) == point
    for text in (
        "decode",
        "decode:",
        "decode:-1",
        "decode:0",
        "decode:9999999",
        "encode:5",
        "batch:257",
        "batch:1.5",
        "",
    ):
        with pytest.raises(ParameterError, match="point"):
            Point.parse(text)


def test_order_and_doubles():
    texts = ["batch:2", "decode:512", "decode:64", "prefill:9", "decode:64"]
    assert [str(point) for point in in_order([Point.parse(text) for text in texts])] == [
        "prefill:9",
        "decode:64",
        "decode:512",
        "batch:2",
    ]


def matrices(parts: list[Part]) -> int:
    """Bytes of the matrices and the cache, without norms and the rows of the token table."""
    return sum(part.bytes for part in parts if part.name not in ("embedding", "norms"))


@pytest.mark.parametrize("fmt", ["int4", "int8"])
@pytest.mark.parametrize("cache", ["f16", "int8"])
def test_needs_of_a_uniform_model_are_those_of_cost(fmt, cache):
    head = packed_bytes(fmt, QWEN3.vocab_size, QWEN3.hidden_size)
    whole = matrices(decode_cost(QWEN3, 1, weights=fmt)) - matrices(
        [part for part in decode_cost(QWEN3, 1, weights=fmt) if part.name in ("scores", "values")]
    )
    middle = 1 + BURST_STEPS // 2
    for point, parts in [
        (Point("decode", 2048), decode_cost(QWEN3, 2048 + middle, weights=fmt, cache=cache)),
        (Point("batch", 8), decode_cost(QWEN3, BATCH_DEPTH + middle, 8, weights=fmt, cache=cache)),
        (Point("prefill", 512), prefill_cost(QWEN3, 512, weights=fmt, cache=cache)),
        (Point("prefill", 2000), prefill_cost(QWEN3, 2000, weights=fmt, cache=cache)),
    ]:
        found = need_of_bytes(point, QWEN3, whole, head, cache)
        assert found.bytes == matrices(parts)
        assert found.operations == sum(part.executed for part in parts)


def test_needs_come_from_the_packed_weights(weights):
    head = packed_bytes("f32", CONFIG.vocab_size, CONFIG.hidden_size)
    expected = need_of_bytes(POINTS[1], CONFIG, weights.bytes_per_token, head, "f16")
    assert need(POINTS[1], CONFIG, weights, "f16") == expected
