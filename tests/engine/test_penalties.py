"""Penalties and logit_bias against transformers, and against the formulas that the others state."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.engine.params import SamplingParams
from qkv.engine.penalties import Counts, Penalties

VOCAB = 300


def logits_of(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 5).astype(np.float32)


def penalized(logits, prompt, answer, **fields) -> np.ndarray:
    penalties = Penalties(SamplingParams(**fields), prompt)
    for token in answer:
        penalties.count(token)
    row = logits.copy()
    penalties.apply(row)
    return row


def test_counts_grow_as_they_are_fed():
    rng = np.random.default_rng(1)
    first, later = rng.integers(0, 500, 300).tolist(), rng.integers(0, 500, 700).tolist()
    counts = Counts(first)
    for token in later:
        counts.add(token)
    expected = np.bincount(first + later)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: count for token, count in enumerate(expected) if count
    }
    assert len(Counts().ids) == 0


def test_repetition_sees_prompt_and_answer_the_others_the_answer_only():
    logits = np.array([2, -2, 2, -2, 2], np.float32)
    prompt, answer = [0, 0, 1], [2, 2, 3]
    assert penalized(logits, prompt, answer, repetition_penalty=2.0).tolist() == [1, -4, 1, -4, 2]
    assert penalized(logits, prompt, answer, presence_penalty=0.5).tolist() == [2, -2, 1.5, -2.5, 2]
    assert penalized(logits, prompt, answer, frequency_penalty=0.5).tolist() == [2, -2, 1, -2.5, 2]


@pytest.mark.parametrize("presence", [0.0, 1.5, -2.0])
@pytest.mark.parametrize("frequency", [0.0, 0.25, -1.0])
@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.5])
def test_all_together_in_the_stated_order(presence, frequency, repetition):
    """OpenAI's formula for the last two (logit − count · frequency − [count > 0] · presence), after the first."""
    rng = np.random.default_rng(3)
    prompt, answer = rng.integers(0, VOCAB, 50).tolist(), rng.integers(0, VOCAB, 80).tolist()
    bias = {7: 3.5, 9: -100, 11: 100, 13: -99.5, answer[0]: -8.0}
    logits = logits_of(4)
    expected = logits.astype(np.float64)
    for token, added in bias.items():
        expected[token] = -np.inf if added == -100 else expected[token] + added
    for token in {*prompt, *answer}:
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(answer):
        expected[token] -= answer.count(token) * frequency + presence
    found = penalized(
        logits,
        prompt,
        answer,
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    untouched = [token for token in range(VOCAB) if token not in {*prompt, *answer, *bias}]
    assert np.array_equal(found[untouched], logits[untouched])


@pytest.mark.parametrize(
    "fields", [{}, {"repetition_penalty": 1}, {"repetition_penalty": 1.0, "presence_penalty": 0.0}]
)
def test_nothing_asked_for_is_nothing_done(fields):
    assert not Penalties(SamplingParams(**fields), [1, 2]).active


@pytest.mark.oracle
@pytest.mark.parametrize("penalty", [1.1, 2.0, 0.5])
def test_repetition_equals_transformers(penalty):
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(5)
    prompt, answer = rng.integers(0, VOCAB, 40).tolist(), rng.integers(0, VOCAB, 30).tolist()
    logits = logits_of(6)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), torch.tensor(logits.astype(np.float64))[None]
    )
    found = penalized(logits, prompt, answer, repetition_penalty=penalty)
    assert np.array_equal(found, expected[0].numpy().astype(np.float32))


@pytest.mark.oracle
def test_bias_equals_transformers():
    torch = pytest.importorskip("torch")
    from transformers import SequenceBiasLogitsProcessor

    bias = {3: 4.5, 70: -30.0, 299: 100.0, 5: -100.0}
    logits = logits_of(7)
    theirs = {(token,): -float("inf") if added == -100 else added for token, added in bias.items()}
    expected = SequenceBiasLogitsProcessor(theirs)(
        torch.tensor([[1, 2]]), torch.tensor(logits.astype(np.float64))[None]
    )
    assert np.array_equal(penalized(logits, [1, 2], [], logit_bias=bias), expected[0].numpy().astype(np.float32))
