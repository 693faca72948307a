"""JSON as it comes, a few characters at a time: where a value ends, and its text, without waiting for the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 100
"""Deeper nesting than any tool takes; json.loads would fail at some 1000."""

_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]*")
_MAX_SCALAR = 400  # characters: no number needs more
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
SPACE = " \t\n\r"
"""White space, as JSON knows it."""
_HEX = frozenset("0123456789abcdefABCDEF")


class NotJsonError(ValueError):
    """The text stopped being JSON, at this place of what was fed last."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


class ValueScanner:
    """Follows one JSON value. `feed` says how much of a text belongs to it; `take` gives the value's text so far.

    That text is the one fed, but for line ends and other control characters inside strings, which models write and
    JSON forbids: they come out escaped. No white space may come before the value. The time per character is constant.
    """

    def __init__(self) -> None:
        self.done = False
        self._closers: list[str] = []
        self._state: Callable[[str, int], int] = self._value
        self._in_key = False
        self._hex = 0
        self._scalar = ""
        self._text: list[str] = []

    def feed(self, text: str, at: int) -> int:
        """Read on from `text[at]`; where it stopped: at the end of the text or of the value. Raises NotJsonError."""
        while at < len(text) and not self.done:
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """What has been read since the last call."""
        taken = "".join(self._text)
        self._text.clear()
        return taken

    def _keep(self, text: str, at: int) -> int:
        self._text.append(text[at])
        return at + 1

    def _ended(self) -> None:
        self.done = not self._closers
        self._state = self._after

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in "{[":
            if len(self._closers) == MAX_DEPTH:
                raise NotJsonError(f"nested more than {MAX_DEPTH} deep", at)
            self._closers.append("}" if char == "{" else "]")
            self._state = self._first_key if char == "{" else self._first_item
        elif char == '"':
            self._state, self._in_key = self._string, False
        elif char in SPACE and self._closers:
            pass
        else:
            self._state = self._number_or_word
            return at
        return self._keep(text, at)

    def _first_item(self, text: str, at: int) -> int:
        return self._close(text, at) if text[at] == "]" else self._skip_space(text, at, self._value)

    def _first_key(self, text: str, at: int) -> int:
        return self._close(text, at) if text[at] == "}" else self._skip_space(text, at, self._key)

    def _skip_space(self, text: str, at: int, then: Callable[[str, int], int]) -> int:
        if text[at] in SPACE:
            return self._keep(text, at)
        self._state = then
        return at

    def _close(self, text: str, at: int) -> int:
        self._closers.pop()
        self._ended()
        return self._keep(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._state, self._in_key = self._string, True
        elif text[at] not in SPACE:
            raise NotJsonError("expected a key", at)
        return self._keep(text, at)

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._value
        elif text[at] not in SPACE:
            raise NotJsonError("expected a colon", at)
        return self._keep(text, at)

    def _after(self, text: str, at: int) -> int:
        if text[at] == self._closers[-1]:
            return self._close(text, at)
        if text[at] == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
        elif text[at] not in SPACE:
            raise NotJsonError("expected a comma or the end", at)
        return self._keep(text, at)

    def _string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain:
            self._text.append(plain[0])
            return plain.end()
        if text[at] == '"':
            if self._in_key:
                self._state = self._colon
            else:
                self._ended()
        elif text[at] == "\\":
            self._state = self._escape
        else:
            self._text.append(json.dumps(text[at])[1:-1])
            return at + 1
        return self._keep(text, at)

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._state, self._hex = self._unicode, 4
        elif text[at] in '"\\/bfnrt':
            self._state = self._string
        else:
            raise NotJsonError("unknown escape in a string", at)
        return self._keep(text, at)

    def _unicode(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            raise NotJsonError("unknown escape in a string", at)
        self._hex -= 1
        if not self._hex:
            self._state = self._string
        return self._keep(text, at)

    def _number_or_word(self, text: str, at: int) -> int:
        room = _MAX_SCALAR - len(self._scalar)
        part = _SCALAR_PART.match(text, at, at + room)
        assert part is not None  # it also matches nothing
        end = part.end()
        self._text.append(part[0])
        self._scalar += part[0]
        if end < len(text):  # so it is complete
            if end - at == room or not _SCALAR.fullmatch(self._scalar):
                raise NotJsonError("expected a value", end)
            self._scalar = ""
            self._ended()
        return end


_UNIT = re.compile(
    r"""[^"\\]+ | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2} | \\u[0-9a-fA-F]{4} | \\[^u] | " """,
    re.VERBOSE,
)
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]..(?:\\(?:u.{0,3})?)?", re.DOTALL)


class StringDecoder:
    """The text that a JSON string stands for, while the string comes. Halves of characters become U+FFFD."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, raw: str) -> str:
        """Decode the next part of a string (valid JSON, its quotes among it); an unfinished escape waits."""
        raw = self._held + raw
        at, decoded = 0, []
        while (unit := _UNIT.match(raw, at)) and not _HIGH_SURROGATE.fullmatch(raw, at):
            decoded.append("" if unit[0] == '"' else unit[0])
            at = unit.end()
        self._held = raw[at:]
        text: str = json.loads('"' + "".join(decoded) + '"')
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
