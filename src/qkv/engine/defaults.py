"""The sampling a model's makers recommend, for requests that do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qkv.engine.params import SamplingParams
from qkv.errors import ModelFileError, ParameterError

GREEDY = SamplingParams(temperature=0)
QWEN3_THINKING = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
QWEN3_NOT_THINKING = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)

_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def model_defaults(architecture: str, generation_config: Mapping[str, Any], *, thinking: bool) -> SamplingParams:
    """What `generation_config.json` says; a Qwen3 without one gets Qwen's published values, other models greedy.

    Its repetition_penalty counts beside any of these. Raises `ModelFileError` for a value that cannot be.
    """
    try:
        base = _how_to_draw(architecture, generation_config, thinking=thinking)
        return replace(base, repetition_penalty=generation_config.get("repetition_penalty"))
    except ParameterError as error:
        raise ModelFileError(f"generation_config.json: {error}") from None


def _how_to_draw(architecture: str, generation_config: Mapping[str, Any], *, thinking: bool) -> SamplingParams:
    stated = {name: generation_config[name] for name in _FIELDS if generation_config.get(name) is not None}
    sampling = generation_config.get("do_sample", bool(stated) or None)
    if sampling is None:
        if architecture != "qwen3":
            return GREEDY
        return QWEN3_THINKING if thinking else QWEN3_NOT_THINKING
    if not sampling:
        return GREEDY
    return SamplingParams(**{"temperature": 1.0, **stated})
