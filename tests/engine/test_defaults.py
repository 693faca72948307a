"""Where a request is silent, the model's own recommendation counts."""

from __future__ import annotations

import pytest

from qkv.engine.params import SamplingParams, model_defaults
from qkv.errors import ModelFileError
from qkv.model.families import ARCHITECTURES


@pytest.mark.parametrize(
    ("architecture", "config", "thinking", "expected"),
    [
        ("qwen3", {}, True, SamplingParams(temperature=0.6, top_p=0.95, top_k=20)),
        ("qwen3", {}, False, SamplingParams(temperature=0.7, top_p=0.8, top_k=20)),
        ("llama", {}, True, SamplingParams(temperature=0)),
        ("llama", {"eos_token_id": 2}, True, SamplingParams(temperature=0)),
        ("qwen3", {"do_sample": False, "temperature": 0.6}, True, SamplingParams(temperature=0)),
        ("llama", {"do_sample": True}, True, SamplingParams(temperature=1.0)),
        ("qwen3", {"temperature": 0.5, "top_k": 0}, False, SamplingParams(temperature=0.5, top_k=0)),
        (
            "qwen2",
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
            False,
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1),
        ),
        ("llama", {"repetition_penalty": 1.2}, False, SamplingParams(temperature=0, repetition_penalty=1.2)),
        (
            "qwen3",
            {"repetition_penalty": 1.05},
            False,
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        ),
    ],
)
def test_defaults(architecture, config, thinking, expected):
    assert model_defaults(ARCHITECTURES[architecture], config, thinking=thinking) == expected


def test_an_impossible_recommendation_names_the_file():
    with pytest.raises(ModelFileError, match=r"generation_config.json: top_p"):
        model_defaults(ARCHITECTURES["qwen3"], {"top_p": 7}, thinking=True)
    with pytest.raises(ModelFileError, match=r"generation_config.json: repetition_penalty"):
        model_defaults(ARCHITECTURES["qwen3"], {"repetition_penalty": -1}, thinking=True)
