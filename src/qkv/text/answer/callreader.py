"""One tool call, `{"name": …, "arguments": {…}}`, read while it comes."""

from __future__ import annotations

from collections.abc import Callable

from qkv.text.answer.jsonscan import SPACE, NotJsonError, StringDecoder, ValueScanner


class CallReader:
    """Reads the object from its opening brace on: `feed` it text, `take` its arguments.

    The arguments' text is what the model wrote; a string is decoded once; null, "" or nothing at all is "{}".
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        """Whether the object has ended."""
        self.started = False
        """Whether something of it has been passed on (for the one who does it)."""
        self._state: Callable[[str, int], int] = self._brace
        self._scanner = ValueScanner()
        self._decoder = StringDecoder()
        self._key = ""
        self._value = ""  # of the name
        self._seen: set[str] = set()
        self._arguments = ""
        self._any_arguments = False
        self._kind = ""  # the first character of the arguments' value

    def feed(self, text: str) -> int:
        """Read on; where it stopped, at the end of the text or of the object. Raises NotJsonError."""
        at = 0
        while at < len(text) and not self.done:
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """The arguments read since the last call, once the name is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _brace(self, text: str, at: int) -> int:
        self._state = self._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            raise NotJsonError("a call without a name", at)
        return self._before(text, at, self._key_string)

    def _next_key(self, text: str, at: int) -> int:
        return self._before(text, at, self._key_string)

    def _before(self, text: str, at: int, then: Callable[[str, int], int]) -> int:
        """Skip white space, then begin a value."""
        if text[at] in SPACE:
            return at + 1
        self._scanner = ValueScanner()
        self._state = then
        return at

    def _key_string(self, text: str, at: int) -> int:
        if not self._key and text[at] != '"':
            raise NotJsonError("expected a key", at)
        at = self._scanner.feed(text, at)
        self._key += self._scanner.take()
        if self._scanner.done:
            self._key = StringDecoder().push(self._key)
            self._state = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._before_value
        elif text[at] not in SPACE:
            raise NotJsonError("expected a colon", at)
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        return self._before(text, at, self._member)

    def _member(self, text: str, at: int) -> int:
        """A key's value. What came before it breaks counts as read."""
        try:
            at = self._scanner.feed(text, at)
        finally:
            self._got(self._scanner.take())
        if self._scanner.done:
            if self._key == "name" and self._key not in self._seen:
                if self._value[0] != '"' or self._value == '""':
                    raise NotJsonError("a call without a name", at)
                self.name = StringDecoder().push(self._value)
            self._seen.add(self._key)
            self._state = self._after
        return at

    def _got(self, piece: str) -> None:
        if self._key in self._seen:
            return
        if self._key == "name":
            self._value += piece
        elif self._key == "arguments":
            self._add(piece)

    def _add(self, piece: str) -> None:
        """More of the arguments' value, as it is written."""
        self._kind = self._kind or piece[:1]
        if self._kind == '"':
            piece = self._decoder.push(piece)
        elif self._kind == "n":  # null, or it will break
            return
        if not self._any_arguments:
            piece = piece.lstrip(SPACE)
            self._any_arguments = bool(piece)
        self._arguments += piece

    def _after(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._key, self._value = "", ""
            self._state = self._next_key
        elif text[at] == "}":
            if self.name is None:
                raise NotJsonError("a call without a name", at)
            if not self._any_arguments:
                self._arguments = "{}"
            self.done = True
        elif text[at] not in SPACE:
            raise NotJsonError("expected a comma or the end", at)
        return at + 1
