"""Thinking or answer: decided by token id, starting from what the prompt's end says.

Text is never searched for `<think>`: a marker is one id, and the same letters written out are ordinary text. Whether
the answer starts inside thinking is read from the prompt's ids, not from a flag, because templates and `/no_think`
switches decide it: an opening marker left open at the prompt's end means thinking.

Thinking is what stands between the first pair of markers. Every other marker is its text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

Kind = Literal["thinking", "content"]


class ThinkingSplit:
    """Sorts generated ids. Without both marker ids (a model that does not think) everything is content.

    `turn_ids`: ids that end a turn (the tokenizer's control tokens); a `<think>` before one belongs to an earlier turn.
    """

    def __init__(
        self,
        open_id: int | None,
        close_id: int | None,
        prompt_ids: Sequence[int],
        turn_ids: Collection[int] = (),
    ) -> None:
        active = open_id is not None and close_id is not None
        self.open_id = open_id if active else None
        self.close_id = close_id if active else None
        """The markers' ids; None for both where there is no thinking."""
        last = self._last_marker(prompt_ids, turn_ids) if active else None
        self.kind: Kind = "thinking" if last is not None and last == self.open_id else "content"
        """What the next id would be, unless it is a marker."""
        self.after_thinking = last is not None and last == self.close_id
        """Whether content follows a closed thinking block (in the prompt or in the output)."""
        self._first = True  # whether no id has come yet

    def push(self, id: int) -> tuple[Kind, int] | None:
        """The id with its kind. None for a marker that opens or closes the thinking: it belongs to no text."""
        first, self._first = self._first, False
        if id == self.open_id and self.kind == "content" and not self.after_thinking:
            self.kind = "thinking"
            return None
        if id == self.open_id and self.kind == "thinking" and first:
            return None  # the prompt has opened the thinking already
        if id == self.close_id and (self.kind == "thinking" or (first and not self.after_thinking)):
            self.kind = "content"
            self.after_thinking = True
            return None
        return self.kind, id

    def _last_marker(self, prompt_ids: Sequence[int], turn_ids: Collection[int]) -> int | None:
        for id in reversed(prompt_ids):
            if id in (self.open_id, self.close_id):
                return id
            if id in turn_ids:
                return None
        return None


class NewlineTrim:
    r"""Drops newlines at the start of a text and, if `both`, at its end, while it streams.

    Qwen's own parser strips `\n` from both sides of the thinking and of the answer that follows it. Here the answer
    keeps its trailing newlines: they are the model's words, and a stream could only drop them by holding them back.
    """

    def __init__(self, *, both: bool) -> None:
        self._both = both
        self._started = False
        self._held = ""

    def push(self, text: str) -> str:
        if not self._started:
            text = text.lstrip("\n")
            self._started = bool(text)
        if not self._both:
            return text
        text = self._held + text
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        return kept
