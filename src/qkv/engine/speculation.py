"""Guesses of what comes next, looked up in the text itself (prompt lookup): answers often quote their prompts.

If the last tokens have been there before, what followed them then is the guess. The model verifies all guesses in one
step. A guess that is wrong costs a larger step for nothing: after one, none is made for a while, and for longer each
time. (Saxena 2023, "Prompt Lookup Decoding".)
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 3  # so many tokens must have been there before
FIRST, MOST = 3, 7  # drafts of a step, and after guesses that were right: with its own token it then has 4 or 8
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # tokens


class Lookup:
    """The index of one text, which only grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # GRAM tokens → where the text goes on after their last time
        self._indexed = 0
        self._size = FIRST
        self._pause = 0  # how long the next pause will be, in tokens
        self._silent_until = 0

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may come after `ids`."""
        for end in range(max(self._indexed, GRAM), len(ids)):  # the last one is what is asked for
            self._ends[tuple(ids[end - GRAM : end])] = end
        self._indexed = max(self._indexed, len(ids))
        if len(ids) < self._silent_until:
            return []
        start = self._ends.get(tuple(ids[-GRAM:]))
        if start is None:
            return []
        drafts = list(ids[start : start + min(most, self._size)])
        period = len(ids) - start  # a text that repeats itself goes on doing so
        while len(drafts) < min(most, self._size):
            drafts.append(drafts[-period])
        return drafts

    def learn(self, length: int, drafts: int, accepted: int) -> None:
        """Of `drafts` guesses the first `accepted` were right, and the text has `length` tokens now."""
        self._size = MOST if accepted == drafts else FIRST
        if accepted:
            self._pause //= 2
        else:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._silent_until = length + self._pause
