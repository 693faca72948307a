"""Keys and values beyond what an f16 cache holds: their request ends with a clear line, and no other notices."""

from __future__ import annotations

import numpy as np
import pytest

from decoders import compiled, packed
from qkv.engine.engine import Engine
from qkv.engine.params import SamplingParams
from qkv.engine.scoring import compare, score
from qkv.engine.session import Session
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import QkvError
from qkv.kernels.sizes import CACHE_KINDS
from qkv.model.compiled import CompiledDecoder
from qkv.model.feed import CacheOverflowError, Feed, PagedCache
from tiny import random_tensors, tiny_config

CONFIG = tiny_config(architecture="qwen2", num_hidden_layers=2)  # no norm bounds its keys
BIG = 77  # the token whose keys or values are large
PROMPTS = {"first": [BIG, 3, 4], "middle": [1, 2, BIG, 3], "last": [*range(40), BIG], "alone": [BIG]}
NEIGHBOUR = [5, 6, 7, 8]


def decoder_with(part: str, size: float, kind: str = "f16") -> CompiledDecoder:
    """Only BIG has anything in hidden dimension 0, and `part` ("k" or "v") of layer 0 makes about `size` of it."""
    tensors = random_tensors(CONFIG)
    table, layer = tensors["model.embed_tokens.weight"], "model.layers.0."
    table[:, 0], table[BIG] = 0, 0
    table[BIG, 0] = 1
    tensors[layer + "input_layernorm.weight"][0] = 1
    matrix = tensors[f"{layer}self_attn.{part}_proj.weight"]
    matrix[:, 0] = 0
    matrix[0, 0] = size / np.sqrt(CONFIG.hidden_size)
    return compiled(CONFIG, packed(CONFIG, tensors), cache=kind)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_step_names_the_chunks_that_do_not_fit(part, prompt):
    decoder = decoder_with(part, 200_000)
    session = Session(decoder)
    expected = session.step([Feed(PagedCache(), NEIGHBOUR, "all")])
    caches = [PagedCache() for _ in range(3)]
    with pytest.raises(CacheOverflowError, match=r'beyond 65,504.*cache="f32" or cache="int8"') as failure:
        session.step([Feed(caches[0], NEIGHBOUR, "all"), Feed(caches[1], prompt), Feed(caches[2], [9])])
    assert failure.value.feeds == (1,)
    assert [cache.length for cache in caches] == [0, 0, 0]
    assert np.array_equal(session.step([Feed(caches[0], NEIGHBOUR, "all")]), expected)
    with pytest.raises(CacheOverflowError):
        session.run(prompt, PagedCache())


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_numbers_that_fit_are_no_error(part, kind):
    """45,000 in every cache; the others also take what is too large for an f16 cache."""
    for size in (45_000, 200_000) if kind != "f16" else (45_000,):
        decoder = decoder_with(part, size, kind)
        session = Session(decoder)
        assert np.isfinite(session.run(PROMPTS["middle"], PagedCache())).all()
        decoder.close()


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_an_infinite_number_is_damage_and_not_a_matter_of_the_cache(part, kind):
    decoder = decoder_with(part, 3e38 * 8, kind)
    session = Session(decoder)
    for prompt in PROMPTS.values():
        session.step([Feed(PagedCache(), prompt)])
        assert decoder.likeliest().tolist() == [-1]


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("speculation", [False, True])
def test_a_request_that_does_not_fit_ends_and_its_neighbours_keep_their_bits(part, speculation):
    """In its prompt and in its answer; what it had computed is not found again by the next with the same beginning."""
    decoder = decoder_with(part, 200_000)
    engine = Engine(decoder, vocabulary=Vocabulary(CONFIG.vocab_size), context=256, end_ids=[], speculation=speculation)
    greedy = SamplingParams(temperature=0, max_tokens=30, logit_bias={BIG: -100.0})  # its own choice is not BIG
    (expected,) = engine.submit(NEIGHBOUR, greedy).wait(60)
    beginning = list(range(100, 170))
    neighbour = engine.submit(NEIGHBOUR, greedy)
    in_prompt = engine.submit([*beginning, BIG], greedy)
    in_answer = engine.submit([11, 12], SamplingParams(temperature=0, max_tokens=5, logit_bias={BIG: 100.0}))
    for handle in (in_prompt, in_answer):
        with pytest.raises(QkvError, match=r'beyond 65,504.*cache="f32" or cache="int8"'):
            handle.wait(60)
    (made,) = neighbour.wait(60)
    assert made.token_ids == expected.token_ids
    (after,) = engine.submit(beginning, greedy).wait(60)
    assert after.reused == 0
    assert engine.stats().cache.free_blocks == decoder.blocks
    engine.close()


@pytest.mark.parametrize("place", [0, 60, 150])
def test_a_text_that_does_not_fit_is_scored_by_nobody(place):
    """Neither by the engine nor by the comparison of formats, in whichever window it is; the next text is."""
    decoder = decoder_with("k", 200_000)
    text = [(7 * i) % 70 for i in range(200)]
    bad = [*text[:place], BIG, *text[place:]]
    vocabulary = Vocabulary(CONFIG.vocab_size)
    engine = Engine(decoder, vocabulary=vocabulary, context=256, end_ids=[])
    with pytest.raises(QkvError, match=r'^keys or values.*beyond 65,504.*cache="f32" or cache="int8"'):
        score(engine, bad, window=100, stride=50)
    found = score(engine, text, window=100, stride=50)
    engine.close()
    session = Session(decoder)
    with pytest.raises(CacheOverflowError, match=r'^keys or values.*beyond 65,504.*cache="f32" or cache="int8"'):
        compare([session], bad, vocabulary=vocabulary, window=100, stride=50)
    assert session.pool.free == session.pool.size
    (again,) = compare([session], text, vocabulary=vocabulary, window=100, stride=50)
    assert again.logprobs == found.logprobs[1:]
    decoder.close()
