"""An answer that only repeats itself is ended; anything that people want is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scripted_model import ScriptedModel, by_hand, run_all

from qkv.engine.params import SamplingParams
from qkv.engine.repetition import FEWEST_TIMES, FEWEST_TOKENS, LONGEST_PERIOD, Repetition

ROOT = Path(__file__).resolve().parents[2]


def ended_at(ids) -> int | None:
    """After how many tokens it is found, if it is."""
    watch = Repetition()
    return next((at for at, id in enumerate(ids, 1) if watch.push(id)), None)


def by_definition(ids: list[int]) -> bool:
    """Whether the end of these tokens is one short sequence, for long enough."""
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(FEWEST_TOKENS, FEWEST_TIMES * period)
        tail = ids[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


@pytest.mark.parametrize("before", [0, 1, 700])
@pytest.mark.parametrize("period", range(1, LONGEST_PERIOD + 1))
def test_loops_of_every_period_end(period, before):
    start = np.random.default_rng(before).integers(1000, 2000, before).tolist()
    ids = [*start, *(list(range(period)) * 2000)]
    assert ended_at(ids) == before + max(FEWEST_TOKENS, FEWEST_TIMES * period)


def test_longer_periods_and_broken_loops_go_on():
    assert ended_at(list(range(LONGEST_PERIOD + 1)) * 100) is None
    broken = [i % 7 if i % 500 else 99 for i in range(5000)]
    assert ended_at(broken) is None


def test_it_is_what_the_definition_says():
    """On texts that begin and leave loops at random."""
    random = np.random.default_rng(0)
    ids: list[int] = []
    for _ in range(12):
        ids += random.integers(0, 3, int(random.integers(1, 80))).tolist()
        period = int(random.integers(1, 70))
        ids += ids[-period:] * int(random.integers(1, 40))
    watch = Repetition()
    found = [watch.push(id) for id in ids]
    assert found == [by_definition(ids[:end]) for end in range(1, len(ids) + 1)]
    assert any(found) and not all(found[600:])


TABLE = "| name | size | price |\n|---|---|---|\n" + "".join(f"| item {i} | 10 | 0.00 |\n" for i in range(500))
MATRIX = json.dumps(np.eye(40, dtype=int).tolist())
CODE = "".join(f"    if x == {i}:\n        return 0\n" for i in range(300))
LIST = "".join(f"{i}. yes\n" for i in range(500))


@pytest.mark.parametrize("wanted", [TABLE, MATRIX, CODE, LIST, "ha " * 200, "-" * 400, "\n\n" * 100, "0, " * 160])
def test_what_people_ask_for_goes_on(wanted):
    """A character or a word a token: what a vocabulary makes of it lies between."""
    assert ended_at(wanted.encode()[: FEWEST_TOKENS - 1]) is None or len(set(wanted)) > 4
    for tokens in (wanted.split(" "), wanted.splitlines(keepends=True)):
        assert ended_at([hash(token) for token in tokens]) is None
    if len(set(wanted)) > 4:
        assert ended_at(wanted.encode()) is None


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("docs/zh/*.md")), ids=lambda p: p.name
)
def test_real_text_goes_on(path):
    """The book: prose, tables and code, a byte a token and a word a token."""
    text = path.read_bytes()
    assert ended_at(text) is None
    assert ended_at([hash(word) for word in text.split()]) is None


@pytest.mark.parametrize(("end", "reason"), [(True, "repetition"), (False, "length")])
def test_the_engine_says_so(monkeypatch, end, reason):
    """Only when it is asked to; the tokens so far are kept."""
    model = ScriptedModel()
    monkeypatch.setattr("scripted_model.logits_after", lambda ids: np.eye(50, dtype=np.float32)[len(ids) % 5])
    engine = by_hand(model, context=900)
    handle = engine.submit([1, 2, 3], SamplingParams(temperature=0, seed=0, end_repetition=end))
    run_all(engine)
    (answer,) = handle.wait()
    assert answer.finish_reason == reason
    assert len(answer.token_ids) == (FEWEST_TOKENS if end else 897)
