"""The loop, on a scripted model: it must choose from the last position, end where it should, and count right."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.engine.engine import Engine
from qkv.engine.params import SamplingParams
from qkv.errors import ContextLengthError, ParameterError, QkvError

VOCAB, END = 50, 49
GREEDY = SamplingParams(temperature=0)


class Script:
    """A model whose logits force the given ids."""

    def __init__(self, ids):
        self.ids = ids

    def new_cache(self):
        self.seen, self.served, self.released = [], 0, 0
        return self

    def next_logits(self, ids, cache):
        self.seen += list(ids)
        logits = np.zeros(VOCAB, np.float32)
        logits[self.ids[self.served]] = 9
        self.served += 1
        return logits

    def release(self, cache):
        self.released += 1


def run(script, prompt, params=GREEDY, context=32):
    engine = Engine(script, vocab_size=VOCAB, context=context, end_ids=[END])
    request = engine.submit(prompt, params)
    tokens = list(engine.generate(request))
    assert tokens == request.token_ids
    return request


def test_the_end_token_ends_and_is_not_handed_out():
    request = run(Script([5, 6, END, 7]), [1, 2, 3])
    assert request.token_ids == [5, 6]
    assert request.finish_reason == "stop"
    assert request.decode_steps == 2


def test_ignore_eos_goes_on():
    request = run(Script([5, END, 6, 7, 8]), [1], SamplingParams(temperature=0, ignore_eos=True, max_tokens=5))
    assert request.token_ids == [5, END, 6, 7, 8]
    assert request.finish_reason == "length"


def test_each_token_is_fed_back_once():
    script = Script([5, 6, 7, END])
    run(script, [1, 2])
    assert script.seen == [1, 2, 5, 6, 7]
    assert script.released == 1


@pytest.mark.parametrize(("prompt", "asked", "made"), [(30, 50, 2), (31, None, 1), (10, 3, 3)])
def test_the_context_limits_the_answer(prompt, asked, made):
    request = run(Script([4] * 60), [1] * prompt, SamplingParams(temperature=0, max_tokens=asked))
    assert len(request.token_ids) == made
    assert request.finish_reason == "length"


@pytest.mark.parametrize("prompt", [32, 40])
def test_a_prompt_that_leaves_no_room_says_both_counts(prompt):
    with pytest.raises(ContextLengthError, match=f"{prompt} tokens.*32"):
        run(Script([4]), [1] * prompt)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1.5], ["a"], [True], [10**12]])
def test_bad_prompts_are_named(prompt):
    with pytest.raises(ParameterError, match="prompt"):
        run(Script([4]), prompt)


def test_requests_without_a_seed_differ():
    engine = Engine(Script([4]), vocab_size=VOCAB, context=32, end_ids=[])
    assert engine.submit([1], GREEDY).params.seed != engine.submit([1], GREEDY).params.seed


def test_damaged_weights_are_reported_not_sampled():
    class Damaged(Script):
        def next_logits(self, ids, cache):
            return super().next_logits(ids, cache) * np.float32(np.nan)

    script = Damaged([4])
    with pytest.raises(QkvError, match="damaged"):
        run(script, [1])
    assert script.released == 1


def test_closing_the_iterator_cancels():
    script = Script([5] * 40)
    engine = Engine(script, vocab_size=VOCAB, context=32, end_ids=[END])
    request = engine.submit([1], GREEDY)
    tokens = engine.generate(request)
    assert [next(tokens), next(tokens)] == [5, 5]
    tokens.close()
    assert script.served == 2
    assert script.released == 1
    assert request.finish_reason is None
