"""The prefix cache: what is found equals what would be computed, at every length, and is found when it should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import GREEDY, ScriptedModel, by_hand, expected, run_all, turn

from qkv.engine.params import SamplingParams
from qkv.engine.prefix import extend_keys

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 96, 128]


def text(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 48 for i in range(length)]


@pytest.fixture
def engine():
    return by_hand(ScriptedModel())


def answer(engine, prompt, params=GREEDY):
    handle = engine.submit(prompt, params)
    run_all(engine)
    (made,) = handle.wait(1)
    assert (made.token_ids, made.finish_reason) == expected(prompt, params)
    return made


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_twice(engine, length):
    """All blocks but the one with the last token are found; that token is always run."""
    assert answer(engine, text(length)).reused == 0
    assert answer(engine, text(length)).reused == (length - 1) // 32 * 32
    assert answer(engine, text(length)).reused == (length - 1) // 32 * 32


@pytest.mark.parametrize("long", LENGTHS)
@pytest.mark.parametrize("short", LENGTHS)
def test_one_prompt_begins_like_another(engine, short, long):
    shared = min(short, long) // 32 * 32
    answer(engine, text(short)[:short])
    made = answer(engine, [*text(min(short, long)), *text(max(0, long - short), first=7)])
    assert made.reused == min(shared, (long - 1) // 32 * 32)


def test_the_same_block_after_another_beginning_is_another_block(engine):
    answer(engine, [1] * 32 + text(64))
    assert answer(engine, [2] * 32 + text(64)).reused == 0
    assert answer(engine, text(64)).reused == 0


def test_a_conversation_finds_its_own_answers(engine):
    """The blocks of generated tokens count too: the second turn runs only what is new."""
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    first = answer(engine, text(50), params)
    turn_two = [*text(50), *first.token_ids, 1, 2, 3]
    assert answer(engine, turn_two).reused == 96  # 99 positions were computed; the hundredth token never ran


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [2, 3])
def test_equal_prompts_in_one_batch_are_computed_once(length, count):
    model = ScriptedModel(step_tokens=64)
    engine = by_hand(model)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    handles = [engine.submit(text(length), params) for _ in range(count)]
    run_all(engine)
    tokens = expected(text(length), params)[0]
    assert [handle.wait(1)[0].token_ids for handle in handles] == [tokens] * count
    found = (length - 1) // 32 * 32
    assert [handle.wait(1)[0].reused for handle in handles] == [0, *[found] * (count - 1)]
    computed = sum(map(sum, model.steps))
    assert computed == length + (count - 1) * (length - found) + count * (len(tokens) - 1)


def test_whoever_waits_goes_on_when_the_other_is_cancelled():
    model = ScriptedModel(step_tokens=32)
    engine = by_hand(model)
    first, second, third = (engine.submit(text(100), GREEDY) for _ in range(3))
    turn(engine)
    turn(engine)
    assert all(len(step) == 1 for step in model.steps)
    first.cancel()
    run_all(engine)
    for handle in (second, third):
        assert handle.wait(1)[0].token_ids == expected(text(100), GREEDY)[0]
    assert (second.answers[0].reused, third.answers[0].reused) == (0, 96)


def test_what_was_found_for_longest_goes_first(engine):
    """Each text leaves 3 blocks, and there are 64."""
    pool = engine.model.pool
    texts = [text(100, first=i) for i in range(1, 30)]
    for one in texts[:18]:
        answer(engine, one)
    assert pool.evictions == 0
    answer(engine, texts[0])  # used again: now the second is the oldest
    for one in texts[18:24]:
        answer(engine, one)
    assert pool.evictions > 0
    assert answer(engine, texts[0]).reused == 96
    assert answer(engine, texts[1]).reused == 0
    stats = engine.stats().cache
    assert stats.evictions == pool.evictions
    assert (stats.queries, stats.hits, stats.tokens_reused) == (27, 2, 192)
    assert stats.blocks == stats.free_blocks == 64
    assert 0 < stats.kept_blocks <= 64


def test_of_one_text_the_end_goes_first():
    """Its beginning is worth more: others may share it, and its end is found by nobody without it."""
    model = ScriptedModel(blocks=8)
    engine = by_hand(model)
    answer(engine, text(200))
    answer(engine, [9] * 40)
    answer(engine, [8] * 100)
    assert answer(engine, text(200)).reused in (64, 96)


def test_no_memory_grows_with_the_number_of_prompts():
    model = ScriptedModel(blocks=16)
    engine = by_hand(model)
    for i in range(200):
        answer(engine, text(60 + i % 40, first=i))
    assert len(model.pool._key_of) == len(model.pool._block_of) == model.pool.kept <= 16
    assert not engine._handle_of


@given(st.lists(st.integers(0, 2), max_size=100), st.lists(st.integers(0, 2), max_size=100))
def test_keys_are_equal_if_and_only_if_everything_up_to_there_is(a, b):
    keys_a, keys_b = [], []
    extend_keys(keys_a, a, len(a) // 32)
    extend_keys(keys_b, b, len(b) // 32)
    for i, (one, other) in enumerate(zip(keys_a, keys_b, strict=False)):
        assert (one == other) == (a[: 32 * i + 32] == b[: 32 * i + 32])


def test_keys_grow_with_the_text():
    once, bit_by_bit = [], []
    extend_keys(once, text(128), 4)
    for blocks in range(5):
        extend_keys(bit_by_bit, text(128), blocks)
    assert once == bit_by_bit
    assert len(set(once)) == 4
