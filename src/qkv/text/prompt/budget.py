"""How much work and memory one rendering of a chat template may take, and how it is counted (see `sandbox.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
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
STEP = 64
"""What a step costs, in the unit of a value's bytes."""


class Budget:
    """What one rendering may still spend. Limits grow with the size of the conversation, so long ones render too."""

    def __init__(self, given: object, stand_ins: frozenset[str] = frozenset()) -> None:
        self.stand_ins = stand_ins
        """Characters that stand for markers (see `disguise.py`) and must not be escaped."""
        size = weigh(given, None)
        self.value_limit = VALUE_BYTES + 8 * size
        self._left = TOTAL_BYTES + 64 * size
        self._deadline = time.thread_time() + CPU_SECONDS
        self._unchecked = 0

    def step(self, cost: int = STEP) -> None:
        """Count work done; now and then look at the clock."""
        self._unchecked += cost
        if self._unchecked > 50_000:
            self._unchecked = 0
            if time.thread_time() > self._deadline:
                raise SecurityError(f"the template needs more than {CPU_SECONDS:g} s of processor time")

    def expect(self, size: int | float) -> None:
        """Refuse before making a value of about `size` bytes, if that is too large."""
        if size > self.value_limit:
            raise SecurityError(f"the template makes a value of more than {self.value_limit} bytes")

    def expect_integer(self, bits: int) -> None:
        """Refuse before making an integer of about `bits` bits, if that is too large."""
        if bits > INTEGER_BITS:
            raise SecurityError(f"the template makes an integer of more than {INTEGER_BITS} bits")

    def weigh(self, value: object, *, printed: bool = True) -> int:
        """The tree size of `value`, refused above the limit. `printed`: only data, nothing with a life of its own."""
        weight = weigh(value, self, printed=printed)
        self.step(STEP + weight // 16)
        return weight

    def made(self, value: Any, *, printed: bool = False) -> Any:
        """Account for a value the template made; views and generators become lists."""
        if isinstance(value, (GeneratorType, type({}.keys()), type({}.values()), type({}.items()), reversed, map, zip)):
            value = list(self.iterate(value))
        self.weigh(value, printed=printed)
        # Children that are containers existed before (messages); strings may be new (split).
        self._left -= STEP + len(value) if isinstance(value, str) else STEP
        if isinstance(value, (list, tuple)):
            self._left -= sum(8 + (STEP + len(child) if isinstance(child, str) else 0) for child in value)
        elif isinstance(value, dict):
            self._left -= 2 * STEP * len(value)
        if self._left < 0:
            raise SecurityError("the template makes more text than a conversation of this size can need")
        return value

    def iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, one step each; what a generator makes is accounted for as a whole by `made`."""
        total = 0
        for value in values:
            total += STEP + (len(value) if isinstance(value, str) else 0)
            self.step()
            if not isinstance(values, (list, tuple, dict, str, range)):
                self.expect(total)
            yield value


def weigh(value: object, budget: Budget | None, *, printed: bool = True) -> int:
    """About the bytes `value` takes as a tree (what is shared counts each time), stopping at the budget's limit."""
    total = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += STEP + len(item)
        elif isinstance(item, (list, tuple)):
            total += STEP + 8 * len(item)
        elif isinstance(item, dict):
            total += STEP + 2 * STEP * len(item)
        elif isinstance(item, range):
            total += STEP + 40 * len(item)
        elif isinstance(item, int) and item.bit_length() > INTEGER_BITS:
            raise SecurityError(f"the template makes an integer of more than {INTEGER_BITS} bits")
        elif item is None or isinstance(item, (int, float, Undefined)):
            total += STEP
        elif printed:
            raise SecurityError(f"a {type(item).__name__} cannot be printed or passed to a filter")
        else:
            total += STEP
        if budget is not None:
            budget.expect(total)
        if isinstance(item, (list, tuple)):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
    return total


running: ContextVar[Budget] = ContextVar("budget")


def run_within(budget: Budget, render: Callable[[], str]) -> str:
    """Call `render` with `budget` as the one that every guard of this environment charges."""
    token = running.set(budget)
    try:
        return render()
    finally:
        running.reset(token)
