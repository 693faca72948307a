"""How much work and memory one rendering of a chat template may take, and how it is counted (see `sandbox.py`).

A `Budget` looks at the clock as a template runs, weighs every value, and counts all that the template makes. Where an
argument decides how large a result gets (`'a'.center(10**10)`), `expected_size` says so before the result is made.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

CPU_SECONDS = 1.0
"""Processor time a rendering may take; a template of real use takes milliseconds."""
CLOCK_STEPS = 8
"""Steps between two looks at the clock. One step takes at most some milliseconds, since every value is bounded."""
VALUE_BYTES = 4 << 20
TOTAL_BYTES = 128 << 20
INTEGER_BITS = 4096
ITEM_BYTES = 64
"""What a value counts beside its text or its items."""

_LAZY: tuple[Any, ...] = (GeneratorType, type({}.keys()), type({}.values()), type({}.items()), reversed, map, zip)


class Budget:
    """What one rendering may still spend. Limits grow with the size of the conversation, so long ones render too."""

    def __init__(self, given: object, stand_ins: frozenset[str] = frozenset()) -> None:
        self.stand_ins = stand_ins
        """Characters that stand for markers (see `disguise.py`) and must not be escaped."""
        self.value_limit = VALUE_BYTES
        size = self._tree_size(given, limited=False)
        self.value_limit += 8 * size
        self._left = TOTAL_BYTES + 64 * size
        self._deadline = time.thread_time() + CPU_SECONDS
        self._steps = 0

    def step(self) -> None:
        """Count work done; now and then look at the clock."""
        self._steps += 1
        if self._steps % CLOCK_STEPS == 0 and time.thread_time() > self._deadline:
            raise SecurityError(f"the template needs more than {CPU_SECONDS:g} s of processor time")

    def expect(self, size: int) -> None:
        """Refuse before making a value of about `size` bytes, if that is too large."""
        if size > self.value_limit:
            raise SecurityError(f"the template makes a value of more than {self.value_limit} bytes")

    def expect_integer(self, bits: int) -> None:
        """Refuse before making an integer of about `bits` bits, if that is too large."""
        if bits > INTEGER_BITS:
            raise SecurityError(f"the template makes an integer of more than {INTEGER_BITS} bits")

    def weigh(self, value: object, *, printed: bool = True) -> int:
        """The tree size of `value`, refused above the limit. `printed`: only data, nothing with a life of its own."""
        self.step()
        return self._tree_size(value, printed=printed)

    def made(self, value: Any, *, printed: bool = False) -> Any:
        """Account for a value the template made; views and generators become lists."""
        if isinstance(value, _LAZY):
            value = list(self.iterate(value))
        self.weigh(value, printed=printed)
        self.charge(value)
        return value

    def charge(self, value: object) -> None:
        """Count a new value. Strings in it may be new (split); what else it holds existed before (messages)."""
        self._left -= ITEM_BYTES
        if isinstance(value, str):
            self._left -= len(value)
        elif isinstance(value, (list, tuple)):
            self._left -= sum(8 + (ITEM_BYTES + len(child) if isinstance(child, str) else 0) for child in value)
        elif isinstance(value, dict):
            self._left -= 2 * ITEM_BYTES * len(value)
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

    def _tree_size(self, value: object, *, printed: bool = True, limited: bool = True) -> int:
        """About the bytes `value` takes as a tree: what is shared counts each time. Stops at the limit."""
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
            if limited:
                self.expect(total)
        return total


running: ContextVar[Budget] = ContextVar("budget")


def run_within(budget: Budget, render: Callable[[], str]) -> str:
    """Call `render` with `budget` as the one that every guard of this environment charges."""
    token = running.set(budget)
    try:
        return render()
    finally:
        running.reset(token)


def expected_size(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """About the bytes that a filter or string method of this name adds to `value`, where its arguments decide that.

    `join` takes its items as `value`, like the filter.
    """
    given = [*args, *kwargs.values()]
    number = sum(abs(item) for item in given if isinstance(item, int))
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return number
        case "indent" | "expandtabs":
            return (str(value).count("\n") + str(value).count("\t") + 1) * (number + sum(len(str(i)) for i in given))
        case "batch" | "slice":
            return ITEM_BYTES * (number + _length(value))
        case "list" | "sort" | "unique" | "reverse" | "map" | "groupby":
            return ITEM_BYTES * len(value) if isinstance(value, str) else 0  # a list of its characters
        case "join":
            return _length(value) * sum(len(str(item)) for item in given)
        case "replace":
            named = dict(zip(("old", "new"), args, strict=False)) | kwargs
            old, new = str(named.get("old", "")), str(named.get("new", ""))
            return str(value).count(old) * len(new)
        case "split" | "rsplit" | "splitlines":
            separator = next((item for item in given if isinstance(item, str) and item), None)
            return ITEM_BYTES * (value.count(separator) if separator else sum(map(str.isspace, value)))
    return 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0


def percent_size(text: str, largest: int) -> int:
    """About the bytes of `text % values`. `largest`: how many each value takes at most."""
    return _formatted_size(text, re.findall(r"%(?:\([^)]*\))?([-#0 +*.\d]*)", text), largest)


def format_size(text: str, largest: int) -> int:
    """About the bytes of `text.format(…)`. `largest`: how many each value takes at most."""
    fields = [spec or "" for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    return _formatted_size(text, fields, largest)


def _formatted_size(text: str, specs: list[str], largest: int) -> int:
    if any("*" in spec or "{" in spec for spec in specs):
        raise SecurityError("a width that comes from a value has no place in a chat template")
    widths = sum(int(digits) for spec in specs for digits in re.findall(r"\d+", spec))
    return len(text) + len(specs) * largest + widths
