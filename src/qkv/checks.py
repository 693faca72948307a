"""Checks of values that users give. Each says in one line which field is wrong, what it must be, and what it was."""

from __future__ import annotations

import math
import reprlib
import sys
from numbers import Real
from operator import index
from typing import Any

from qkv.errors import ParameterError


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number from `low` to `high` (None: without limit) as an int. NumPy's integers count, truth values don't.

    Raises ParameterError.
    """
    plain = _scalar(value)
    try:
        number = None if isinstance(plain, bool) else index(plain)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        wanted = f"of at least {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise ParameterError(f"{name} must be a whole number {wanted}, got {shown(value)}")
    return number


def real(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """A finite number from `low` to `high` as an int or a float. NumPy's numbers count, truth values don't.

    Raises ParameterError.
    """
    plain = _scalar(value)
    number = math.nan
    if isinstance(plain, Real) and not isinstance(plain, bool):
        try:
            number = plain if isinstance(plain, int) and abs(plain) <= sys.float_info.max else float(plain)
        except OverflowError:
            number = math.inf
    if not low <= number <= high or number == math.inf:
        wanted = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ParameterError(f"{name} must be a number {wanted}, got {shown(value)}")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, NumPy's too. Raises ParameterError."""
    plain = _scalar(value)
    if not isinstance(plain, bool):
        raise ParameterError(f"{name} must be true or false, got {shown(value)}")
    return plain


def text(name: str, value: Any) -> str:
    """A string that is not empty and has whole characters only. Raises ParameterError."""
    if not isinstance(value, str) or not value:
        raise ParameterError(f"{name} must be a non-empty string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{name}: half a character (lone surrogate {value[error.start]!a}) at position {error.start}; "
            "send whole characters"
        ) from None
    return value


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except Exception:  # a number with more digits than Python spells, or an object that cannot show itself
        return f"a {type(value).__name__}"


def _scalar(value: Any) -> Any:
    """Python's own number for one of NumPy's, or for an array that holds a single number without dimensions."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
