"""Every bad value is one line that starts with the field's name; 0 is a value, not an absence."""

from __future__ import annotations

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
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(field)
    assert "\n" not in str(error.value)


def test_zero_is_a_value():
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, seed=9)
    params = SamplingParams(temperature=0, top_p=0, top_k=0, min_p=0, seed=0).with_defaults(defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 0, 0, 0, 0)
    assert SamplingParams(top_k=5).with_defaults(defaults) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=5, min_p=0.1, seed=9
    )


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="###").stop == ("###",)
