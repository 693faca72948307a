"""The one way from generated ids to text, for streams and whole answers alike.

    id → thinking or content → characters → newlines trimmed → stop strings (content only) → text

What is still held at the end goes the same way, so a whole answer is the sum of its stream. End ids never come here:
the engine keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkv.text.detokenizer import Detokenizer
from qkv.text.stops import StopStrings
from qkv.text.thinking import Kind, NewlineTrim, ThinkingSplit
from qkv.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one step adds to the answer. `stopped`: a stop string was found, and nothing more will come."""

    content: str = ""
    thinking: str = ""
    stopped: bool = False


class OutputPipeline:
    """`push` every generated id, then `finish`; the concatenated deltas are the answer."""

    def __init__(self, tokenizer: Tokenizer, stops: str | Sequence[str] | None, split: ThinkingSplit) -> None:
        self._stops = StopStrings(stops)
        self._split = split
        self._detokenizer = Detokenizer(tokenizer)
        self._thinking_trim = NewlineTrim(both=True)
        self._content_trim = NewlineTrim(both=False) if split.after_thinking else None

    def push(self, id: int) -> Delta:
        """The text that this id completes."""
        if self._stops.stopped:
            return Delta(stopped=True)
        before = self._split.kind
        event = self._split.push(id)
        if event is not None:
            kind, id = event
            return self._emit(kind, self._detokenizer.push(id))
        delta = self._emit(before, self._detokenizer.finish())  # no character goes on across a marker
        if self._split.kind == "content":  # so it was the closing one
            self._content_trim = NewlineTrim(both=False)
        return delta

    def finish(self) -> Delta:
        """The rest: unfinished characters as U+FFFD, and what looked like the start of a stop string."""
        kind = self._split.kind
        delta = self._emit(kind, self._detokenizer.finish())
        if delta.stopped:
            return delta
        return Delta(content=delta.content + self._stops.finish(), thinking=delta.thinking)

    def _emit(self, kind: Kind, text: str) -> Delta:
        if kind == "thinking":
            return Delta(thinking=self._thinking_trim.push(text))
        if self._content_trim is not None:
            text = self._content_trim.push(text)
        content, stopped = self._stops.push(text)
        return Delta(content=content, stopped=stopped)
