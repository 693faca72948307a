"""One answer's sampler: bans, masks, counting and log-probabilities; the whole order against transformers."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.engine.params import SamplingParams
from qkv.engine.sampling import Choice, Sampler, candidates, only
from qkv.errors import ParameterError

VOCAB, END = 300, 2
PROMPT = [5, 6, 7, 5]


def sampler(prompt=PROMPT, *, choice=0, vocab=VOCAB, end_ids=(END,), **fields) -> Sampler:
    params = SamplingParams(**{"temperature": 0, "seed": 1, **fields})
    return Sampler(params, choice=choice, prompt_ids=prompt, vocab_size=vocab, end_ids=end_ids)


def logits_of(seed: int, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def mask_of(ids, size: int = VOCAB) -> np.ndarray:
    mask = np.zeros(-(-size // 32), np.uint32)
    for token in ids:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask


def after(one: Sampler, answer) -> Sampler:
    """The sampler when these tokens have been chosen: each the only one allowed."""
    for token in answer:
        size = 320
        assert one.choose(np.zeros(size, np.float32), position=0, allowed=mask_of([token], size)).token == token
    return one


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def test_greedy_takes_the_likeliest_and_nothing_else_is_reported():
    logits = logits_of(1)
    before = logits.copy()
    assert sampler().choose(logits, position=4) == Choice(int(np.argmax(logits)), None, ())
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 3.0, "presence_penalty": 1, "frequency_penalty": 1},
        {"logit_bias": {1: -100, 2: 50}},
        {"min_tokens": 5, "stop_token_ids": [8]},
        {"logprobs": True, "top_logprobs": 20},
    ],
)
@pytest.mark.parametrize("guided", [False, True])
def test_the_logits_stay_as_they_are(fields, guided):
    logits = logits_of(1)
    before = logits.copy()
    one = sampler(temperature=1.0, **fields)
    for position in range(5):
        one.choose(logits, position=position, allowed=mask_of(range(50)) if guided else None)
    assert np.array_equal(logits, before)


def script(*ids, over: float = 9.0) -> np.ndarray:
    """Logits that rank the ids, first first, before all others."""
    logits = np.zeros(VOCAB, np.float32)
    logits[list(ids)] = np.arange(over, over - len(ids), -1)
    return logits


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [10, 10, 10]),
        ({"presence_penalty": 1.5}, [10, 11, 10]),
        ({"frequency_penalty": 0.75}, [10, 10, 11]),
        ({"repetition_penalty": 1.2}, [10, 11, 10]),
        ({"logit_bias": {10: -100}}, [11, 11, 11]),
        ({"logit_bias": {10: -100, 11: -100.0}}, [12, 12, 12]),
        ({"logit_bias": {250: 100}}, [250, 250, 250]),
        ({"logit_bias": {12: 2.5}}, [12, 12, 12]),
    ],
)
def test_each_field_changes_a_greedy_script(fields, expected):
    one = sampler(**fields)
    assert [one.choose(script(10, 11, 12), position=i).token for i in range(3)] == expected


def test_a_ban_holds_at_any_temperature():
    for position, temperature in itertools.product(range(30), [1e-300, 1.0, 1e9]):
        token = sampler(temperature=temperature, logit_bias={10: -100}).choose(script(10, 11), position=position).token
        assert token != 10


def test_min_tokens_holds_back_what_would_end_the_text():
    one = sampler(min_tokens=2, stop_token_ids=[11])
    assert [one.choose(script(END, 11, 12), position=i).token for i in range(3)] == [12, 12, END]
    one = sampler(min_tokens=2, stop_token_ids=[11], ignore_eos=True)  # here END ends nothing
    assert [one.choose(script(11, END), position=i).token for i in range(3)] == [END, END, 11]
    assert sampler(min_tokens=2, end_ids=[10**6]).choose(script(3), position=0).token == 3  # an id no row has


def test_a_mask_leaves_what_it_says():
    logits = logits_of(2, 100)
    assert np.array_equal(np.flatnonzero(only(logits, mask_of([0, 31, 32, 99], 100)) > -np.inf), [0, 31, 32, 99])
    for allowed in (mask_of([3, 64], 65)[:2], mask_of([3, 64, 200], 300)):  # shorter and longer than the logits
        row = only(logits[:64], allowed)
        assert np.flatnonzero(row > -np.inf).tolist() == [3] and row[3] == logits[3]


@given(st.integers(1, 400), st.integers(0, 2**32), st.floats(0, 1), st.integers(-3, 3))
def test_what_a_mask_leaves_keeps_its_bits(size, seed, density, words):
    """Zeros keep their sign; masks may be shorter and longer than the logits."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * rng.integers(-1, 2, size)).astype(np.float32)
    ids = np.flatnonzero(rng.random(size) < density)
    mask = mask_of(ids, max(size, 1))
    mask = np.append(mask, np.full(words, 0xFFFFFFFF, np.uint32)) if words > 0 else mask[: len(mask) + words]
    defined = np.full(size, -np.inf, np.float32)
    ids = ids[ids < 32 * len(mask)]
    defined[ids] = logits[ids]
    assert np.array_equal(only(logits, mask).view(np.uint32), defined.view(np.uint32))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_k": 1000, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.01},
    ],
)
@pytest.mark.parametrize("allowed", [[7], [3, 150_000], list(range(0, 151_936, 3))])
def test_only_what_a_mask_allows_is_chosen(fields, allowed):
    size = 151_936
    logits, mask = logits_of(3, size), mask_of(allowed, size)
    one = sampler(vocab=size, **fields)
    chosen = {one.choose(logits, position=i, allowed=mask).token for i in range(20)}
    assert chosen <= set(allowed)
    if not fields["temperature"]:
        assert chosen == {max(allowed, key=lambda token: (logits[token], -token))}


def test_a_mask_of_everything_changes_nothing():
    logits = logits_of(4)
    everything = np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)
    for fields in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}):
        free, guided = sampler(**fields), sampler(**fields)
        for i in range(30):
            assert free.choose(logits, position=i) == guided.choose(logits, position=i, allowed=everything)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nothing_left_ends_the_request_with_the_reason(temperature):
    nothing, end = np.zeros(-(-VOCAB // 32), np.uint32), mask_of([END])
    cases = [
        ({"min_tokens": 3}, end, "^min_tokens: "),
        ({"logit_bias": {END: -100}}, end, "^logit_bias: .* grammar"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -100)}, None, "^logit_bias: it forbids every token$"),
        ({}, nothing, "grammar"),
    ]
    for fields, allowed, message in cases:
        for limits in ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}):
            with pytest.raises(ParameterError, match=message):
                sampler(temperature=temperature, **fields, **limits).choose(logits_of(5), position=0, allowed=allowed)


def test_log_probabilities_are_the_models_own():
    """Of the raw logits, whatever the temperature, the penalties, the bans and the mask say."""
    logits = logits_of(6)
    expected = log_softmax(logits)
    ranked = np.argsort(-logits, kind="stable")
    fields = {"temperature": 0.01, "repetition_penalty": 1.5, "logit_bias": {int(ranked[0]): -100, 3: 100}}
    one = sampler(logprobs=True, top_logprobs=20, **fields)
    choice = one.choose(logits, position=4, allowed=mask_of([3, 4]))
    assert choice.token == 3
    np.testing.assert_allclose(choice.logprob, expected[3], rtol=0, atol=1e-12)
    assert [token for token, _ in choice.top] == ranked[:20].tolist()
    np.testing.assert_allclose([p for _, p in choice.top], expected[ranked[:20]], rtol=0, atol=1e-12)
    json.dumps(choice, allow_nan=False)  # strict JSON: no infinity, no NaN


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.3}])
def test_asking_for_log_probabilities_does_not_change_the_text(fields):
    plain, asked = sampler(**fields), sampler(**fields, logprobs=True, top_logprobs=3)
    for i in range(20):
        a, b = plain.choose(logits_of(i), position=i), asked.choose(logits_of(i), position=i)
        assert a.token == b.token and a.logprob is None and a.top == ()
        assert b.logprob is not None and b.logprob <= 0 and len(b.top) == 3


def test_answers_of_one_seed_differ_and_can_be_repeated():
    def texts():
        answers = [sampler(temperature=1.0, choice=choice) for choice in range(4)]
        return [tuple(one.choose(logits_of(i), position=i).token for i in range(12)) for one in answers]

    assert texts() == texts()
    assert len(set(texts())) == 4


def test_an_answer_does_not_depend_on_those_beside_it():
    fields = {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.1}
    alone = sampler(**fields)
    expected = [alone.choose(logits_of(i), position=i).token for i in range(20)]
    one, other = sampler(**fields), sampler(temperature=2.0, seed=9, frequency_penalty=1.0)
    found = []
    for i in range(20):
        other.choose(logits_of(100 + i), position=i)
        found.append(one.choose(logits_of(i), position=i).token)
    assert found == expected


def chi_squared(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic, with the tokens expected less than 5 times put into one bin, and its degrees of freedom."""
    expected = p * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    assert counts[~used].sum() == 0
    return float((((counts - expected) ** 2)[used] / expected[used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"logit_bias": {1: -100, 2: 1.5}, "repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 1.5, "top_k": 8, "top_p": 0.95},
    ],
)
def test_draws_follow_the_stated_distribution(fields):
    """4,000 draws with fixed seeds against the definition, written out in float64."""
    size, answer = 12, [3, 3, 4]
    logits = (np.random.default_rng(8).standard_normal(size) * 1.5).astype(np.float32)
    counts = np.zeros(size, int)
    for seed in range(4000):
        one = after(sampler([1, 5], vocab=size, seed=seed, **{"temperature": 1.0, **fields}), answer)
        counts[one.choose(logits, position=5).token] += 1
    statistic, freedom = chi_squared(counts, distribution(logits, [1, 5], answer, **fields))
    # p = 0.001 of χ², by Wilson and Hilferty's approximation.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def distribution(
    logits,
    prompt,
    answer,
    *,
    temperature=1.0,
    min_p=0.0,
    top_k=0,
    top_p=1.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=None,
):
    """What is drawn from, in the stated order, by the definitions."""
    x = logits.astype(np.float64)
    for token, added in (logit_bias or {}).items():
        x[token] = -np.inf if added == -100 else x[token] + added
    for token in {*prompt, *answer}:
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token in set(answer):
        x[token] -= presence_penalty + frequency_penalty * answer.count(token)
    p = np.exp((x - x.max()) / temperature)
    p[p < min_p] = 0
    ranked = np.argsort(-p, kind="stable")
    p[ranked[top_k:]] *= not top_k
    p /= p.sum()
    before = np.cumsum(p[ranked]) - p[ranked]
    p[ranked[before >= top_p]] = 0
    return p / p.sum()


COMBINATIONS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 10},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.2, "repetition_penalty": 1.3, "top_k": 40},
    {"temperature": 0.8, "logit_bias": {3: 5.0, 4: -100, 9: -2.5}, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
    {
        "temperature": 1.5,
        "logit_bias": {11: 4.0},
        "repetition_penalty": 1.2,
        "min_tokens": 9,
        "stop_token_ids": [8],
        "min_p": 0.01,
        "top_k": 50,
        "top_p": 0.97,
    },
]


@pytest.mark.oracle
@pytest.mark.parametrize("fields", COMBINATIONS)
def test_the_whole_order_equals_transformers(fields):
    """Its processors, one after the other in the order stated here, in float64."""
    torch = pytest.importorskip("torch")
    answer = [10, 11, 12, 10]
    steps = processors(fields, len(PROMPT), len(answer))
    for seed in range(5):
        logits = logits_of(seed)
        scores = torch.tensor(logits.astype(np.float64))[None]
        for step in steps:
            scores = step(torch.tensor([PROMPT + answer]), scores)
        expected = torch.softmax(scores, -1)[0].numpy()
        one = after(sampler(**fields), answer)
        ids, weights = candidates(one.adjusted(logits), one.params)
        found = np.zeros(VOCAB)
        found[ids] = weights / weights.sum()
        assert np.array_equal(np.flatnonzero(found), np.flatnonzero(expected))
        np.testing.assert_allclose(found, expected, rtol=2e-6)  # logits go through float32 once more here


def processors(fields, prompt_length, answer_length):
    import transformers as t

    steps = []
    if "logit_bias" in fields:
        bias = {(k,): -float("inf") if v == -100 else v for k, v in fields["logit_bias"].items()}
        steps.append(t.SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in fields:
        steps.append(t.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    if "min_tokens" in fields:
        ends = [END, *fields["stop_token_ids"]]
        steps.append(t.MinNewTokensLengthLogitsProcessor(prompt_length, fields["min_tokens"], ends))
    steps.append(t.TemperatureLogitsWarper(fields["temperature"]))
    if "min_p" in fields:
        steps.append(t.MinPLogitsWarper(fields["min_p"]))
    if "top_k" in fields:
        steps.append(t.TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        steps.append(t.TopPLogitsWarper(fields["top_p"]))
    return steps
