"""Taps and edits of the compiled step: against the reference with the same changes, and, bit for bit, against none."""

from __future__ import annotations

import numpy as np
import pytest

from decoders import compiled, dequantized, packed
from hooked import Hooked
from qkv.engine.session import Session
from qkv.model.feed import Feed, PagedCache
from qkv.model.probe import HEADS, MIDDLE, STREAM, Edit, Edits, point
from tiny import random_tensors, tiny_config

CONFIG = tiny_config(num_hidden_layers=3)
TENSORS = random_tensors(CONFIG)
IDS = [(7 * i * i + 3) % 320 for i in range(45)]
ALL = range(CONFIG.num_hidden_layers)


@pytest.fixture(scope="module")
def decoder():
    made = compiled(CONFIG, packed(CONFIG, TENSORS, "f32"), cache="f32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def session(decoder):
    return Session(decoder)


def run(session, ids, sizes=None, taps=(), edits=None, beside=()):
    """Logits of the last token, and what was tapped, joined; beside other sequences in its first step."""
    cache, parts, start = PagedCache(), [], 0
    others = [Feed(PagedCache(), other) for other in beside]
    for size in sizes or [len(ids)]:
        mine = Feed(cache, ids[start : start + size], "last", taps, edits)
        feeds = [*others, mine] if start == 0 else [mine]
        logits = session.step(feeds)[-1]
        if taps:
            parts.append(session.decoder.tapped(feeds, len(feeds) - 1))
        start += size
    for feed in [*others, mine]:
        session.release(feed.cache)
    heads = {layer: [np.concatenate(x) for x in zip(*(p.heads[layer] for p in parts), strict=True)] for layer in taps}
    streams = {at: np.concatenate([p.streams[at] for p in parts]) for at in (parts[0].streams if parts else ())}
    return logits, heads, streams


@pytest.mark.parametrize("sizes", [[45], [33, 12], [20, 1, 1, 23], [1] * 45])
def test_taps_give_what_the_reference_has_and_change_no_bit(session, sizes):
    plain, _, _ = run(session, IDS, sizes)
    logits, heads, streams = run(session, IDS, sizes, taps=ALL)
    assert np.array_equal(plain, logits)
    expected, seen = Hooked(CONFIG, TENSORS).run(IDS)
    assert np.abs(logits - expected[-1]).max() < 1e-4
    names = ("hook_rot_q", "hook_z", "hook_rot_k", "hook_v")
    for layer in ALL:
        for ours, name in zip(heads[layer], names, strict=True):
            assert np.abs(ours - seen[f"blocks.{layer}.attn.{name}"]).max() < 1e-4
        assert np.abs(streams[layer] - seen[f"blocks.{layer}.hook_resid_pre"]).max() < 1e-4
    assert np.abs(streams[len(ALL)] - seen["blocks.2.hook_resid_post"]).max() < 1e-4


def test_taps_have_the_same_bits_in_chunks_and_in_company(session):
    whole = run(session, IDS, taps=[1])
    parts = run(session, IDS, [13, 1, 31], taps=[1], beside=[IDS[::-1], IDS[:1], IDS[5:40]])
    assert np.array_equal(whole[0], parts[0])
    for a, b in ((whole[1], parts[1]), (whole[2], parts[2])):
        assert a.keys() == b.keys()
        assert all(np.array_equal(x, y) for at in a for x, y in zip(a[at], b[at], strict=True))


def test_each_chunk_of_a_step_gets_its_own_layers(session):
    feeds = [Feed(PagedCache(), IDS[:9], "none", [0]), Feed(PagedCache(), IDS, "none", [1, 2])]
    session.step(feeds)
    first, second = session.decoder.tapped(feeds, 0), session.decoder.tapped(feeds, 1)
    assert (list(first.heads), list(first.streams)) == ([0], [0, 1, 3])
    assert (list(second.heads), list(second.streams)) == ([1, 2], [1, 2, 3])
    assert np.array_equal(second.streams[1][:9], first.streams[1])
    for feed in feeds:
        session.release(feed.cache)


@pytest.mark.parametrize("kind", ["f16", "int8"])
def test_tapped_keys_and_values_are_those_of_the_cache(kind):
    """Rounded as the cache rounds them: attention computed from them is the engine's to float32's precision."""
    made = compiled(CONFIG, packed(CONFIG, TENSORS, "f32"), cache=kind)
    _, heads, _ = run(Session(made), IDS, [30, 15], taps=ALL)
    made.close()
    for q, z, k, v in heads.values():
        assert k.dtype == v.dtype == (np.float16 if kind == "f16" else np.float32)
        for h in range(CONFIG.num_attention_heads):
            keys, values = k[:, h // 2].astype(np.float64), v[:, h // 2].astype(np.float64)
            scores = np.tril(np.exp(q[:, h] @ keys.T / np.sqrt(CONFIG.head_dim)))
            assert np.abs(scores / scores.sum(1, keepdims=True) @ values - z[:, h]).max() < 1e-5


RNG = np.random.default_rng(5)
VECTOR = RNG.standard_normal(CONFIG.hidden_size).astype(np.float32)
ROWS = RNG.standard_normal((7, CONFIG.head_dim)).astype(np.float32)
FOREVER = 1 << 40
CHANGES = {
    # name of the point → (our edits, the same change of the reference's array [T, …])
    "blocks.1.attn.hook_z": (
        [
            Edit(point(1, HEADS), 32, False, 0, FOREVER, np.zeros((1, 32), np.float32)),
            Edit(point(1, HEADS), 96, False, 5, 12, ROWS),
        ],
        [(slice(None), 1, 0.0), (slice(5, 12), 3, ROWS)],
    ),
    "blocks.0.hook_resid_pre": ([Edit(point(0, STREAM), 0, True, 3, FOREVER, VECTOR[None])], VECTOR),
    "blocks.2.hook_resid_mid": ([Edit(point(2, MIDDLE), 0, True, 3, FOREVER, VECTOR[None])], VECTOR),
    "blocks.2.hook_resid_post": ([Edit(point(3, STREAM), 0, True, 3, FOREVER, VECTOR[None])], VECTOR),
}


def reference_change(names):
    def change(name, array):
        if name not in names:
            return array
        array, wanted = array.copy(), CHANGES[name][1]
        if isinstance(wanted, np.ndarray):
            array[3:] += wanted
        else:
            for positions, head, values in wanted:
                array[positions, head] = values
        return array

    return change


@pytest.mark.parametrize("names", [[name] for name in CHANGES] + [list(CHANGES)], ids=len)
@pytest.mark.parametrize("sizes", [[45], [9, 1, 35]])
def test_edits_do_what_the_same_change_does_to_the_reference(session, names, sizes):
    edits = Edits.of([edit for name in names for edit in CHANGES[name][0]], len(ALL))
    logits, _, streams = run(session, IDS, sizes, taps=ALL, edits=edits)
    reference = Hooked(CONFIG, dequantized(CONFIG, packed(CONFIG, TENSORS, "f32"), TENSORS), np.float64)
    reference.change = reference_change(names)
    expected, seen = reference.run(IDS)
    assert np.abs(logits - expected[-1]).max() < 1e-4
    assert np.abs(streams[3] - seen["blocks.2.hook_resid_post"]).max() < 1e-4
    assert np.abs(expected[-1] - Hooked(CONFIG, TENSORS)(IDS)[-1]).max() > 1e-2


def test_edited_sequences_leave_the_others_of_their_step_alone(session):
    alone = run(session, IDS[::-1])[0]
    edits = [Edits.of(CHANGES[name][0], len(ALL)) for name in CHANGES]
    changed = [run(session, IDS, edits=one)[0] for one in edits]
    feeds = [Feed(PagedCache(), IDS, edits=one) for one in edits]
    feeds.insert(2, Feed(PagedCache(), IDS[::-1]))
    rows = session.step(feeds)
    assert np.array_equal(rows[2], alone)
    assert all(np.array_equal(row, expected) for row, expected in zip(np.delete(rows, 2, 0), changed, strict=True))
    assert np.array_equal(run(session, IDS[::-1])[0], alone)
    for feed in feeds:
        session.release(feed.cache)


def test_putting_back_what_was_there_changes_no_bit(session):
    """Patching every head's output with the run's own: the same numbers, so the same bits."""
    plain, heads, _ = run(session, IDS, taps=ALL)
    z = {layer: heads[layer][1].reshape(len(IDS), -1) for layer in ALL}
    edits = Edits.of([Edit(point(layer, HEADS), 0, False, 0, len(IDS), z[layer]) for layer in ALL], len(ALL))
    assert np.array_equal(run(session, IDS, [20, 25], edits=edits)[0], plain)
