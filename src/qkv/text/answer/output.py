"""The one way from generated ids to text, for streams and whole answers alike.

    id → thinking or content → characters → tool calls → newlines trimmed → stop strings (content only) → text

What is still held at the end goes the same way, so a whole answer is the sum of its stream. End ids never come here:
the engine keeps them. A marker (`<think>`, `<tool_call>` and what closes them) that marks nothing is its text.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from qkv.text.answer.stops import StopStrings
from qkv.text.answer.thinking import Kind, NewlineTrim, ThinkingSplit
from qkv.text.answer.tools import CLOSE, OPEN, Parsed, ToolCall, ToolCallParser
from qkv.text.tokens.detokenizer import Detokenizer
from qkv.text.tokens.tokenizer import Tokenizer

Reason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class Delta:
    """What one step adds to the answer. `stopped`: a stop string or the only call was found; nothing more will come."""

    content: str = ""
    thinking: str = ""
    stopped: bool = False
    tool_calls: tuple[ToolCall, ...] = ()


class OutputPipeline:
    """`push` every generated id, then `finish`; the concatenated deltas are the answer.

    tools: whether tool calls are looked for. Without (no tools were given, or none may be called) all is content.
    one_call: the answer ends after its first call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Collection[str],
        split: ThinkingSplit,
        *,
        tools: bool = False,
        one_call: bool = False,
    ) -> None:
        self.stops = StopStrings(stops)
        self._one_call = one_call
        self._stopped = False
        self._split = split
        markers = {split.open_id, split.close_id, *(tokenizer.marker_ids.get(marker) for marker in (OPEN, CLOSE))}
        self._detokenizer = Detokenizer(tokenizer, hidden=tokenizer.special_ids - markers)
        self._thinking_trim = NewlineTrim(both=True)
        self._content_trim = NewlineTrim(both=False) if split.after_thinking else None
        self._open, self._close = (tokenizer.marker_ids.get(marker) if tools else None for marker in (OPEN, CLOSE))
        by_id = self._open is not None and self._close is not None
        self._calls = ToolCallParser(by_id=by_id) if tools else None

    def push(self, id: int) -> Delta:
        """The text that this id completes."""
        if self._stopped:
            return Delta(stopped=True)
        if self._calls is not None and self._calls.inside:
            return self._content(id)
        before = self._split.kind
        event = self._split.push(id)
        if event is None:  # no character goes on across a marker
            delta = self._emit(before, self._detokenizer.finish())
            if self._split.kind == "content":  # so it was the closing one
                self._content_trim = NewlineTrim(both=False)
            return delta
        if self._split.kind == "content":
            return self._content(id)
        return self._emit("thinking", self._detokenizer.push(id))

    def finish(self, *, cut: bool = False) -> Delta:
        """The rest: unfinished characters as U+FFFD, and what looked like the start of a stop string or of a call.

        cut: the answer did not end by itself (max_tokens, the end of the context): a call that has no end is text.
        """
        if self._stopped:
            return Delta(stopped=True)
        delta = self._emit(self._split.kind, self._detokenizer.finish())
        if self._calls is not None and not delta.stopped:
            delta = _sum(delta, self._sort(self._calls.finish(cut=cut)))
        return delta if delta.stopped else _sum(delta, Delta(content=self.stops.finish()))

    def finish_reason(self, reason: Reason) -> Reason | Literal["tool_calls"]:
        """The answer's finish reason, when the engine's is `reason`. The last piece may have completed a stop string.

        Calls count in an answer that ended by itself: one that was cut off stays that.
        """
        if self._stopped:
            reason = "stop"
        called = self._calls is not None and self._calls.count > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _content(self, id: int) -> Delta:
        """An id of the answer, perhaps a marker of tool calls."""
        if self._calls is None or id not in (self._open, self._close):
            return self._emit("content", self._detokenizer.push(id))
        before = self._emit("content", self._detokenizer.finish())
        if before.stopped:
            return before
        return _sum(before, self._sort(self._calls.marker(OPEN if id == self._open else CLOSE)))

    def _emit(self, kind: Kind, text: str) -> Delta:
        if kind == "thinking":
            return Delta(thinking=self._thinking_trim.push(text))
        return self._sort(Parsed(text, ()) if self._calls is None else self._calls.push(text))

    def _sort(self, parsed: Parsed) -> Delta:
        text = parsed.content if self._content_trim is None else self._content_trim.push(parsed.content)
        content, self._stopped = self.stops.push(text)
        calls = parsed.calls
        if self._one_call and calls:
            calls, self._stopped = calls[:1], True
        return Delta(content=content, stopped=self._stopped, tool_calls=calls)


def _sum(a: Delta, b: Delta) -> Delta:
    return Delta(a.content + b.content, a.thinking + b.thinking, a.stopped or b.stopped, a.tool_calls + b.tool_calls)
