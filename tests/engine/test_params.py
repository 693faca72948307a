"""Every bad value is one line that starts with the field's name; 0 is a value, not an absence."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from qkv.engine.params import SamplingParams
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import ParameterError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("min_p", 1.5),
        ("min_p", -1),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_k", 1.5),
        ("top_k", -2),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 7),
        ("stop", ["x"] * 65),
        ("ignore_eos", 1),
        ("end_repetition", 1),
        ("end_repetition", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.1),
        ("repetition_penalty", 101),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", 2.1),
        ("presence_penalty", None),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", True),
        ("logit_bias", {5: 100.1}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: True}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {"5": 1, 5: 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"٥": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", [(5, 1)]),
        ("logit_bias", None),
        ("n", 0),
        ("n", 129),
        ("n", None),
        ("n", True),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("logprobs", 1),
        ("prompt_logprobs", 5),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", 10**9),
        ("top_logprobs", True),
        ("top_logprobs", 5),  # without logprobs
        ("thinking_budget", -1),
        ("thinking_budget", 1.5),
        ("json_schema", 5),
        ("json_schema", ["a"]),
        ("regex", ""),
        ("regex", 5),
        ("grammar", b"start: x"),
        ("choices", []),
        ("choices", "yes"),
        ("choices", ["yes", ""]),
        ("choices", ["yes", 1]),
        ("temperature", np.float32("nan")),
        ("temperature", np.bool_(True)),
        ("temperature", np.array([0.5])),
        ("max_tokens", np.bool_(True)),
        ("max_tokens", np.float64(2)),
        ("max_tokens", np.array([5])),
        ("n", np.int64(129)),
        ("stop_token_ids", [np.float32(1)]),
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(field)
    assert "\n" not in str(error.value)


class Shy:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("value", [10**5000, "x" * 10**6, [[1] * 10**5] * 3, Shy()], ids=["int", "str", "list", "shy"])
@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_messages_are_short_whatever_the_value(field, value):
    text, large = ("stop", "json_schema", "regex", "grammar"), ("max_tokens", "top_k", "thinking_budget")
    if (type(value) is str and field in text) or (type(value) is int and field in large):
        return  # texts are looked at when the request is made; a number that is large enough means all there are
    with pytest.raises(ParameterError, match=rf"^{field}") as error:
        SamplingParams(**{field: value})
    assert len(str(error.value)) < 250


def test_a_token_id_of_any_size_can_be_shown():
    with pytest.raises(ParameterError, match=r"^prompt: "):
        Vocabulary(100).check("prompt", 10**5000)
    with pytest.raises(ParameterError, match=r"^logit_bias of token "):
        SamplingParams(logit_bias={10**5000: 101})


def test_zero_is_a_value():
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, seed=9)
    params = SamplingParams(temperature=0, top_p=0, top_k=0, min_p=0, seed=0).with_defaults(defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 0, 0, 0, 0)
    assert SamplingParams(top_k=5).with_defaults(defaults) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=5, min_p=0.1, seed=9
    )


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="###").stop == ("###",)


def test_ids_beyond_the_vocabulary_are_found_before_anything_runs():
    vocabulary = Vocabulary(100, unused=[7, 200])
    assert [vocabulary.check("prompt", id) for id in (0, 6, 8, np.uint8(99))] == [0, 6, 8, 99]
    with pytest.raises(ParameterError, match=r"^stop_token_ids: 1000000 .* 0 to 99$"):
        vocabulary.check("stop_token_ids", 10**6)
    for id in (7, 100, 200, -1, 1.0, True, "5", None):
        with pytest.raises(ParameterError, match=rf"^prompt: {id!r} is not a token id"):
            vocabulary.check("prompt", id)


def test_fields_that_exclude_each_other():
    with pytest.raises(ParameterError, match=r"^regex cannot .* json_schema$"):
        SamplingParams(json_schema={}, regex="a")
    with pytest.raises(ParameterError, match=r"^min_tokens is 6, more than max_tokens \(5\)$"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_logprobs_go_up_to_20_and_a_schema_may_be_false():
    assert SamplingParams(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert SamplingParams(json_schema=False).json_schema is False


NUMERIC = {
    "temperature": 0.5,
    "min_p": 0.25,
    "top_p": 0.5,
    "repetition_penalty": 2,
    "presence_penalty": -1.5,
    "frequency_penalty": 1,
    "top_k": 7,
    "seed": 9,
    "n": 2,
    "max_tokens": 9,
    "min_tokens": 3,
    "thinking_budget": 4,
}


@pytest.mark.parametrize("field", NUMERIC)
def test_numpys_numbers_are_numbers(field):
    """Of every type, and without dimensions; what the request holds is Python's own."""
    value = NUMERIC[field]
    kinds = [np.float16, np.float32, np.float64, np.longdouble] if field in list(NUMERIC)[:6] else []
    kinds += [np.int8, np.uint64, np.int64] if value == int(value) and value > 0 else []
    for given in [kind(value) for kind in kinds] + [np.array(kind(value)) for kind in kinds]:
        held = getattr(SamplingParams(**{field: given}), field)
        assert held == value
        assert type(held) in (int, float)


def test_numpys_numbers_in_lists():
    params = SamplingParams(
        logit_bias={np.int32(5): np.float32(1.5)},
        stop_token_ids=np.array([3, 4]),
        logprobs=True,
        top_logprobs=np.int8(2),
    )
    assert (params.logit_bias, params.stop_token_ids, params.top_logprobs) == ({5: 1.5}, (3, 4), 2)
    assert {type(held) for held in (*params.logit_bias, *params.stop_token_ids, params.top_logprobs)} == {int}


def test_a_bias_may_have_the_keys_that_json_has():
    assert SamplingParams(logit_bias={"5": -100, 6: 1}).logit_bias == {5: -100.0, 6: 1.0}


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "thinking_budget"])
def test_a_number_of_any_size_means_all_there_are(field):
    for value in (2**31, 10**18, 10**5000):
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize("field", ["stop", "regex", "grammar", "choices", "json_schema"])
def test_half_a_character_is_no_text(field):
    bad = 'a"\ud800'
    with pytest.raises(ParameterError, match=rf"^{field}: half a character .*ud800.* at position 2; "):
        SamplingParams(**{field: [bad] if field == "choices" else bad})


def test_what_was_given_can_change_afterwards_without_changing_the_request():
    bias, stops = {3: 5}, [7, 8, 7]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[3], stops[0] = 50, 50
    assert params.logit_bias == {3: 5.0} and params.stop_token_ids == (7, 8)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(7, 8)))
    assert params != SamplingParams(stop_token_ids=(7, 8))


def test_the_tokens_that_end_an_answer():
    assert SamplingParams(stop_token_ids=[7]).ending_ids([1, 2]) == {1, 2, 7}
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).ending_ids([1, 2]) == {7}


def test_the_book_has_a_row_for_every_field():
    page = Path(__file__).resolve().parents[2] / "docs/09-sampling.md"
    table = page.read_text(encoding="utf-8").partition("| field of `SamplingParams` |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(field.name for field in fields(SamplingParams))
