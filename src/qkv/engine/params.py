"""What a request may ask of sampling, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from qkv.errors import ParameterError

MAX_STOPS = 64
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to end. None means: as the model's own defaults say.

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
    seed: int | None = None
    """The same seed gives the same text. None draws a new one."""
    max_tokens: int | None = None
    """The most tokens to generate; None is the room left in the context."""
    stop: str | Sequence[str] = ()
    """The text ends before the first of these."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""

    def __post_init__(self) -> None:
        _number(self, "temperature", 0, math.inf)
        _number(self, "min_p", 0, 1)
        _number(self, "top_p", 0, 1)
        _whole(self, "top_k", -1, 2**31 - 1)
        _whole(self, "seed", 0, MAX_SEED)
        _whole(self, "max_tokens", 1, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or len(stops) > MAX_STOPS:
            raise ParameterError(f"stop must be a string or a list of at most {MAX_STOPS} strings, got {self.stop!r}")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ParameterError(f"stop must hold non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stops))

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill every field that is None from `defaults`. A field that is set stays, 0 included."""
        missing: dict[str, Any] = {
            field.name: getattr(defaults, field.name) for field in fields(self) if getattr(self, field.name) is None
        }
        return replace(self, **missing)


def _number(params: SamplingParams, name: str, low: float, high: float) -> None:
    value = getattr(params, name)
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (low <= value <= high)
        or value == math.inf
    ):
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise ParameterError(f"{name} must be a number of at least {low:g}{upper}, got {value!r}")


def _whole(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParameterError(f"{name} must be a whole number of at least {low} and at most {high}, got {value!r}")
