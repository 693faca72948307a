"""The sampling a model's makers recommend, for requests that do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qkv.engine.params import SamplingParams
from qkv.errors import ModelFileError, ParameterError
from qkv.model.families import Family

GREEDY = SamplingParams(temperature=0)

_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def model_defaults(family: Family, generation_config: Mapping[str, Any], *, thinking: bool) -> SamplingParams:
    """What `generation_config.json` says; without one, what the family's makers published, or else greedy.

    Its repetition_penalty counts beside any of these. Raises `ModelFileError` for a value that cannot be.
    """
    try:
        base = _how_to_draw(family, generation_config, thinking=thinking)
        return replace(base, repetition_penalty=generation_config.get("repetition_penalty"))
    except ParameterError as error:
        raise ModelFileError(f"generation_config.json: {error}") from None


def _how_to_draw(family: Family, generation_config: Mapping[str, Any], *, thinking: bool) -> SamplingParams:
    stated = {name: generation_config[name] for name in _FIELDS if generation_config.get(name) is not None}
    sampling = generation_config.get("do_sample", bool(stated) or None)
    if sampling is None:
        published = family.sampling_when_thinking if thinking else family.sampling
        return SamplingParams(**published) if published else GREEDY
    if not sampling:
        return GREEDY
    return SamplingParams(**{"temperature": 1.0, **stated})
