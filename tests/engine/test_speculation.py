"""Guesses come from the newest place where the last tokens stood before, and stop where they do not come true."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import ScriptedModel, by_hand, expected, run_all

from qkv.engine.params import SamplingParams
from qkv.engine.speculation import FIRST, GRAM, LONGEST_PAUSE, MOST, Lookup
from qkv.model.feed import CacheOverflowError


def plain(ids, most):
    """By search from the end."""
    for end in range(len(ids) - 1, GRAM - 1, -1):
        if ids[end - GRAM : end] == ids[-GRAM:]:
            return (ids[end:] * FIRST)[: min(most, FIRST)]
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.lists(st.integers(0, 40)))
def test_it_finds_what_a_search_finds(ids, most, stops):
    lookup = Lookup()
    for length in sorted({*stops, len(ids)}):  # the text grows between the questions
        assert lookup.propose(ids[:length], most) == plain(ids[:length], most)


def test_right_guesses_make_them_longer_and_wrong_ones_rarer():
    lookup, ids = Lookup(), [1, 2, 3, 4, 5, 6, 7, 8] * 30
    sizes = []
    for _ in range(4):
        sizes.append(len(lookup.propose(ids, 100)))
        lookup.learn(len(ids), sizes[-1], sizes[-1])
    assert sizes == [FIRST, MOST, MOST, MOST]
    pauses = []
    for _ in range(9):
        lookup.learn(len(ids), 4, 0)
        start = len(ids)
        while not lookup.propose(ids, 100):
            ids.append(ids[-8])
        pauses.append(len(ids) - start)
    assert pauses == [4, 8, 16, 32, *[LONGEST_PAUSE] * 5]
    lookup.learn(len(ids), 4, 4)
    assert lookup.propose(ids, 100)


def test_text_without_repeats_is_left_alone():
    """Guesses that never come true: no more than one step in thirty has any."""
    rng, lookup, ids, tries = random.Random(1), Lookup(), [], 0
    for _ in range(3000):
        ids.append(rng.randrange(4))  # every three tokens were there before, and say nothing
        drafts = lookup.propose(ids, 100)
        if drafts:
            tries += 1
            lookup.learn(len(ids) + 1, len(drafts), 0)
    assert 20 < tries < 100


class Even:
    """A guide that only lets even tokens through, and remembers what it was told."""

    def __init__(self):
        self.told = []

    def allowed(self):
        return np.full(2, 0x55555555, np.uint32)

    def push(self, token):
        self.told.append(token)


PROMPTS = [[1, 2, 3] * 12, [5] * 40, list(range(20)) * 3, [7]]


def answers(speculation, params, guided=False):
    model = ScriptedModel()
    engine = by_hand(model, speculation=speculation)
    guides = [Even() for _ in PROMPTS]
    handles = [
        engine.submit(prompt, params, guides=[guide] if guided else ())
        for prompt, guide in zip(PROMPTS, guides, strict=True)
    ]
    run_all(engine)
    assert model.pool.free == model.pool.size
    return [handle.wait(1)[0] for handle in handles], guides


def test_guided_answers_are_those_without_guesses():
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    fast, guides = answers(True, params, guided=True)
    for one, prompt, guide in zip(fast, PROMPTS, guides, strict=True):
        assert one.token_ids == expected(prompt, params, guide=Even())[0] == guide.told


class Circle(ScriptedModel):
    """A model that says the same eight tokens again and again, so that guesses come true, but for every 20th."""

    def _rows(self, feed):
        for row, position in zip(super()._rows(feed), self._positions(feed), strict=True):
            row[:] = -1
            row[(position * 3 if position % 20 else position * 3 + 1) % 8 + 1] = 5
            yield row

    @staticmethod
    def _positions(feed):
        count = len(feed.ids)
        wanted = {"none": 0, "last": 1, "all": count}[feed.outputs]
        return range(feed.cache.length + count - wanted + 1, feed.cache.length + count + 1)


def test_several_tokens_a_step_and_no_wrong_guess_in_the_cache():
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    made = {}
    for speculation in (False, True):
        model = Circle()
        engine = by_hand(model, speculation=speculation)
        handle = engine.submit([1, 2, 3], params)
        run_all(engine)
        (one,) = handle.wait(1)
        made[speculation] = one.token_ids, len(model.steps)
        for key, block in model.pool._block_of.items():
            at = one.keys.index(key)
            assert model.memory[block].tolist() == one.ids[32 * at : 32 * at + 32]
        assert len(model.pool._block_of) == (3 + 200 - 1) // 32
        if speculation:
            assert one.drafted > one.accepted > 100
            assert one.accepted + one.decode_steps == 199
    assert made[True][0] == made[False][0]
    assert made[True][1] < made[False][1] / 2


def test_guesses_that_do_not_fit_the_cache_are_dropped_and_no_token_changes():
    """Keys of a guess may be too large for an f16 cache, and those of what really comes not."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    model = ScriptedModel()
    engine = by_hand(model, speculation=True)
    handles = [engine.submit(prompt, params) for prompt in PROMPTS[:2]]
    unlucky, neighbour = (handle.answers[0] for handle in handles)
    refused = []

    def too_large(feeds):
        bad = [i for i, feed in enumerate(feeds) if feed.cache is unlucky.cache and feed.outputs == "all"]
        if bad:
            refused.append(len(feeds[bad[0]].ids))
            raise CacheOverflowError(bad)

    model.before_step = too_large
    run_all(engine)
    for handle, prompt in zip(handles, PROMPTS, strict=False):
        assert handle.wait(1)[0].token_ids == expected(prompt, params)[0]
    assert len(refused) == 1 < refused[0]
    assert (unlucky.lookup, unlucky.drafted) == (None, 0)
    assert neighbour.drafted > 0
    assert model.pool.free == model.pool.size


def test_guesses_never_go_beyond_the_answer():
    """Neither beyond max_tokens nor beyond the context: no position is asked for that there is not."""
    for limit in (1, 2, 5, 33, None):
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        model = Circle(blocks=2)
        engine = by_hand(model, speculation=True, context=64)
        handle = engine.submit([1, 2, 3], params)
        run_all(engine)
        (one,) = handle.wait(1)
        assert len(one.token_ids) == (limit or 61)
        assert one.finish_reason == "length"
