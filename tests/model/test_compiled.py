"""The compiled decoder against the reference and transformers, and, bit for bit, against itself.

Bits: a sequence's logits are the same alone or in a batch, whole or in chunks, on one thread or three, in fresh or in
used memory. `==` on float32, in every weight format and every kind of cache.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from test_reference import FAMILIES, hf_model, prompt

from decoders import QuantizedReference, compiled, dequantized, logits_of, packed
from qkv.engine.session import Session
from qkv.errors import ModelFileError, ParameterError, QkvError
from qkv.kernels.sizes import STEP_TOKENS
from qkv.model import compiled as compiled_module
from qkv.model.compiled import CompiledDecoder
from qkv.model.feed import Feed, PagedCache
from qkv.model.reference import Decoder
from tiny import random_tensors, tiny_config

CACHES = ("f32", "f16", "int8")
CASES = [(weights, kind) for weights in ("f32", "bf16", "int4", "mixed") for kind in CACHES]
T = 64


@cache
def weights_of(family: str, weights: str):
    """(packed, the reference on exactly the same values) of a family's random model."""
    config, tensors = FAMILIES[family], random_tensors(FAMILIES[family])
    made = packed(config, tensors, weights)
    quantized = weights not in ("f32", "bf16")
    values = dequantized(config, made, tensors)
    return made, (QuantizedReference if quantized else Decoder)(config, values), Decoder(config, values)


@cache
def decoder_of(family: str, weights: str, kind: str = "f32", threads: int = 2) -> CompiledDecoder:
    return compiled(FAMILIES[family], weights_of(family, weights)[0], cache=kind, threads=threads, outputs=STEP_TOKENS)


@pytest.fixture(autouse=True, scope="module")
def _let_go() -> Iterator[None]:
    yield
    decoder_of.cache_clear()
    weights_of.cache_clear()
    gc.collect()


# ------------------------------------------------------------------------------------------ the right numbers


@pytest.mark.parametrize("weights", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_formats_equal_the_reference(family, weights):
    """bf16 weights are exact once rounded: the reference runs on the rounded values."""
    _, reference, _ = weights_of(family, weights)
    ids = prompt(FAMILIES[family], T)
    expected = reference(ids)
    assert np.abs(logits_of(decoder_of(family, weights), ids) - expected).max() < 1e-4
    assert np.abs(expected).max() > 1


# Errors of the keys and values: a half has 11 bits, 2^-12 of each number; int8 has half a step of 1/127, which is 2^-8
# of a group's largest number. 20 times apart, as are the measured differences: 0.009 and 0.21 on logits up to 7.
CACHE_BOUNDS = {"f16": 0.02, "int8": 0.4}


@pytest.mark.parametrize("kind", CACHE_BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_smaller_caches_cost_what_their_rounding_costs(family, kind):
    _, reference, _ = weights_of(family, "f32")
    ids = prompt(FAMILIES[family], T)
    difference = np.abs(logits_of(decoder_of(family, "f32", kind), ids) - reference(ids)).max()
    assert 1e-5 < difference < CACHE_BOUNDS[kind]  # it is rounded, and by no more than that


@pytest.mark.parametrize("weights", ["mixed", "int4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_integer_formats_equal_a_reference_that_rounds_activations_alike(family, weights):
    """Short sequences agree to float32's last bits, unless a number that both round lies within an ulp of a half: one
    of them then rounds up and the other down, and all that follows differs by about the rounding's size (one sequence
    of 100 or so). Such are allowed to be few."""
    _, reference, _ = weights_of(family, weights)
    decoder = decoder_of(family, weights)
    rng = np.random.default_rng(3)
    sequences = rng.integers(0, FAMILIES[family].vocab_size, (40, 3)).tolist()
    differences = [np.abs(logits_of(decoder, ids) - reference(ids)).max() for ids in sequences]
    assert np.mean(np.array(differences) < 1e-4) >= 0.8
    assert max(differences) < 0.2


@pytest.mark.parametrize("weights", ["mixed", "int4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_activations_cost_little(family, weights):
    """Against the same weights with float32 activations: these have half a step of 1/127, as the int8 cache."""
    _, _, reference = weights_of(family, weights)
    ids = prompt(FAMILIES[family], T)
    expected = reference(ids)
    difference = logits_of(decoder_of(family, weights), ids) - expected
    assert np.abs(difference).max() < 0.6
    assert np.sqrt(np.mean(difference**2) / np.mean(expected**2)) < 0.05


@pytest.mark.oracle
@pytest.mark.parametrize("weights", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, weights):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config, tensors = FAMILIES[family], random_tensors(FAMILIES[family])
    values = dequantized(config, weights_of(family, weights)[0], tensors)
    ids = prompt(config, T)
    model = hf_model(config, {name: values[name] for name in tensors})
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits_of(decoder_of(family, weights), ids) - expected).max() < 1e-4


def test_every_length_of_history_to_130_and_around_512():
    """One sequence, a token at a time; each step's logits are those of the reference on the whole sequence."""
    config = tiny_config(num_hidden_layers=1, max_position_embeddings=1024)
    tensors = random_tensors(config)
    decoder = compiled(config, packed(config, tensors), context=1024)
    session = Session(decoder)
    ids = prompt(config, 520)
    expected = Decoder(config, tensors)(ids)
    cache = PagedCache()
    for t in range(130):
        assert np.abs(session.run([ids[t]], cache) - expected[t]).max() < 1e-4, t
    session.run(ids[130:508], cache)
    for t in range(508, 520):
        assert np.abs(session.run([ids[t]], cache) - expected[t]).max() < 1e-4, t
    assert cache.length == 520


def test_prompts_longer_than_a_step_are_computed_in_several():
    config = tiny_config(num_hidden_layers=1, max_position_embeddings=2048)
    tensors = random_tensors(config)
    decoder = compiled(config, packed(config, tensors), context=2048)
    session = Session(decoder)
    ids = prompt(config, 2 * STEP_TOKENS + 77)
    assert np.abs(session.run(ids, PagedCache()) - Decoder(config, tensors)(ids)[-1]).max() < 1e-4


# ------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize(("weights", "kind"), CASES)
def test_a_batch_gives_each_sequence_the_bits_it_has_alone(weights, kind):
    """Five sequences of lengths 1 … 70; two of them have a history, one of which goes on by a single token."""
    decoder = decoder_of("qwen3", weights, kind)
    session = Session(decoder)
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 320, n).tolist() for n in (1, 2, 9, 40, 70)]
    alone = [logits_of(decoder, ids) for ids in sequences]
    histories = [0, 0, 4, 39, 0]
    caches = [PagedCache() for _ in sequences]
    before = [Feed(c, ids[:n], "none") for c, ids, n in zip(caches, sequences, histories, strict=True) if n]
    assert session.step(before).shape == (0, 320)
    chunks = [Feed(c, ids[n:], "all") for c, ids, n in zip(caches, sequences, histories, strict=True)]
    together = session.step(chunks)
    expected = np.concatenate([rows[n:] for rows, n in zip(alone, histories, strict=True)])
    assert np.array_equal(together, expected)
    assert [c.length for c in caches] == [1, 2, 9, 40, 70]
    for c in caches:
        session.release(c)


@pytest.mark.parametrize(("weights", "kind"), CASES)
def test_chunks_of_any_size_give_the_bits_of_the_whole(weights, kind):
    decoder = decoder_of("qwen3", weights, kind)
    ids = prompt(FAMILIES["qwen3"], 130)
    whole = logits_of(decoder, ids)
    for size in (1, 3, 7, 31, 32, 33, 64):
        chunks = [min(size, 130 - start) for start in range(0, 130, size)]
        assert np.array_equal(logits_of(decoder, ids, chunks), whole), size


@pytest.mark.parametrize(("weights", "kind"), CASES)
def test_threads_change_no_bit(weights, kind):
    ids = prompt(FAMILIES["qwen3"], 70)
    one, two, three = (
        logits_of(decoder_of("qwen3", weights, kind, threads), ids, [1, 60, 1, 8]) for threads in (1, 2, 3)
    )
    assert np.array_equal(one, two)
    assert np.array_equal(two, three)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("weights", ["f32", "mixed"])
def test_other_families_keep_their_bits_too(family, weights):
    """Biases, and 3 key/value heads of 2 query heads each."""
    ids = prompt(FAMILIES[family], 70)
    whole = logits_of(decoder_of(family, weights, "f16"), ids)
    assert np.array_equal(logits_of(decoder_of(family, weights, "f16"), ids, [1, 33, 1, 1, 34]), whole)
    assert np.array_equal(logits_of(decoder_of(family, weights, "f16", 1), ids), whole)


@pytest.mark.parametrize(("weights", "kind"), CASES)
def test_a_changed_token_leaves_earlier_logits_alone(weights, kind):
    decoder = decoder_of("qwen3", weights, kind)
    ids = prompt(FAMILIES["qwen3"], 70)
    before = logits_of(decoder, ids)
    for t in (1, 31, 32, 69):
        changed = [*ids[:t], (ids[t] + 1) % 320, *ids[t + 1 :]]
        after = logits_of(decoder, changed)
        assert np.array_equal(before[:t], after[:t])
        assert not np.array_equal(before[t], after[t])


@pytest.mark.parametrize(("weights", "kind"), CASES)
def test_used_memory_changes_nothing(weights, kind):
    """All of the cache is NaN (as float32, halves and int8 scales), and so is all that lies between the phases."""
    config = FAMILIES["qwen3"]
    made, _, _ = weights_of("qwen3", weights)
    decoder = compiled(config, made, cache=kind)
    ids = prompt(config, 70)
    fresh = logits_of(decoder, ids, [1, 60, 1, 8])
    fill_with_nan(decoder)
    assert np.array_equal(logits_of(decoder, ids, [1, 60, 1, 8]), fresh)
    fill_with_nan(decoder)
    assert np.array_equal(logits_of(decoder, ids), fresh)


def fill_with_nan(decoder: CompiledDecoder) -> None:
    """The cache, and what phases hand each other; rows' padding is not theirs to write, and this width has none."""
    assert decoder._shape.hidden == decoder._shape.hidden_row
    decoder._buffers.pool.bytes[:] = 0xFF
    assert np.isnan(decoder._buffers.pool.floats).all()
    assert np.isnan(decoder._buffers.pool.bytes.view(np.float16)).all()
    for name in ("x", "h", "qkv", "o", "gate_up", "act", "y", "xs", "parts", "scratch", "logits"):
        getattr(decoder._buffers, name)[:] = np.nan


@pytest.mark.parametrize(("weights", "kind"), CASES)
def test_recycled_blocks_change_nothing(weights, kind):
    """The cache is so small that the second sequence gets the first one's blocks, in another order."""
    config = FAMILIES["qwen3"]
    decoder = compiled(config, weights_of("qwen3", weights)[0], cache=kind, context=128)
    session = Session(decoder)
    ids = prompt(config, 100)
    first = logits_of(decoder, ids)
    other, again = PagedCache(), PagedCache()
    session.step([Feed(other, ids[50:83], "none")])
    rows = session.step([Feed(again, ids, "all")])
    assert np.array_equal(rows, first)
    assert set(other.blocks).isdisjoint(again.blocks)
    session.release(other)
    session.release(again)
    assert session.pool.free == session.pool.size


@pytest.mark.parametrize("kind", CACHES)
def test_parts_and_tiles_give_the_same_bits(monkeypatch, kind):
    """A single token's chunks of 512 positions are computed by several threads and joined, or, where there is no room
    for that, one after the other."""
    config = tiny_config(max_position_embeddings=2048)
    decoder = compiled(config, packed(config, random_tensors(config)), cache=kind, context=1200)
    session = Session(decoder)
    ids = prompt(config, 1100)
    caches = []
    for _ in range(2):
        caches.append(PagedCache())
        session.run(ids[:500], caches[-1])
    parts, tiles = [], []
    for t in [*range(500, 530), *range(1020, 1030)]:
        for cache_, rows in zip(caches, (parts, tiles), strict=True):
            with monkeypatch.context() as patch:
                if rows is tiles:
                    patch.setattr(compiled_module, "MAX_PARTS", 0)
                if cache_.length < t:
                    session.run(ids[cache_.length : t], cache_)
                rows.append(session.run([ids[t]], cache_))
                assert decoder._input.command[1] == (rows is tiles)
                assert decoder._input.command[2] == (0 if rows is tiles else t // 512 + 1)
    assert np.array_equal(parts, tiles)


def test_decoders_of_several_formats_live_side_by_side():
    """Their steps are programs of the same names; none may be taken for another's."""
    ids = prompt(FAMILIES["qwen3"], 9)
    formats = ("int4", "f32", "mixed", "bf16", "int8")
    first = [logits_of(decoder_of("qwen3", weights), ids) for weights in formats]
    again = [logits_of(decoder_of("qwen3", weights), ids) for weights in formats]
    for rows, same, weights in zip(first, again, formats, strict=True):
        assert np.array_equal(rows, same)
        assert np.abs(rows - weights_of("qwen3", weights)[2](ids)).max() < 0.4


# ------------------------------------------------------------------------------------------ what is asked, and errors


def test_logits_come_for_the_tokens_asked_for_only():
    decoder = decoder_of("qwen3", "f32")
    session = Session(decoder)
    ids = prompt(FAMILIES["qwen3"], 12)
    rows = logits_of(decoder, ids)
    caches = [PagedCache() for _ in range(3)]
    got = session.step([Feed(c, ids, wanted) for c, wanted in zip(caches, ("last", "none", "all"), strict=True)])
    assert np.array_equal(got, np.concatenate([rows[-1:], rows]))
    for c in caches:
        session.release(c)


def test_results_are_the_callers_own():
    decoder = decoder_of("qwen3", "f32")
    session = Session(decoder)
    cache_ = PagedCache()
    first = session.step([Feed(cache_, [1])])
    kept = first.copy()
    second = session.step([Feed(cache_, [2])])
    assert np.array_equal(first, kept)
    assert not np.array_equal(first, second)
    session.release(cache_)


def test_without_a_copy_the_next_step_overwrites_the_logits():
    decoder = decoder_of("qwen3", "f32")
    session = Session(decoder)
    cache_ = PagedCache()
    first = session.step([Feed(cache_, [1])], copy=False)
    assert np.shares_memory(first, decoder._buffers.logits)
    kept = first.copy()
    assert np.array_equal(kept, session.step([Feed(PagedCache(), [1])]))
    session.step([Feed(cache_, [2])], copy=False)
    assert not np.array_equal(first, kept)
    session.release(cache_)


def test_after_close_a_step_is_an_error():
    decoder = compiled(FAMILIES["qwen3"], weights_of("qwen3", "f32")[0])
    session = Session(decoder)
    cache_ = PagedCache()
    session.step([Feed(cache_, [1])])
    decoder.close()
    with pytest.raises(QkvError, match="closed"):
        session.step([Feed(cache_, [2])])
    decoder.close()


@pytest.mark.parametrize(("head_dim", "kind", "message"), [(24, "f32", "head_dim 24"), (32, "fp8", "cache")])
def test_what_the_kernels_cannot_do_is_refused(head_dim, kind, message):
    config = tiny_config(head_dim=head_dim)
    with pytest.raises((ModelFileError, ParameterError), match=message):
        compiled(config, packed(config, random_tensors(config)), cache=kind)


def test_an_int8_cache_needs_heads_of_whole_groups():
    config = tiny_config(head_dim=48)
    with pytest.raises(ParameterError, match="cache: int8 needs heads of a multiple of 32"):
        compiled(config, packed(config, random_tensors(config)), cache="int8")


@pytest.mark.parametrize("changes", [{"head_dim": 16}, {"head_dim": 48}, {"hidden_size": 40, "intermediate_size": 50}])
def test_sizes_that_fill_no_group_of_32(changes):
    """Rows are padded; the padding must not leak into sums, whatever it held."""
    config = tiny_config(**changes)
    tensors = random_tensors(config)
    ids = prompt(config, 40)
    for weights in ("f32", "mixed") if config.hidden_size % 32 == 0 and config.head_dim % 16 == 0 else ("f32",):
        made = packed(config, tensors, weights)
        reference = Decoder(config, dequantized(config, made, tensors))
        decoder = compiled(config, made)
        rows = logits_of(decoder, ids)
        assert np.abs(rows - reference(ids)).max() < (1e-4 if weights == "f32" else 0.4)
        assert np.array_equal(logits_of(decoder, ids, [1] * 40), rows)


@pytest.mark.parametrize("window", [1, 7, 32, 40])
def test_a_window_hides_what_is_older(window):
    """Logits of a position are those of its newest `window` tokens in one layer, whatever came before them."""
    config = tiny_config(num_hidden_layers=1)
    decoder = compiled(config, packed(config, random_tensors(config), "f32"))
    decoder._weights.layers["window"][:] = window
    ids = prompt(config, 50)
    all_rows = logits_of(decoder, ids)
    decoder._weights.layers["window"][:] = 0
    for end in (1, 8, 33, 50):
        alone = logits_of(decoder, ids[max(0, end - window) : end])
        assert np.abs(all_rows[end - 1] - alone[-1]).max() < 1e-4  # RoPE knows distances only
    decoder.close()


def test_the_likeliest_tokens_are_those_of_the_logits():
    decoder = decoder_of("qwen3", "f32")
    session = Session(decoder)
    caches = [PagedCache(), PagedCache()]
    logits = session.step([Feed(caches[0], range(9), "all"), Feed(caches[1], range(5), "last")])
    assert len(logits) == 10
    assert decoder.likeliest().tolist() == logits.argmax(axis=1).tolist()
    for each in caches:
        session.release(each)
