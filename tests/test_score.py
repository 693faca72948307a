"""Log-probabilities at the front door: `LLM.score`, and those of prompts and answers, streamed or not."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import qkv
from qkv import SamplingParams
from qkv.errors import ParameterError, QkvError
from tinyllm import opened, write_model

TEXT = "The quick brown fox jumps over the lazy dog. " * 9
ASKED = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=True, top_logprobs=20, prompt_logprobs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as made:
        yield made


def test_a_text_and_its_ids_score_alike(llm):
    found = llm.score(TEXT)
    assert isinstance(found, qkv.Score) and found == llm.score(llm.tokenizer.prompt(TEXT))
    assert len(found.logprobs) == len(found.token_ids) == len(TEXT)
    assert found.logprobs[0] is None and all(value < 0 for value in found.logprobs[1:])
    assert found.total == pytest.approx(sum(found.logprobs[1:])) and found.perplexity > 1


def test_a_score_is_what_an_answer_reported(llm):
    """The tokens of an answer, scored as a text, have the log-probabilities that came with them: the same bits."""
    answer = llm.generate("Hello", ASKED)
    ids = llm.tokenizer.prompt("Hello")
    found = llm.score([*ids, *answer.token_ids]).logprobs
    assert found[1 : len(ids)] == answer.prompt_logprobs
    assert found[len(ids) :] == [choice.logprob for choice in answer.logprobs]


def test_scores_do_not_depend_on_what_else_runs(llm):
    expected = llm.score(TEXT, window=100).logprobs
    others = [
        threading.Thread(target=llm.generate, args=([TEXT[:50]] * 3, SamplingParams(max_tokens=60))) for _ in "ab"
    ]
    for thread in others:
        thread.start()
    found = [llm.score(TEXT, window=100).logprobs for _ in range(3)]
    for thread in others:
        thread.join()
    assert found == [expected] * 3


@pytest.mark.parametrize(
    ("text", "options"),
    [("", {}), ("a", {}), ([], {}), (None, {}), (5, {}), (TEXT, {"window": 1}), (TEXT, {"stride": 0})],
)
def test_bad_requests_name_what_is_wrong(llm, text, options):
    with pytest.raises(ParameterError, match=r"^(text|window|stride) "):
        llm.score(text, **options)


def test_a_closed_model_says_so(folder):
    made = opened(folder)
    made.close()
    with pytest.raises(QkvError, match="closed"):
        made.score(TEXT)


def entries(completion):
    return [(choice.token, choice.logprob, choice.top) for choice in completion.logprobs]


@pytest.mark.parametrize(
    "change", [{}, {"stop": "e"}, {"logit_bias": {40: -100}, "temperature": 0.01}, {"min_tokens": 5}]
)
def test_streamed_or_not_there_is_one_entry_for_each_token(llm, change):
    params = SamplingParams(**{"seed": 3, "max_tokens": 20, "logprobs": True, "top_logprobs": 20, **change})
    whole = llm.generate("Hello", params)
    stream = llm.stream("Hello", params)
    for _ in stream:
        pass
    assert [choice.token for choice in whole.logprobs] == whole.token_ids
    assert entries(stream.completion) == entries(whole)
    json.dumps(entries(whole), allow_nan=False)
    for choice in whole.logprobs:
        p = np.exp([value for _, value in choice.top])
        assert len(p) == 20 and np.all(np.diff(p) <= 0) and p.sum() <= 1 + 1e-12


def test_nothing_is_reported_that_was_not_asked_for(llm):
    answer = llm.generate("Hello", SamplingParams(max_tokens=3))
    assert answer.logprobs is None and answer.prompt_logprobs is None


@pytest.mark.parametrize("change", [{"stop_token_ids": [10**6]}, {"logit_bias": {10**6: 1}}])
def test_ids_beyond_the_vocabulary_are_refused(llm, change):
    with pytest.raises(ParameterError, match=f"^{next(iter(change))}: 1000000"):
        llm.generate("Hello", SamplingParams(**change))
    assert llm.generate("Hello", SamplingParams(max_tokens=2)).token_ids  # and the model goes on


def test_stop_ids_end_and_ignore_eos_does_not(llm):
    free = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=10))
    third = free.token_ids[2]
    end = free.token_ids.index(third)
    for ignore in (False, True):
        params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[third], ignore_eos=ignore)
        stopped = llm.generate("Hello", params)
        assert stopped.token_ids == free.token_ids[:end] and stopped.finish_reason == "stop"
    five = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(five.token_ids) == 5


def test_nothing_left_to_choose_ends_that_request_alone(llm):
    everything = dict.fromkeys(range(llm.config.vocab_size), -100)
    other = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=20))
    with pytest.raises(ParameterError, match=r"^logit_bias: it forbids every token$"):
        llm.generate("Hello", SamplingParams(logit_bias=everything))
    assert list(other) and len(other.completion.token_ids) == 20
