"""Who runs next: the order, the sizes, and a machine that does everything at once and compares with solo runs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from scripted_model import GREEDY, BurningError, ScriptedModel, by_hand, expected, run_all, turn

from qkv.engine.params import SamplingParams
from qkv.engine.scheduler import FEWEST_TOKENS, FIRST_GUESS, STEP_SECONDS

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_decodes_come_first_and_prompts_in_the_order_they_came():
    model = ScriptedModel(step_tokens=64)
    engine = by_hand(model)
    engine.submit([1], LONG)
    turn(engine)
    engine.submit([2] * 70, LONG)
    engine.submit([3] * 10, LONG)
    turn(engine)
    assert model.steps[-1] == [1, 32, 10]  # a piece ends with a block; what that leaves is the next one's
    turn(engine)
    assert model.steps[-1] == [1, 1, 38]
    run_all(engine)


def test_a_lone_prompt_fills_whole_steps():
    model = ScriptedModel(blocks=64)
    engine = by_hand(model, context=2000)
    engine.submit([5] * 1200, GREEDY)
    run_all(engine)
    assert model.steps[:3] == [[512], [512], [176]]


def test_pieces_take_so_long_beside_decodes_and_no_longer():
    model = ScriptedModel(blocks=256)
    engine = by_hand(model, context=4000)
    scheduler = engine.scheduler
    first = engine.submit([1], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    turn(engine)
    engine.submit([5] * 3500, GREEDY)
    for rate in (1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0):
        engine._read_mail()
        plan = scheduler.plan()
        size = len(plan[1].feed.ids)
        for work in plan:
            work.feed.cache.length += len(work.feed.ids)
        plan[0].answer.cache.length -= 1  # its token is not chosen here: it decodes the same one again
        scheduler.record(size / rate)
    assert size == 128  # 150 tokens, cut to whole blocks
    for _ in range(12):
        scheduler._prompt_tokens = 64
        scheduler.record(100.0)
    assert len(scheduler.plan()[1].feed.ids) == FEWEST_TOKENS
    first.cancel()


def test_before_anything_was_measured_a_piece_is_small():
    model = ScriptedModel()
    engine = by_hand(model, context=1000)
    engine.submit([1], LONG)
    turn(engine)
    engine.submit([5] * 500, GREEDY)
    turn(engine)
    assert model.steps[-1] == [1, FIRST_GUESS]
    assert STEP_SECONDS == 0.15
    run_all(engine)


def test_the_youngest_gives_way_and_comes_back_first():
    model = ScriptedModel(blocks=4)
    engine = by_hand(model, context=128)
    params = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)
    handles = [engine.submit([i] * 20, params) for i in range(3)]
    late = engine.submit([9] * 20, params)
    run_all(engine)
    assert engine.scheduler.preemptions > 0
    for i, handle in zip((0, 1, 2, 9), [*handles, late], strict=True):
        (made,) = handle.wait(1)
        assert made.token_ids == expected([i] * 20, params, context=128)[0]
    ends = [handle.answers[0].last_token for handle in [*handles, late]]
    assert ends == sorted(ends)
    assert model.pool.free == 4


def test_two_prompts_that_together_fill_the_cache_do_not_wait_for_each_other():
    model = ScriptedModel(blocks=4, step_tokens=40)
    engine = by_hand(model, context=128)
    scheduler = engine.scheduler
    scheduler._fits = lambda generation: True  # let both in, which it would not do
    handles = [engine.submit([i] * 115, GREEDY) for i in range(2)]
    run_all(engine)
    assert model.steps[0] == [32, 8]
    assert scheduler.preemptions > 0
    for handle in handles:
        assert handle.wait(1)[0].token_ids == expected(handle.prompt_ids, GREEDY, context=128)[0]


def test_no_more_run_at_once_than_there_are_rows():
    model = ScriptedModel(blocks=300, outputs=8)
    engine = by_hand(model)
    handles = [engine.submit([i % 40, i], LONG) for i in range(30)]
    run_all(engine)
    assert max(map(len, model.steps)) == 8
    for i, handle in enumerate(handles):
        assert handle.wait(1)[0].token_ids == expected([i % 40, i], LONG)[0]


# ------------------------------------------------------------------------------------------ everything at once


class Guide:
    """Lets even tokens through, or breaks at the `breaks`-th."""

    def __init__(self, breaks):
        self.breaks, self.count = breaks, 0

    def allowed(self):
        return None

    def push(self, token):
        self.count += 1
        if self.count == self.breaks:
            raise BurningError("guide")


PROMPTS = st.tuples(st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 96, 130]), st.integers(1, 34), st.booleans()).map(
    lambda t: [7] * t[0] + [t[1]] * (t[1] % 3 + 1) if t[2] else [i % 48 for i in range(t[0] + t[1])]
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1.0]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.sampled_from([1, 2, 33, 70, None]),
    frequency_penalty=st.sampled_from([0, 0, 0.5]),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
)


class Machine(RuleBasedStateMachine):
    """Requests of all kinds, cancels, failures of one and of a step, in any order, on a cache that is too small."""

    requests = Bundle("requests")
    speculation = False

    def __init__(self):
        super().__init__()
        self.model = ScriptedModel(blocks=9, step_tokens=48, outputs=12)
        self.engine = by_hand(self.model, speculation=self.speculation)
        self.handles = []
        self.failing = None

    @rule(target=requests, prompt=PROMPTS, params=PARAMS)
    def submit(self, prompt, params):
        self.handles.append(self.engine.submit(prompt, params))
        return self.handles[-1]

    @precondition(lambda self: len(self.handles) % 3 == 2)
    @rule(prompt=PROMPTS, at=st.integers(1, 40))
    def submit_one_that_fails(self, prompt, at):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
        self.handles.append(self.engine.submit(prompt, params, guides=[Guide(at)]))

    @rule(handle=consumes(requests))
    def cancel(self, handle):
        handle.cancel()

    @rule(turns=st.integers(1, 30))
    def go_on(self, turns):
        for _ in range(turns):
            turn(self.engine)

    @precondition(lambda self: len(self.handles) % 5 == 4)
    @rule()
    def a_step_fails(self):
        def fail(feeds):
            raise BurningError("step")

        self.model.before_step = fail
        turn(self.engine)
        self.model.before_step = None

    @invariant()
    def every_block_is_where_it_is_counted(self):
        pool, counts = self.model.pool, [0] * self.model.pool.size
        for generation in self.engine.scheduler.running:
            for block in generation.cache.blocks:
                counts[block] += 1
        assert pool._users == counts
        assert sorted([*pool._empty, *pool._kept]) == [block for block, count in enumerate(counts) if not count]
        assert set(pool._kept) <= set(pool._key_of)

    @invariant()
    def what_can_be_found_is_what_its_key_says(self):
        known = {}
        for handle in self.handles:
            for generation in handle.answers:
                for at, key in enumerate(generation.keys):
                    known[key] = generation.ids[32 * at : 32 * at + 32]
        for key, block in self.model.pool._block_of.items():
            assert self.model.memory[block].tolist() == known[key]

    def teardown(self):
        run_all(self.engine)
        assert self.model.pool.free == self.model.pool.size
        for handle in self.handles:
            assert handle.ended
            for generation in handle.answers:
                tokens, reason = expected(generation.prompt_ids, handle.params, choice=generation.choice)
                if handle.error is None:
                    assert (generation.token_ids, generation.finish_reason) == (tokens, reason)
                else:
                    made = generation.token_ids
                    assert made == tokens[: len(made)] or isinstance(handle.error, BurningError)


class SpeculatingMachine(Machine):
    speculation = True


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSpeculatingMachine = SpeculatingMachine.TestCase
TestSpeculatingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("speculation", [False, True])
def test_the_machine_finds_a_block_that_is_given_out_twice(speculation):
    """That the comparison above can fail: a pool that forgets a user."""
    machine = SpeculatingMachine() if speculation else Machine()
    pool = machine.model.pool
    adopt = pool.adopt

    def forgetful(cache, key):
        found = adopt(cache, key)
        if found:
            pool._users[cache.blocks[-1]] -= 1
        return found

    pool.adopt = forgetful
    machine.submit([7] * 70, GREEDY)
    machine.go_on(30)
    machine.submit([7] * 70, GREEDY)
    with pytest.raises(AssertionError):
        machine.go_on(1)
        machine.every_block_is_where_it_is_counted()
