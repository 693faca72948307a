"""Tool calls as Qwen's models write them, taken out of the answer while it comes.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

The arguments are passed on as the model wrote them, piece by piece: their concatenation is the JSON text of the object.
What was decided where engines differ:

* Where the vocabulary has the markers as tokens (Qwen's 151657 and 151658), only these count, and the same letters
  written out are text. Where it has none, the letters are the markers.
* `arguments` may come before `name` (then it waits for it), may be missing, null or an empty string ("{}"), and may be
  a string that holds the object: that is decoded once. Other keys are dropped; of a repeated key the first counts.
* Objects that follow each other between two markers are a call each. White space around them is dropped.
* A name that is not among the tools given is passed on: the program that runs tools can tell the model.
* What turns out not to be a call stays text: everything from the opening marker on, and the markers, is content. Of a
  call that breaks after its arguments have begun, these stay a call that is not complete, and the rest is content.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from qkv.text.answer.callreader import CallReader
from qkv.text.answer.jsonscan import SPACE, NotJsonError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCallDelta:
    """What one step adds to a call. The first delta of a call, and only that, has `id` and `name`."""

    index: int
    """Which call of the answer: 0, 1, …"""
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """A call. `arguments` is JSON text, of an object if the call is complete."""

    id: str
    name: str
    arguments: str


def collect(deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
    """The calls that a stream of deltas makes up."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name or "", delta.arguments))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.arguments)
    return calls


class Parsed(NamedTuple):
    """What a piece of the answer turned out to be."""

    content: str
    calls: tuple[ToolCallDelta, ...]


class ToolCallParser:
    """Sorts content into text and calls. The result does not depend on where the text is cut into pieces.

    by_id: the markers are tokens; say `open()` and `close()` where one comes. Otherwise the text is searched for them.
    """

    def __init__(self, *, by_id: bool) -> None:
        self.complete = 0
        """How many calls have come to their end."""
        self._by_id = by_id
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._state: Callable[[str], str] = self._outside
        self._held = ""  # the start of a marker, perhaps
        self._gap = ""  # white space after a call: dropped unless text follows
        self._after_call = False
        self._started = 0  # calls of which something has been passed on
        self._call = CallReader()
        self._raw: list[str] = []  # what came since the opening marker, while no call of the block has been passed on,
        self._fresh = False  # which is when this is true; afterwards, since the object that is being read began

    def push(self, text: str) -> Parsed:
        """What the next text completes."""
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text)
        return self._take()

    def open(self) -> Parsed:
        """The opening marker's token came."""
        self._leave()
        self._enter()
        return self._take()

    def close(self) -> Parsed:
        """The closing marker's token came."""
        if self._state == self._outside:
            self._say(CLOSE)
        else:
            self._leave(CLOSE)
        return self._take()

    def finish(self) -> Parsed:
        """The rest: what looked like a marker or a call and has no end."""
        held, self._held = self._held, ""
        if self._state == self._outside:
            self._say(held)
        else:
            self._raw.append(held)
            self._leave()
        return self._take()

    def _take(self) -> Parsed:
        taken = Parsed("".join(self._content), tuple(self._deltas))
        self._content.clear()
        self._deltas.clear()
        return taken

    # The four states. Each takes what it can from the start of a text and returns the rest.

    def _outside(self, text: str) -> str:
        if self._after_call:
            rest = text.lstrip(SPACE)
            self._gap += text[: len(text) - len(rest)]
            text = rest
        before, found, rest = self._split(OPEN, text)
        self._say(before)
        if found:
            self._enter()
        return rest

    def _between(self, text: str) -> str:
        rest = text.lstrip(SPACE)
        if self._fresh:
            self._raw.append(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._call = CallReader()
            self._state = self._inside
        elif rest and not self._by_id and CLOSE.startswith(rest[: len(CLOSE)]):
            if len(rest) < len(CLOSE):
                self._held = rest
                return ""
            self._leave(CLOSE)
            return rest[len(CLOSE) :]
        elif rest:
            self._break()
        return rest

    def _inside(self, text: str) -> str:
        call, broken = self._call, False
        try:
            end = call.feed(text)
        except NotJsonError as error:
            end, broken = error.at, True
        if not call.started:
            self._raw.append(text[:end])
        self._pass_on(call)
        if broken:
            self._break()
        elif call.done:
            self.complete += 1
            self._state = self._between
        return text[end:]

    def _broken(self, text: str) -> str:
        before, found, rest = self._split(CLOSE, text)
        self._content.append(before)
        if found:
            self._leave(CLOSE)
        return rest

    # What happens between states.

    def _say(self, text: str) -> None:
        if text:
            self._content.append(self._gap + text)
            self._gap, self._after_call = "", False

    def _enter(self) -> None:
        self._state, self._fresh = self._between, True
        self._gap = ""

    def _pass_on(self, call: CallReader) -> None:
        arguments = call.take()
        if not arguments:
            return
        if call.started:
            self._deltas.append(ToolCallDelta(self._started - 1, None, None, arguments))
            return
        self._deltas.append(ToolCallDelta(self._started, f"call_{secrets.token_hex(12)}", call.name, arguments))
        self._started += 1
        call.started = True
        self._fresh = False
        self._raw.clear()

    def _break(self) -> None:
        """What the block holds is no call: it becomes content, and so does the rest of the block."""
        self._content.append((OPEN if self._fresh else "") + "".join(self._raw))
        self._raw.clear()
        self._state = self._broken

    def _leave(self, marker: str = "") -> None:
        """The block is over. What of it has become neither call nor content becomes content."""
        if self._state == self._outside:
            return
        if self._state == self._broken:
            self._content.append("".join(self._raw))
        else:
            self._content.append((OPEN if self._fresh else "") + "".join(self._raw))
        if self._fresh:
            self._content.append(marker)
        self._after_call = not self._fresh
        self._raw.clear()
        self._state = self._outside

    def _split(self, marker: str, text: str) -> tuple[str, bool, str]:
        """The text before a marker, whether there is one, and the text after it. Its start, at the end, is held."""
        if self._by_id:
            return text, False, ""
        before, found, rest = text.partition(marker)
        if found:
            return before, True, rest
        held = next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False, ""
