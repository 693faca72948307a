"""How much work and memory one rendering of a chat template may take, and how it is counted (see `sandbox.py`).

A `Budget` looks at the clock as a template runs, weighs every value, and counts all that the template makes. Where an
argument decides how large a result gets (`'a'.center(10**10)`), `expected_size` says so before the result is made.
"""

from __future__ import annotations

import re
import string
import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

CPU_SECONDS = 1.0
"""Processor time a rendering may take; a template of real use takes milliseconds."""
VALUE_BYTES = 4 << 20
TOTAL_BYTES = 128 << 20
INTEGER_BITS = 4096
GROWTH = 64
"""How many times as large as the conversation a value may be, and all that the template makes, beside these bytes."""
ITEM_BYTES = 64
"""What a value counts beside its text or its items."""

_LAZY: tuple[Any, ...] = (GeneratorType, type({}.keys()), type({}.values()), type({}.items()), reversed, map, zip)


class Budget:
    """What one rendering may still spend. Limits grow with the size of the conversation, so long ones render too."""

    def __init__(self, given: object, stand_ins: frozenset[str] = frozenset()) -> None:
        self.stand_ins = stand_ins
        """Characters that stand for markers (see `disguise.py`) and must not be escaped."""
        self._deadline = time.thread_time() + CPU_SECONDS
        self._value_limit = sys.maxsize
        size = self.weigh(given)
        self._value_limit = VALUE_BYTES + GROWTH * size
        self._left = TOTAL_BYTES + GROWTH * size

    def step(self) -> None:
        """Look at the clock. What runs between two steps is short, since every value is bounded."""
        if time.thread_time() > self._deadline:
            raise SecurityError(f"the template needs more than {CPU_SECONDS:g} s of processor time")

    def expect(self, size: int) -> None:
        """Refuse before making a value of about `size` bytes, if that is too large."""
        if size > self._value_limit:
            raise SecurityError(f"the template makes a value of more than {self._value_limit} bytes")

    def expect_integer(self, bits: int) -> None:
        """Refuse before making an integer of about `bits` bits, if that is too large."""
        if bits > INTEGER_BITS:
            raise SecurityError(f"the template makes an integer of more than {INTEGER_BITS} bits")

    def weigh(self, value: object, *, printed: bool = True) -> int:
        """About the bytes `value` takes as a tree: what is shared counts each time. Refused above the limit.

        `printed`: only data, nothing with a life of its own.
        """
        self.step()
        total = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            total += ITEM_BYTES
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, (list, tuple)):
                total += 8 * len(item)
                waiting.extend(item)
            elif isinstance(item, dict):
                total += 2 * ITEM_BYTES * len(item)
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, range):
                total += 40 * len(item)
            elif isinstance(item, int):
                self.expect_integer(item.bit_length())
            elif printed and item is not None and not isinstance(item, (float, Undefined)):
                raise SecurityError(f"a {type(item).__name__} cannot be printed or passed to a filter")
            self.expect(total)
        return total

    def made(self, value: Any) -> Any:
        """Account for a value the template made; views and generators become lists."""
        if isinstance(value, _LAZY):
            value = list(self.iterate(value))
        self.weigh(value, printed=False)
        self._charge(value)
        return value

    def compared(self, value: Any) -> Any:
        """A value that is about to be compared."""
        self.step()
        return value

    def cut(self, value: Any) -> Any:
        """Account for a slice, without weighing: it is lighter than the value it was cut from."""
        self.step()
        self._charge(value)
        return value

    def joined(self, values: list[Any]) -> Any:
        """The text of values in a row."""
        self.weigh(values)
        return self.made("".join(map(str, values)))

    def printed(self, value: Any) -> Any:
        """The text of a value."""
        self.weigh(value)
        return self.made(str(value))

    def _charge(self, value: object) -> None:
        """Count a new value. Strings in it may be new (split); what else it holds existed before (messages)."""
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        items = value if isinstance(value, (list, tuple)) else [value]
        self._left -= ITEM_BYTES * (1 + len(items)) + sum(len(item) for item in items if isinstance(item, str))
        if self._left < 0:
            raise SecurityError("the template makes more text than a conversation of this size can need")

    def iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, one step each. What a generator makes is not yet a value that was weighed."""
        total = 0
        for value in values:
            self.step()
            if not isinstance(values, (list, tuple, dict, str, range)):
                total += ITEM_BYTES + (len(value) if isinstance(value, str) else 0)
                self.expect(total)
            yield value


running: ContextVar[Budget] = ContextVar("budget")
"""The budget of the template that runs."""


def expected_size(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> int:
    """About the bytes that a filter or string method of this name adds to `value`, where its arguments decide that.

    `join` takes its items as `value`, like the filter; "%" is the operator. size: what all that is given weighs.
    """
    given = [*args, *kwargs.values()]
    length = len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0
    number = sum(abs(item) for item in given if isinstance(item, int))
    text = sum(len(str(item)) for item in given)
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return number
        case "indent" | "expandtabs":
            return (str(value).count("\n") + str(value).count("\t") + 1) * (number + text)
        case "join":
            return length * text
        case "replace":
            old, new = [*args, *(kwargs[key] for key in ("old", "new") if key in kwargs)][:2]
            return str(value).count(str(old)) * len(str(new))
        case "batch" | "slice" | "list" | "sort" | "unique" | "reverse" | "map" | "groupby":
            return ITEM_BYTES * (number + length)
        case "split" | "rsplit" | "splitlines":
            return ITEM_BYTES * length
        case "%":
            specs = re.findall(r"%(?:\([^)]*\))?([-#0 +*.\d]*)", str(value))
        case "format" | "format_map":
            specs = [spec or "" for _, field, spec, _ in string.Formatter().parse(value) if field is not None]
        case _:
            return 0
    if any("*" in spec or "{" in spec for spec in specs):
        raise SecurityError("a width that comes from a value has no place in a chat template")
    return len(specs) * size + sum(int(digits) for spec in specs for digits in re.findall(r"\d+", spec))
