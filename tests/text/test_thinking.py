"""Thinking and answer are told apart by id, starting from the prompt's end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.text.answer.thinking import NewlineTrim, ThinkingSplit

OPEN, CLOSE, END, A, B = 7, 8, 9, 1, 2


def kinds(prompt, ids, *, open_id=OPEN, close_id=CLOSE, turns=(END,)):
    split = ThinkingSplit(open_id, close_id, prompt, turns)
    return [event[0][0] if event else "-" for event in map(split.push, ids)]


@pytest.mark.parametrize(
    ("prompt", "ids", "expected"),
    [
        ([A], [A, B], "cc"),  # a model that answers at once
        ([A], [OPEN, A, CLOSE, B], "-t-c"),  # it opens thinking itself
        ([A, OPEN, B], [A, CLOSE, B], "t-c"),  # the prompt opened it
        ([A, OPEN, B], [A, B], "tt"),  # cut off while thinking
        ([OPEN, A, CLOSE, B], [A], "c"),  # thinking turned off: the prompt holds a closed block
        ([OPEN, A, END, B], [A], "c"),  # a block left open in an earlier turn
        ([A], [CLOSE, A], "-c"),  # a stray closing marker
        ([A], [A, CLOSE, B], "ccc"),  # it closes what was never open
        ([A, OPEN], [OPEN, A, CLOSE, B], "-t-c"),  # it opens again what the prompt opened
        ([], [OPEN, A, CLOSE, B, OPEN, A, CLOSE, B], "-t-ccccc"),  # thinking is the first pair only
        ([], [OPEN, OPEN, A, CLOSE, CLOSE, B], "-tt-cc"),
        ([OPEN, CLOSE], [CLOSE, A, OPEN, B], "cccc"),
    ],
)
def test_the_kind_of_each_id(prompt, ids, expected):
    assert kinds(prompt, ids) == list(expected)


@pytest.mark.parametrize(("open_id", "close_id"), [(None, None), (OPEN, None), (None, CLOSE)])
def test_without_both_markers_everything_is_content(open_id, close_id):
    assert kinds([OPEN], [OPEN, A, CLOSE], open_id=open_id, close_id=close_id) == list("ccc")


@given(st.lists(st.sampled_from([OPEN, CLOSE, END, A, B])), st.lists(st.sampled_from([OPEN, CLOSE, A, B])))
def test_one_pair_of_markers_vanishes_and_every_other_id_comes_out_once(prompt, ids):
    split = ThinkingSplit(OPEN, CLOSE, prompt, (END,))
    events = list(map(split.push, ids))
    dropped = [id for id, event in zip(ids, events, strict=True) if event is None]
    assert dropped in ([], [OPEN], [CLOSE], [OPEN, CLOSE])
    assert all(event[1] == id for id, event in zip(ids, events, strict=True) if event)
    assert re.fullmatch("c*t*c*", "".join(event[0][0] for event in events if event))


@given(st.lists(st.text("\na ", max_size=5)))
def test_trimming_a_stream_is_stripping_the_whole(pieces):
    both, left = NewlineTrim(both=True), NewlineTrim(both=False)
    assert "".join(map(both.push, pieces)) == "".join(pieces).strip("\n")
    assert "".join(map(left.push, pieces)) == "".join(pieces).lstrip("\n")
