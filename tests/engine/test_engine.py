"""The loop, on a scripted model: it chooses from the last position, ends where it should, and nobody harms others."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from scripted_model import (
    END,
    GREEDY,
    VOCAB,
    BurningError,
    ScriptedModel,
    all_free,
    by_hand,
    engine_of,
    expected,
    logits_after,
    run_all,
    turn,
)

from qkv.engine.mailbox import Mailbox
from qkv.engine.params import SamplingParams
from qkv.errors import ContextLengthError, ParameterError, QkvError, QueueFullError, RequestCancelledError
from qkv.model.feed import StepAbortedError


@pytest.fixture
def model():
    return ScriptedModel()


@pytest.fixture
def engine(model):
    made = engine_of(model)
    yield made
    made.close()
    assert all_free(model)


def generation(engine, prompt, params=GREEDY, **options):
    (made,) = engine.submit(prompt, params, **options).wait(timeout=30)
    return made


class Sink:
    def __init__(self, stop_after=10**9):
        self.tokens, self.stop_after = [], stop_after

    def push(self, choice):
        self.tokens.append(choice.token)
        return len(self.tokens) == self.stop_after


class Forcing:
    """A guide that allows one token at each place."""

    def __init__(self, ids, end=True):
        self.ids, self.at = [*ids, *([END] if end else [])], 0

    def allowed(self):
        mask = np.zeros(2, np.uint32)
        mask[self.ids[self.at] // 32] = 1 << self.ids[self.at] % 32
        return mask

    def push(self, token):
        assert token == self.ids[self.at]
        assert token != END
        self.at += 1


# ------------------------------------------------------------------------------------------ one request


def prompt_that_ends():
    """A prompt whose greedy answer comes to an end token after some others."""
    for token in range(VOCAB - 1):
        tokens, reason = expected([token], SamplingParams(temperature=0, max_tokens=60))
        if reason == "stop" and len(tokens) > 2:
            return [token], tokens
    raise AssertionError("no such prompt")


def test_the_end_token_ends_and_is_not_handed_out(engine):
    prompt, tokens = prompt_that_ends()
    sink = Sink()
    made = generation(engine, prompt, SamplingParams(temperature=0), sinks=[sink])
    assert (made.token_ids, made.finish_reason) == (tokens, "stop")
    assert sink.tokens == tokens
    assert made.decode_steps == len(tokens)  # the first token came with the prompt, the end with a step of its own


def test_ignore_eos_goes_on(engine):
    prompt, tokens = prompt_that_ends()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(tokens) + 5)
    made = generation(engine, prompt, params)
    assert made.token_ids[: len(tokens) + 1] == [*tokens, END]
    assert (len(made.token_ids), made.finish_reason) == (len(tokens) + 5, "length")


def test_stop_token_ids_end_even_so(engine):
    made = generation(engine, [3], SamplingParams(temperature=0, ignore_eos=True, max_tokens=9))
    stop = made.token_ids[4]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9, stop_token_ids=[stop])
    cut = generation(engine, [3], params)
    assert cut.token_ids == made.token_ids[: made.token_ids.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_sink_can_end_the_answer(engine):
    sink = Sink(stop_after=3)
    made = generation(engine, [1, 2], SamplingParams(temperature=0, ignore_eos=True, max_tokens=20), sinks=[sink])
    assert len(made.token_ids) == len(sink.tokens) == 3
    assert made.finish_reason == "stop"


def test_a_guide_decides(engine):
    made = generation(engine, [1, 2], GREEDY, guides=[Forcing([4, 8, 15])])
    assert (made.token_ids, made.finish_reason) == ([4, 8, 15], "stop")


def test_each_token_is_fed_back_once(engine, model):
    made = generation(engine, [1, 2], SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))
    assert len(made.token_ids) == 4
    assert model.steps == [[2], [1], [1], [1]]


@pytest.mark.parametrize(("prompt", "asked", "made"), [(30, 50, 2), (31, None, 1), (10, 3, 3)])
def test_the_context_limits_the_answer(model, prompt, asked, made):
    engine = engine_of(model, context=32)
    result = generation(engine, [1] * prompt, SamplingParams(temperature=0, max_tokens=asked, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (made, "length")
    engine.close()


@pytest.mark.parametrize("prompt", [32, 40])
def test_a_prompt_that_leaves_no_room_says_both_counts(prompt):
    with pytest.raises(ContextLengthError, match=f"{prompt} tokens.*32"):
        engine_of(ScriptedModel(), context=32).submit([1] * prompt, GREEDY)


def test_a_small_cache_is_a_small_context():
    with pytest.raises(ContextLengthError, match=r"64 tokens.* 64"):
        engine_of(ScriptedModel(blocks=2)).submit([1] * 64, GREEDY)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1.5], ["a"], [True], [10**12], [10**5000]])
def test_bad_prompts_are_named(engine, prompt):
    with pytest.raises(ParameterError, match="prompt"):
        engine.submit(prompt, GREEDY)


@pytest.mark.parametrize("field", [{"stop_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1.0}}])
def test_ids_beyond_the_vocabulary_are_named_before_anything_runs(engine, model, field):
    with pytest.raises(ParameterError, match=next(iter(field))):
        engine.submit([1], SamplingParams(temperature=0, **field))
    assert not model.steps
    assert engine._thread is None


def test_requests_without_a_seed_differ(engine):
    one, other = (engine.submit([1], GREEDY) for _ in range(2))
    assert one.params.seed != other.params.seed


def test_n_answers_are_those_of_their_choice_numbers(engine):
    prompt, params = list(range(40)), SamplingParams(temperature=1, seed=5, n=3, max_tokens=12)
    made = engine.submit(prompt, params).wait(timeout=30)
    assert [(one.token_ids, one.finish_reason) for one in made] == [
        expected(prompt, params, choice=choice) for choice in range(3)
    ]
    assert len({tuple(one.token_ids) for one in made}) == 3
    assert [one.reused for one in made] == [0, 32, 32]


def test_logprobs_of_the_prompt_are_those_of_its_rows(engine):
    """Also for a prompt of several pieces, and for one that the cache holds."""
    prompt = [i % VOCAB for i in range(150)]
    params = SamplingParams(temperature=0, prompt_logprobs=True, max_tokens=2)
    for _ in range(2):
        made = generation(engine, prompt, params)
        rows = [logits.astype(np.float64) for logits in map(logits_after, prefixes(prompt))]
        wanted = [row[token] - np.log(np.exp(row).sum()) for row, token in zip(rows, prompt[1:], strict=False)]
        np.testing.assert_allclose(made.prompt_logprobs, wanted, rtol=1e-9)
        assert made.token_ids == expected(prompt, params)[0]


def prefixes(prompt):
    return [prompt[:end] for end in range(1, len(prompt))]


# ------------------------------------------------------------------------------------------ what goes wrong


def others_are_untouched(engine, start_bad, error, match=None):
    """A request that fails beside two good ones."""
    good = [engine.submit([i, 7], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for i in (1, 2)]
    bad = start_bad()
    with pytest.raises(error, match=match):
        bad.wait(timeout=30)
    for i, handle in zip((1, 2), good, strict=True):
        (made,) = handle.wait(timeout=30)
        assert made.token_ids == expected([i, 7], handle.params)[0]
    assert generation(engine, [9]).token_ids == expected([9], GREEDY)[0]


def test_an_exception_in_a_sink_ends_its_request_alone(engine):
    class Broken:
        def push(self, choice):
            raise ZeroDivisionError("in the sink")

    others_are_untouched(engine, lambda: engine.submit([5], GREEDY, sinks=[Broken()]), ZeroDivisionError, "in the sink")


@pytest.mark.parametrize("where", ["allowed", "push"])
def test_an_exception_in_a_guide_ends_its_request_alone(engine, where):
    guide = Forcing([4, 8, 15])

    def fail(*args):
        raise BurningError("in the guide")

    setattr(guide, where, fail)
    others_are_untouched(engine, lambda: engine.submit([5], GREEDY, guides=[guide]), BurningError, "in the guide")


def test_an_exception_in_a_sampler_ends_its_request_alone(engine):
    """All tokens that a guide allows are forbidden by a bias."""
    params = SamplingParams(temperature=0, logit_bias={4: -100})
    others_are_untouched(engine, lambda: engine.submit([5], params, guides=[Forcing([4])]), ParameterError, "forbids")


def test_a_row_that_is_not_finite_ends_its_request_alone_and_leaves_nothing(engine, model):
    prompt = [5] * 70
    model.spoil = lambda ids: ids[:70] == prompt and len(ids) > 75
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    others_are_untouched(engine, lambda: engine.submit(prompt, params), QkvError, "damaged")
    model.spoil = lambda ids: False
    again = generation(engine, prompt, params)
    assert (again.reused, again.token_ids) == (0, expected(prompt, params)[0])


def test_one_answer_of_several_that_fails_ends_them_all(engine, model):
    params = SamplingParams(temperature=0, n=2, max_tokens=5, ignore_eos=True)
    handle = engine.submit([1] * 40, params, sinks=[Sink(), None], guides=[None, Forcing([3], end=False)])
    with pytest.raises(IndexError):
        handle.wait(timeout=30)
    assert generation(engine, [1] * 40).reused == 0


def test_a_failed_step_ends_those_in_it_and_the_engine_lives(engine, model):
    def fail(feeds):
        raise BurningError("the machine is on fire")

    model.before_step = fail
    handles = [engine.submit([i], GREEDY) for i in (1, 2, 3)]
    for handle in handles:
        with pytest.raises(QkvError, match="on fire"):
            handle.wait(timeout=30)
    model.before_step = None
    assert generation(engine, [9]).token_ids == expected([9], GREEDY)[0]


def test_a_defect_in_a_step_says_what_it_was(engine, model):
    def fail(feeds):
        raise ZeroDivisionError("oh")

    model.before_step = fail
    with pytest.raises(QkvError, match="step failed: ZeroDivisionError: oh") as caught:
        generation(engine, [1])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_defect_of_the_engine_itself_leaves_nobody_waiting(engine, model, monkeypatch):
    def fail():
        raise ZeroDivisionError("in the plan")

    monkeypatch.setattr(engine.scheduler, "plan", fail)
    with pytest.raises(QkvError, match="engine failed: ZeroDivisionError: in the plan"):
        generation(engine, [1])
    assert generation(engine, [9]).token_ids == expected([9], GREEDY)[0]


def test_an_empty_plan_is_such_a_defect_and_not_a_hang(engine, model, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "plan", list)
    with pytest.raises(QkvError, match="engine failed: AssertionError: a lone request always finds room"):
        generation(engine, [1])
    assert generation(engine, [9]).token_ids == expected([9], GREEDY)[0]


# ------------------------------------------------------------------------------------------ cancelling


def held_up(model):
    """Let steps through one by one: (permits, arrivals)."""
    permits, arrivals = threading.Semaphore(0), threading.Semaphore(0)

    def wait(feeds):
        arrivals.release()
        assert permits.acquire(timeout=30)

    model.before_step = wait
    return permits, arrivals


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("steps", [1, 2, 5], ids=["in the prompt's first piece", "in its second", "in decode"])
def test_a_cancelled_request_leaves_nothing(steps):
    model = ScriptedModel(step_tokens=64)
    engine = engine_of(model)
    permits, arrivals = held_up(model)
    for _ in range(50):
        handle = engine.submit(list(range(30)) * 3, LONG)
        for step in range(steps):
            assert arrivals.acquire(timeout=30)
            if step == steps - 1:
                handle.cancel()
                handle.cancel()
            permits.release()
        with pytest.raises(RequestCancelledError):
            handle.wait(timeout=30)
        handle.cancel()
        assert all_free(model)
        assert model.pool.kept == 0
    model.before_step = None
    made = generation(engine, list(range(30)) * 3)
    assert (made.reused, made.token_ids) == (0, expected(list(range(30)) * 3, GREEDY)[0])
    engine.close()


def test_a_step_that_serves_nobody_any_more_is_broken_off(engine, model):
    """… and one that serves somebody is not."""
    permits, arrivals = held_up(model)
    handles = [engine.submit([i], LONG) for i in range(2)]
    while len(engine._in_step) < 2:
        assert arrivals.acquire(timeout=30)
        time.sleep(0.001)
        if len(engine._in_step) < 2:
            permits.release()
    handles[0].cancel()
    assert not model.aborted
    handles[1].cancel(at_once=False)
    assert not model.aborted
    handles[1].cancel()
    assert model.aborted
    permits.release(1000)


def test_a_step_broken_off_by_mistake_is_run_again(engine, model):
    steps = iter(range(1000))

    def sometimes(feeds):
        if next(steps) % 3 == 1:
            raise StepAbortedError("the step was broken off")

    model.before_step = sometimes
    handles = [engine.submit([i] * 40, LONG) for i in range(3)]
    for i, handle in enumerate(handles):
        assert handle.wait(30)[0].token_ids == expected([i] * 40, LONG)[0]


def test_two_of_four_cancelled_in_one_step(engine, model):
    permits, arrivals = held_up(model)
    handles = [engine.submit([i], LONG) for i in range(4)]
    for _ in range(5):
        assert arrivals.acquire(timeout=30)
        permits.release()
    handles[1].cancel()
    handles[3].cancel()
    model.before_step = None
    permits.release(1000)
    for i in (0, 2):
        assert handles[i].wait(timeout=30)[0].token_ids == expected([i], LONG)[0]
    for i in (1, 3):
        with pytest.raises(RequestCancelledError):
            handles[i].wait(timeout=30)
        tokens = handles[i].answers[0].token_ids
        assert tokens == expected([i], LONG)[0][: len(tokens)]


def test_the_queue_has_an_end():
    model = ScriptedModel()
    engine = by_hand(model, max_queue=3)
    first = engine.submit([1], GREEDY)
    turn(engine)  # it runs, and waits no more
    handles = [engine.submit([i], GREEDY) for i in range(3)]
    with pytest.raises(QueueFullError, match="3 answers are waiting and the queue holds 3"):
        engine.submit([4], GREEDY)
    turn(engine)
    with pytest.raises(QueueFullError):
        engine.submit([4], SamplingParams(temperature=0, n=4))
    handles.append(engine.submit([4], GREEDY))
    run_all(engine)
    assert all(handle.ended for handle in [first, *handles])


# ------------------------------------------------------------------------------------------ the thread


def test_many_threads_each_get_what_they_would_get_alone(engine, model):
    results = {}

    def use(i):
        params = SamplingParams(temperature=1, seed=42, max_tokens=20)
        results[i] = generation(engine, [i, i + 1], params).token_ids == expected([i, i + 1], params)[0]

    threads = [threading.Thread(target=use, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(range(16), True)
    assert max(map(len, model.steps)) > 1  # they did run together


def test_a_finished_request_is_freed_without_the_garbage_collector(engine):
    handle = engine.submit([1, 2], SamplingParams(temperature=0, n=2, max_tokens=3), mailbox=Mailbox())
    handle.wait(30)
    watched = [weakref.ref(handle), *map(weakref.ref, handle.answers)]
    gc.disable()
    try:
        del handle
        deadline = time.monotonic() + 5
        while any(one() for one in watched) and time.monotonic() < deadline:
            time.sleep(0.01)  # the engine's thread is on its way to sleep
        assert not any(one() for one in watched)
    finally:
        gc.enable()


def test_a_slow_reader_holds_nobody_up(engine):
    """The answer is complete although nobody reads."""
    handle = engine.submit([1], LONG)
    handle.wait(timeout=30)
    assert len(handle.answers[0].token_ids) == 60


def test_an_idle_engine_uses_no_cpu(engine):
    generation(engine, [1])
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_close_ends_running_and_waiting_requests_with_an_error(model):
    engine = engine_of(model, name="tiny")
    permits, arrivals = held_up(model)
    running = engine.submit([1], LONG)
    assert arrivals.acquire(timeout=30)
    waiting = [engine.submit([2], LONG) for _ in range(100)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not model.aborted:
        time.sleep(0.001)
    permits.release(1000)
    closer.join(30)
    for handle in [running, *waiting]:
        with pytest.raises(QkvError, match="tiny has been closed"):
            handle.wait(timeout=30)
    assert all_free(model)
    with pytest.raises(QkvError, match="tiny has been closed"):
        engine.submit([1], GREEDY)
    engine.close()
    assert not engine._thread.is_alive()


def test_closing_from_the_engines_own_thread_works(model):
    engine = engine_of(model)

    class Closing:
        def push(self, choice):
            engine.close()
            return False

    handle = engine.submit([1], LONG, sinks=[Closing()])
    with pytest.raises(QkvError, match="closed"):
        handle.wait(timeout=30)
    engine._thread.join(30)
    assert not engine._thread.is_alive()


EXIT = """
from qkv.model.feed import StepAbortedError
from scripted_model import ScriptedModel, engine_of
from qkv.engine.mailbox import Mailbox
from qkv.engine.params import SamplingParams
import time
model = ScriptedModel()
model.before_step = lambda feeds: time.sleep(0.001)
engine = engine_of(model)
engine.submit([1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
if {idle}:
    engine.submit([1], SamplingParams(temperature=0, max_tokens=1)).wait()
time.sleep(0.02)
print("end")
"""


@pytest.mark.parametrize("idle", [True, False])
def test_a_program_that_ends_with_work_under_way_ends_in_silence(idle):
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{EXIT.format(idle=idle)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
