"""Every bad value is one line that starts with the field's name; 0 is a value, not an absence."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from qkv.engine.params import SamplingParams
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
        ("logit_bias", {"5": 1}),
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
    if (field, type(value)) in [("stop", str), ("json_schema", str), ("regex", str), ("grammar", str)]:
        return  # these are looked at when the request is made
    with pytest.raises(ParameterError, match=rf"^{field}") as error:
        SamplingParams(**{field: value})
    assert len(str(error.value)) < 250


def test_a_token_id_of_any_size_can_be_shown():
    for field in ("stop_token_ids", "logit_bias"):
        with pytest.raises(ParameterError, match=rf"^{field}: "):
            SamplingParams(**{field: {10**5000: 1} if field == "logit_bias" else [10**5000]}).check_for(100)
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
    SamplingParams(stop_token_ids=[99], logit_bias={0: 1.0}).check_for(100)
    with pytest.raises(ParameterError, match=r"^stop_token_ids: 1000000 .* 0 to 99$"):
        SamplingParams(stop_token_ids=[3, 10**6]).check_for(100)
    with pytest.raises(ParameterError, match=r"^logit_bias: 100 .* 0 to 99$"):
        SamplingParams(logit_bias={100: -100}).check_for(100)


def test_fields_that_exclude_each_other():
    with pytest.raises(ParameterError, match=r"^regex cannot .* json_schema$"):
        SamplingParams(json_schema={}, regex="a")
    with pytest.raises(ParameterError, match=r"^min_tokens is 6, more than max_tokens \(5\)$"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_logprobs_go_up_to_20_and_a_schema_may_be_false():
    assert SamplingParams(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert SamplingParams(json_schema=False).json_schema is False


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
