"""What a request may ask of sampling, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qkv.checks import flag, real, shown, text, whole
from qkv.errors import ModelFileError, ParameterError
from qkv.model.families import Family

MAX_STOPS = 64
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
LARGEST = 2**31 - 1
BANNED = -100
"""The logit_bias that forbids a token outright."""

_STRUCTURES = ("json_schema", "regex", "grammar", "choices")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, when to end, and what to report. None means: as the model's own defaults say.

    Logits go through logit_bias, the three penalties, temperature, min_p, top_k and top_p, in this order.
    Raises `ParameterError`, naming the field, for a value out of range.
    """

    temperature: float | None = None
    """Logits are divided by it; 0 takes the most likely token always (ties: the lowest id)."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the most likely one; 0 is off."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 and -1 are off."""
    top_p: float | None = None
    """Keep the most likely tokens until their probabilities add up to this; at least one; 1 is off."""
    repetition_penalty: float | None = None
    """Logits of tokens seen in the prompt or the answer are divided by it where positive, multiplied where negative; 1
    is off; 0.01 to 100."""
    presence_penalty: float = 0
    """Taken from the logits of tokens that the answer has; -2 to 2."""
    frequency_penalty: float = 0
    """Taken from the logits of tokens that the answer has, once for each time; -2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id → what is added to its logit, -100 to 100; -100 forbids the token, whatever the temperature. Keys
    may be strings, as JSON has them."""
    seed: int | None = None
    """The same seed gives the same text. None draws a new one."""
    n: int = 1
    """How many answers to make of one prompt; they differ, and a seed makes each of them repeatable."""
    max_tokens: int | None = None
    """The most tokens to generate; None, and any larger number, is the room left in the context."""
    min_tokens: int = 0
    """No end token and none of `stop_token_ids` is chosen before there are this many tokens."""
    stop: str | Sequence[str] = ()
    """The text ends before the first of these."""
    stop_token_ids: Collection[int] = ()
    """Tokens that end the answer, beside the model's own end tokens; not part of the text."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens (not past `stop_token_ids`)."""
    end_repetition: bool = False
    """End an answer that only repeats itself (see `engine/repetition.py` for how long), with reason "repetition"."""
    logprobs: bool = False
    """Report each chosen token's log-probability: natural, of the model's own distribution over the tokens of its
    vocabulary (rows of the head that no token has don't count), before any field here."""
    top_logprobs: int = 0
    """Also report that many of the likeliest tokens at each place, 0 to 20; needs `logprobs`."""
    prompt_logprobs: bool = False
    """Report the log-probability of each of the prompt's tokens."""
    thinking_budget: int | None = None
    """Close the thinking after this many tokens; None leaves its length to the model."""
    json_schema: Mapping[str, Any] | bool | str | None = field(default=None, hash=False)
    """The answer is JSON that this schema (an object, a truth value, or its JSON text) allows."""
    regex: str | None = None
    """The answer matches this regular expression as a whole."""
    grammar: str | None = None
    """The answer is a sentence of this Lark grammar."""
    choices: Sequence[str] | None = None
    """The answer is one of these strings."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: flag(name, getattr(self, name)) for name in _FLAGS}
        for name, numbers in _NUMBERS.items():
            if self._is_set(name):
                checked[name] = real(name, getattr(self, name), *numbers)
        for name, integers in _WHOLE.items():
            if self._is_set(name):
                checked[name] = whole(name, getattr(self, name), *integers)
        checked["stop"] = _checked_stops(self.stop)
        checked["stop_token_ids"] = _checked_ids(self.stop_token_ids)
        checked["logit_bias"] = _checked_bias(self.logit_bias)
        if self.choices is not None:
            checked["choices"] = _checked_choices(self.choices)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.top_logprobs and not self.logprobs:
            raise ParameterError(f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        _check_structure(self)

    def _is_set(self, name: str) -> bool:
        """Whether a field is to be checked: it is not None, or None is no value of it."""
        return getattr(self, name) is not None or name not in _NONE_IS_DEFAULT

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill every field that is None from `defaults`. A field that is set stays, 0 included."""
        missing: dict[str, Any] = {
            field.name: getattr(defaults, field.name) for field in fields(self) if getattr(self, field.name) is None
        }
        return replace(self, **missing)

    def ending_ids(self, end_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end this request's answers, of a model with these end tokens."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else end_ids)


_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "min_p": (0, 1),
    "top_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_WHOLE: dict[str, tuple[int, int | None]] = {
    "top_k": (-1, None),
    "seed": (0, MAX_SEED),
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, None),
    "min_tokens": (0, LARGEST),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "thinking_budget": (0, None),
}
"""Where there is no upper limit, clients send large numbers to mean "all"."""
_FLAGS = ("ignore_eos", "end_repetition", "logprobs", "prompt_logprobs")
_NONE_IS_DEFAULT = {f.name for f in fields(SamplingParams) if f.default is None}


def _checked_stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or len(stops) > MAX_STOPS:
        raise ParameterError(f"stop must be a string or a list of at most {MAX_STOPS} strings, got {shown(stop)}")
    return tuple(text("stop", one) for one in stops)


def _checked_choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise ParameterError(f"choices must be a list of at least one string, got {shown(choices)}")
    return tuple(text("choices", one) for one in choices)


def _checked_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Collection):
        raise ParameterError(f"stop_token_ids must be a list of token ids, got {shown(ids)}")
    return tuple(dict.fromkeys(token_id("stop_token_ids", token) for token in ids))


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ParameterError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    result: dict[int, float] = {}
    for key, value in bias.items():
        written = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20  # JSON's keys are strings
        token = token_id("logit_bias", int(key) if written else key)
        if token in result:
            raise ParameterError(f"logit_bias: token {token} is given twice, as a number and as a string")
        result[token] = float(real(f"logit_bias of token {shown(token)}", value, -100, 100))
    return result


def token_id(name: str, token: Any) -> int:
    """Something that can be a token's id, as an int. Raises ParameterError."""
    try:
        return whole(name, token, 0)
    except ParameterError:
        raise ParameterError(f"{name}: {shown(token)} is not a token id") from None


def _check_structure(params: SamplingParams) -> None:
    """At most one structure, and of the right type; whether it means anything, `qkv.text` finds out."""
    asked = [name for name in _STRUCTURES if getattr(params, name) is not None]
    if len(asked) > 1:
        raise ParameterError(f"{asked[1]} cannot be asked for together with {asked[0]}")
    for name in asked:
        value = getattr(params, name)
        if name in ("regex", "grammar") or (name == "json_schema" and isinstance(value, str)):
            text(name, value)
    if not isinstance(params.json_schema, (Mapping, bool, str, type(None))):
        raise ParameterError(
            f"json_schema must be an object, a truth value or JSON text, got {shown(params.json_schema)}"
        )


GREEDY = SamplingParams(temperature=0)
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p")


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
    stated = {name: generation_config[name] for name in _RECOMMENDED if generation_config.get(name) is not None}
    sampling = generation_config.get("do_sample", bool(stated) or None)
    if sampling is None:
        published = family.sampling_when_thinking if thinking else family.sampling
        return SamplingParams(**published) if published else GREEDY
    if not sampling:
        return GREEDY
    return SamplingParams(**{"temperature": 1.0, **stated})
