"""Blocks that describe RoPE: what each form means, and every thing that is refused, by its name."""

from __future__ import annotations

import math

import pytest

from qkv.errors import ModelFileError
from qkv.model.keys import Keys
from qkv.model.rope import Divisors, LinearScaling, Llama3Scaling, YarnScaling, yarn_attention_factor
from qkv.model.rope_config import RopeConfig, rope_from_gguf, rope_from_hf

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(block=None, *, name="rope_scaling", positions=32768, **config) -> RopeConfig:
    return rope_from_hf(Keys({"rope_theta": 1e6, name: block, **config}, "config.json"), positions)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_each_type_in_both_blocks(name):
    assert read(LLAMA3, name=name, positions=131072) == RopeConfig(1e6, Llama3Scaling(32.0, 1.0, 4.0, 8192), 131072)
    assert read(YARN, name=name) == RopeConfig(1e6, YarnScaling(4.0, 32768, 0.1 * math.log(4) + 1), 131072)
    assert read({"type": "linear", "factor": 2}, name=name).scaling == LinearScaling(2.0)
    for plain in (None, {}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": None}):
        assert read(plain, name=name) == RopeConfig(1e6, None, 32768)


def test_theta_of_the_block_counts_first():
    assert read({"rope_theta": 5e5, "rope_type": "default"}).theta == 5e5
    keys = Keys({}, "config.json")
    assert rope_from_hf(keys, 64).theta == 10000.0
    assert keys.assumed == ["rope_theta is missing; using 10000.0"]


def test_the_limit_is_the_scaled_one():
    """`max_position_embeddings` may be the length before scaling or after it."""
    assert read(YARN, positions=32768).positions == 131072
    assert read(YARN, positions=131072).positions == 131072
    assert read({"type": "linear", "factor": 4.0}, positions=4096).positions == 16384
    assert read(LLAMA3, positions=131072).positions == 131072


def test_the_original_length():
    without = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    assert read(without, positions=2048).scaling == YarnScaling(4.0, 2048, yarn_attention_factor(4.0))
    outside = read(YARN, original_max_position_embeddings=512)  # transformers prefers the one outside
    assert outside.scaling == YarnScaling(4.0, 512, yarn_attention_factor(4.0))


def test_yarns_other_keys():
    more = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5, "finetuned": True}
    assert read({**YARN, **more}).scaling == YarnScaling(4.0, 32768, 1.5, 16.0, 2.0, False)
    scaled = read({**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}).scaling
    assert scaled.attention_factor == (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert read({**YARN, "mscale": 0.7}).scaling == read(YARN).scaling  # as in transformers: both or neither


def test_two_blocks_must_agree():
    new = {"rope_theta": 1e6, **YARN, "rope_type": "yarn"}
    assert read(YARN, rope_parameters=new) == read(YARN)
    for other in ({"rope_type": "default"}, {**new, "factor": 2.0}):
        with pytest.raises(ModelFileError, match="rope_parameters and rope_scaling disagree"):
            read(YARN, rope_parameters=other)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", "banana", "", 5, ["yarn"]])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_types_are_refused_by_name(kind, key):
    with pytest.raises(ModelFileError) as caught:
        read({key: kind, "factor": 2.0, "mrope_section": [1, 2]})
    assert str(caught.value) == f"config.json: rope_scaling.{key} {kind!r} is not supported"


REFUSED = [
    ({"type": "linear"}, "the key 'rope_scaling.factor' is missing"),
    ({"type": "linear", "factor": 0}, "rope_scaling.factor must be a number from 1 to 10000"),
    ({"type": "linear", "factor": "2"}, "rope_scaling.factor must be"),
    ({"type": "linear", "factor": 1e300}, "rope_scaling.factor must be"),
    ({"type": "linear", "factor": 9999}, "makes more than 16,777,216"),
    (
        {"type": "linear", "factor": 2, "beta_fast": 1},
        "rope_scaling.beta_fast is not supported for RoPE of type 'linear'",
    ),
    ({"type": "default", "factor": 2}, "rope_scaling.factor is not supported for RoPE of type 'default'"),
    ({"full_attention": {"rope_theta": 1e4}}, "rope_scaling.full_attention is not supported"),
    ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "rope_scaling.mrope_section is not supported"),
    ({"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor 0.5 is not supported"),
    ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor must be larger than low_freq_factor"),
    ({**LLAMA3, "high_freq_factor": None}, "the key 'rope_scaling.high_freq_factor' is missing"),
    ({**YARN, "beta_fast": 1}, "rope_scaling.beta_fast must be larger than beta_slow"),
    ({**YARN, "attention_factor": -1}, "rope_scaling.attention_factor must be"),
    ({**YARN, "mscale": "x", "mscale_all_dim": 1}, "rope_scaling.mscale must be"),
    ({**YARN, "truncate": "no"}, "rope_scaling.truncate must be true or false"),
    ({**YARN, "original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings must be"),
    ({"rope_theta": 0.5}, "rope_scaling.rope_theta must be a number from 2"),
    ({"a\nb": 1}, r"'rope_scaling.a\nb' is not supported"),
    ({"x" * 100_000: 1}, "xxx... is not supported"),
    ([1], "rope_scaling must be an object"),
    ("yarn", "rope_scaling must be an object"),
]


@pytest.mark.parametrize(("block", "because"), REFUSED)
def test_what_a_block_cannot_be(block, because):
    with pytest.raises(ModelFileError) as caught:
        read(block)
    assert because in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_part_of_the_head_rotated_is_refused():
    with pytest.raises(ModelFileError, match=r"partial_rotary_factor 0\.5 is not supported"):
        read(None, partial_rotary_factor=0.5)
    assert read(None, partial_rotary_factor=1.0).scaling is None


# ------------------------------------------------------------------------------------------ GGUF


def read_gguf(divisors=None, *, positions=4096, **changes) -> RopeConfig:
    values = {"llama." + key.replace("__", "."): value for key, value in changes.items()}
    return rope_from_gguf(Keys({"llama.rope.freq_base": 1e4, **values}, "x.gguf", "llama."), positions, divisors)


def test_gguf_scaling():
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    original = {"rope__scaling__original_context_length": 1024}
    assert read_gguf(**scaling, **original) == RopeConfig(1e4, YarnScaling(4.0, 1024, yarn_attention_factor(4.0)), 4096)
    assert read_gguf(**scaling).positions == 4 * 4096
    more = {"rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0}
    more |= {"rope__scaling__attn_factor": 0.5, "rope__scaling__yarn_attn_factor": 3.0}
    more |= {"rope__scaling__yarn_ext_factor": 1.0, "rope__scaling__finetuned": True}
    expected = YarnScaling(4.0, 1024, 1.5 * yarn_attention_factor(4.0), 16.0, 2.0)
    assert read_gguf(**scaling, **original, **more).scaling == expected
    for linear in (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
        {"rope__scaling__factor": 2.0},
        {"rope__scale_linear": 2.0},
    ):
        assert read_gguf(**linear).scaling == LinearScaling(2.0)
    for plain in ({}, {"rope__scaling__type": "none", "rope__scaling__factor": 2.0}, {"rope__scaling__factor": 0.0}):
        assert read_gguf(**plain) == RopeConfig(1e4, None, 4096)
    assert read_gguf((1.0, 8.0)).scaling == Divisors((1.0, 8.0))


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"rope__scaling__type": 7}, "llama.rope.scaling.type 7 is not supported"),
        ({"rope__scaling__factor": 0.5}, "llama.rope.scaling.factor must be"),
        ({"rope__scaling__factor": "x"}, "llama.rope.scaling.factor must be"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1 is not supported"),
        ({"rope__scaling__attn_factor": 1.2}, "an attention factor for RoPE scaling 'none' is not supported"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_ext_factor": 0.5},
            "yarn_ext_factor 0.5 is not supported",
        ),
    ],
)
def test_gguf_scaling_that_is_refused(changes, because):
    with pytest.raises(ModelFileError) as caught:
        read_gguf(**changes)
    assert because in str(caught.value)


def test_gguf_divisors_beside_scaling_are_refused():
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight beside RoPE scaling 'linear'"):
        read_gguf((1.0, 2.0), rope__scaling__factor=2.0)
