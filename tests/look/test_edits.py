"""Edits of requests: against the reference with the same changes, in float64, and beside requests without any."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import tinyllm
from decoders import dequantized, packed
from hooked import Hooked
from qkv import SamplingParams
from qkv.errors import ParameterError
from qkv.look import add, replace, silence
from tinyllm import HELLO, opened, write_model

IDS = [(7 * i * i + 3) % 250 for i in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RNG = np.random.default_rng(3)
VECTOR, MEAN = RNG.standard_normal(64).astype(np.float32), RNG.standard_normal((2, 32)).astype(np.float32)
PATCH = RNG.standard_normal((6, 32)).astype(np.float32)
STRONG = [silence("blocks.0.attn.hook_z"), add("blocks.1.hook_resid_post", VECTOR, 30)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with opened(write_model(tmp_path_factory.mktemp("model") / "tiny"), cache="f32") as made:
        yield made


def silenced(x):
    x[:, [0, 3]] = 0


def averaged(x):
    x[:, [2, 1]] = MEAN


def patched(x):
    x[4:10, 1] = PATCH


def added_at_one(x):
    x[9] -= 2 * VECTOR


def added_from(x):
    x[9:] += VECTOR


CASES = [
    ("blocks.1.attn.hook_z", lambda at: silence(at, heads=[0, -1]), silenced),
    ("blocks.0.attn.hook_z", lambda at: replace(at, MEAN, heads=[2, 1]), averaged),
    ("blocks.0.attn.hook_z", lambda at: replace(at, PATCH, heads=1, positions=(4, 10)), patched),
    ("blocks.1.hook_resid_pre", lambda at: add(at, VECTOR, -2, positions=9), added_at_one),
    ("blocks.0.hook_resid_post", lambda at: add(at, VECTOR, positions=(9, None)), added_from),
    ("blocks.0.hook_resid_mid", lambda at: add(at, VECTOR.tolist(), positions=(9, None)), added_from),
]


@pytest.mark.parametrize(("point", "edit", "same"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_an_edit_is_what_the_same_change_of_the_reference_is(llm, point, edit, same):
    look = llm.look(IDS, edit=edit(point))
    tensors = tinyllm.tensors()
    reference = Hooked(llm.config, dequantized(llm.config, packed(llm.config, tensors, "f32"), tensors), np.float64)
    before = reference.run(IDS)[0]
    # The stream after a layer is the one before the next: the reference names it so.
    named = point.replace("0.hook_resid_post", "1.hook_resid_pre")

    def change(name, array):
        if name == named:
            array = array.copy()
            same(array)
        return array

    reference.change = change
    logits, seen = reference.run(IDS)
    assert np.abs(look.logit_lens(-1) - logits[-1]).max() < 1e-4
    assert np.abs(look.z(1) - seen["blocks.1.attn.hook_z"]).max() < 1e-4
    assert np.abs(logits - before).max() > 1e-2


def test_patching_another_runs_outputs_gives_that_runs_numbers(llm):
    """All heads of the last layer and the stream before it are the other run's: so is all that follows, bit for bit."""
    other = llm.look(IDS[::-1])
    patches = [replace("blocks.1.hook_resid_pre", other.resid_pre(1)), replace("blocks.1.attn.hook_z", other.z(1))]
    mixed = llm.look(IDS, edit=patches)
    assert np.array_equal(mixed.resid_post(1), other.resid_post(1))
    assert not np.array_equal(mixed.resid_pre(0), other.resid_pre(0))


def test_requests_without_edits_keep_their_tokens_in_company_and_the_caches_are_not_mixed(llm):
    plain = llm.generate(IDS, GREEDY).token_ids
    edited = llm.generate(IDS, GREEDY, edit=STRONG)
    assert edited.timings.reused_tokens == 0  # its first 64 tokens are in the cache, computed without edits
    assert edited.token_ids != plain
    fresh = [(i + 9) % 250 for i in IDS]
    changed = llm.generate(fresh, GREEDY, edit=STRONG).token_ids
    first = llm.generate(fresh, GREEDY)
    assert first.timings.reused_tokens == 0  # nor does it leave any for others
    assert first.token_ids != changed

    async def together():
        return await asyncio.gather(
            *(llm.agenerate(IDS, GREEDY, edit=STRONG if i % 2 else ()) for i in range(6)),
            *(llm.agenerate(fresh, GREEDY, edit=STRONG if i % 2 else ()) for i in range(4)),
        )

    answers = [answer.token_ids for answer in asyncio.run(together())]
    assert answers[:6] == [plain, edited.token_ids] * 3
    assert answers[6:] == [first.token_ids, changed] * 2


def test_every_way_to_ask_takes_edits(llm):
    expected = llm.generate(IDS, GREEDY, edit=STRONG).token_ids
    assert [one.token_ids for one in llm.generate([IDS, IDS], GREEDY, edit=STRONG)] == [expected] * 2
    stream = llm.stream(IDS, GREEDY, edit=STRONG)
    list(stream)
    assert stream.completion.token_ids == expected
    answer = llm.chat(HELLO, GREEDY, edit=STRONG).token_ids
    chat = llm.stream_chat(HELLO, GREEDY, edit=STRONG)
    list(chat)
    assert chat.completion.token_ids == answer != llm.chat(HELLO, GREEDY).token_ids
    two = llm.generate(IDS, SamplingParams(temperature=0, max_tokens=4, n=2), edit=STRONG).choices
    assert [one.token_ids for one in two] == [expected[:4]] * 2


def test_guessed_tokens_are_right_under_edits_too(llm, tmp_path):
    expected = llm.generate(IDS * 2, GREEDY, edit=STRONG).token_ids
    with opened(write_model(tmp_path / "tiny"), cache="f32", speculation="prompt") as guessing:
        assert guessing.generate(IDS * 2, GREEDY, edit=STRONG).token_ids == expected


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (silence("blocks.2.attn.hook_z"), r"edit\[0\]: point: blocks.2.attn.hook_z is of layer 2"),
        (silence("blocks.1.hook_z"), r"edit\[0\]: point: there is no 'blocks.1.hook_z'"),
        (silence("blocks.1.attn.hook_pattern"), r"edit\[0\]: point: there is no"),
        (silence("blocks.1.attn.hook_z", 4), r"edit\[0\]: heads must be a whole number from -4 to 3"),
        (silence("blocks.1.hook_resid_pre"), r"edit\[0\]: heads: blocks.1.hook_resid_pre has none; name blocks.1.attn"),
        ([STRONG[0], add("blocks.1.hook_resid_pre", [1, 2])], r"edit\[1\]: values must have the shape \[64\]"),
        (replace("blocks.1.attn.hook_z", MEAN), r"edit\[0\]: values must have the shape \[4, 32\].* got \[2, 32\]"),
        (replace("blocks.1.attn.hook_z", PATCH, 1, positions=(0, 5)), r"values has 6 positions, and positions names 5"),
        (add("blocks.1.hook_resid_pre", VECTOR, positions=-1), r"edit\[0\]: positions must be one, or a pair"),
        (add("blocks.1.hook_resid_pre", VECTOR, positions=(5, 5)), r"edit\[0\]: positions must be one, or a pair"),
        (add("blocks.1.hook_resid_pre", VECTOR * np.nan), r"edit\[0\]: values has a number that is not finite"),
        (add("blocks.1.hook_resid_pre", "north"), r"edit\[0\]: values must be numbers of shape \[64\]"),
        ("silence", r"edit must be made by qkv.look's silence, replace or add"),
        ([1], r"edit must be made by qkv.look's silence, replace or add"),
    ],
)  # fmt: skip
def test_bad_edits_are_one_line(llm, edit, message):
    with pytest.raises(ParameterError, match=message) as caught:
        llm.generate(IDS, GREEDY, edit=edit)
    assert "\n" not in str(caught.value)


def test_a_bad_scale():
    with pytest.raises(ParameterError, match="scale must be a number"):
        add("blocks.1.hook_resid_pre", VECTOR, "much")
