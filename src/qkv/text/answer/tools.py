"""Tool calls as Qwen's models write them, taken out of the answer.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

A block is held until it closes. Then it is read once, as JSON: it is one or more whole calls, or plain text.

* Where the vocabulary has the markers as tokens (Qwen's 151657 and 151658), only these count, and the same letters
  written out are text. Where it has none, the letters are the markers.
* A marker inside a JSON string is part of that string.
* `arguments` may also be called `parameters`. It may be missing, null or empty ("{}"), and it may be a string that
  holds the object. Other keys are dropped.
* A call that lacks only its last braces is completed, unless the answer was cut off there.
* A name that is not among the given tools is passed on: the program that runs tools can tell the model.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = " \t\n\r"
"""White space, as JSON knows it."""
MAX_MISSING = 8
"""A call that lacks more closing braces than this is no call."""


@dataclass(frozen=True)
class ToolCall:
    """A call. `arguments` is the JSON text of an object."""

    index: int
    """Which call of the answer: 0, 1, …"""
    id: str
    name: str
    arguments: str


class Parsed(NamedTuple):
    """What a piece of the answer turned out to be."""

    content: str
    calls: tuple[ToolCall, ...]


class ToolCallParser:
    """Sorts content into text and calls. The result does not depend on where the text is cut into pieces.

    by_id: the markers are tokens; say `marker()` where one comes. Otherwise the text is searched for them.
    """

    def __init__(self, *, by_id: bool) -> None:
        self.count = 0
        """How many calls were found."""
        self._by_id = by_id
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._held = ""  # the start of a marker, perhaps
        self._gap: str | None = None  # white space after a call: dropped unless text follows
        self._block: list[str] | None = None  # what came since the opening marker
        self._marks: set[int] = set()  # which parts of the block are markers inside a string
        self._looked, self._in_string = 0, False  # how many parts of the block were looked at, and where they end
        self._markers_only = False  # whether a marker is one inside a string, too

    @property
    def inside(self) -> bool:
        """Whether a block is open."""
        return self._block is not None

    def push(self, text: str) -> Parsed:
        """What the next text completes."""
        if self._by_id:
            self._text(text)
        else:
            *parts, rest = _MARKER.split(self._held + text)
            for part in parts:
                (self._marker if part in (OPEN, CLOSE) else self._text)(part)
            self._held = _start_of_marker(rest)
            self._text(rest[: len(rest) - len(self._held)])
        return self._take()

    def marker(self, marker: str) -> Parsed:
        """A marker's token came: OPEN or CLOSE."""
        self._marker(marker)
        return self._take()

    def finish(self, *, cut: bool) -> Parsed:
        """The rest. `cut`: the answer did not end by itself, so a block that is open is no call."""
        self._text(self._held)
        self._held = ""
        if self._block is not None:
            self._end_block("", cut=cut)
        return self._take()

    def _take(self) -> Parsed:
        taken = Parsed("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return taken

    def _text(self, text: str) -> None:
        if self._block is not None:
            self._block.append(text)
        elif self._gap is None:
            self._content.append(text)
        else:
            self._gap += text
            if self._gap.strip(SPACE):
                self._content.append(self._gap)
                self._gap = None

    def _marker(self, marker: str) -> None:
        if self._block is not None and not self._markers_only and self._inside_string(self._block):
            self._marks.add(len(self._block))
            self._block.append(marker)
            return
        if self._block is not None:
            self._end_block(marker if marker == CLOSE else "")
        elif marker == CLOSE:
            self._text(CLOSE)
        if marker == OPEN:
            self._block, self._looked, self._in_string = [], 0, False

    def _inside_string(self, block: list[str]) -> bool:
        """Whether the block, which should be JSON objects, ends inside a string."""
        new = _ESCAPE.sub("", "".join(block[self._looked :]))
        self._looked = len(block)
        self._in_string ^= new.count('"') % 2 == 1
        return self._in_string and next(char for part in block for char in part if char not in SPACE) == "{"

    def _end_block(self, marker: str, *, cut: bool = False) -> None:
        """The block is over. `marker`: what closed it, "" if nothing did."""
        parts, marks = self._block or [], self._marks
        self._block, self._marks = None, set()
        body = "".join(parts)
        calls = [] if cut else read_calls(body)
        for name, arguments in calls:
            self._calls.append(ToolCall(self.count, f"call_{secrets.token_hex(12)}", name, arguments))
            self.count += 1
            self._gap = ""
        if not calls and marks:
            self._sort_again(parts, marks, marker, cut=cut)
        elif not calls:
            self._text(OPEN + body + marker)

    def _sort_again(self, parts: list[str], marks: set[int], marker: str, *, cut: bool) -> None:
        """A block whose strings hold markers is no call. Perhaps a quote is missing, and the markers were markers."""
        self._block, self._markers_only = [], True
        for at, part in enumerate(parts):
            (self._marker if at in marks else self._text)(part)
        self._markers_only = False
        if self._block is not None:
            self._end_block(marker, cut=cut)
        else:
            self._text(marker)


def read_calls(block: str) -> list[tuple[str, str]]:
    """Name and arguments of each call in a block's text; none if any part of it is something else."""
    calls = []
    text = block.strip(SPACE)
    try:
        while text:
            call, length = _decoded(text)
            calls.append(_call(call, text[:length]))
            text = text[length:].lstrip(SPACE)
    except (ValueError, RecursionError):
        return []
    return calls


def _decoded(text: str) -> tuple[Any, int]:
    """The JSON value that begins a text, and its length. Closing braces that are missing at the end are added."""
    for missing in range(MAX_MISSING + 1):
        try:
            return _JSON.raw_decode(text + "}" * missing)
        except json.JSONDecodeError as error:
            if error.pos < len(text) + missing:
                raise
    raise ValueError("too many braces are missing")


def _call(call: Any, text: str) -> tuple[str, str]:
    """Name and arguments of a call. `text`: its JSON, perhaps without its last braces. Raises ValueError if it is none.

    The arguments are as the model wrote them.
    """
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    name.encode()  # raises for half a character
    key = "arguments" if "arguments" in call else "parameters"
    arguments = call.get(key)
    if isinstance(arguments, str):
        written = arguments.strip(SPACE)
        arguments = _JSON.decode(written) if written else None
    elif isinstance(arguments, dict):
        written = _member(text + "}" * MAX_MISSING, key)
    if arguments is None:
        return name, "{}"
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    return name, _STRING.sub(lambda string: _UNWRITABLE.sub(_escaped, string[0]), written)


def _member(text: str, key: str) -> str:
    """The JSON text of a member of the object that `text` begins with, as it is written there."""
    end, name = 1, None
    while name != key:
        name, end = _JSON.raw_decode(text, _gap_end(text, end))
        start = _gap_end(text, end)
        _, end = _JSON.raw_decode(text, start)
    return text[start:end]


def _gap_end(text: str, at: int) -> int:
    """The end of the white space, commas and colons from `at` on."""
    gap = _GAP.match(text, at)
    assert gap is not None  # it also matches nothing
    return gap.end()


def _escaped(char: re.Match[str]) -> str:
    return json.dumps(char[0])[1:-1]


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _start_of_marker(text: str) -> str:
    """The end of `text` that a marker could begin with."""
    end = text[text.rfind("<") :] if "<" in text else ""
    return end if OPEN.startswith(end) or CLOSE.startswith(end) else ""


# Models write bare line ends inside strings, which JSON forbids. They are read here, and escaped in what is passed on.
_JSON = json.JSONDecoder(strict=False, object_pairs_hook=_unrepeated, parse_constant=_refused)
_MARKER = re.compile(f"({OPEN}|{CLOSE})")
_GAP = re.compile(r"[ \t\n\r,:]*")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_UNWRITABLE = re.compile(r"[\x00-\x1f\ud800-\udfff]")
