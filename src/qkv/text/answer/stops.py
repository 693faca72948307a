"""Stop strings in streamed text: nothing of one is ever sent, and nothing else is held back."""

from __future__ import annotations

from collections.abc import Collection


class StopStrings:
    """Searches text that comes in pieces; the result does not depend on where the pieces are cut.

    The first stop string to be complete ends the text, which is cut where that stop string starts (of several complete
    at the same character, the longest). Held back is only a tail that is the start of a stop string. Knuth–Morris–Pratt
    for each stop string: the work per character does not depend on their lengths.

    stops: strings that are not empty (`SamplingParams` refuses others).
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be sent now, and whether a stop string has been found. Afterwards everything is swallowed."""
        if self.found is not None:
            return "", True
        if not self._stops:
            return text, False
        pending = self._held + text
        for at, char in enumerate(text, start=len(self._held)):
            length = self._step(char)
            if length:
                start, self._held = at + 1 - length, ""
                self.found = pending[start : at + 1]
                return pending[:start], True
        keep = max(self._matched)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def finish(self) -> str:
        """What was held back because it looked like the start of a stop string that never came."""
        rest, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return rest

    def _step(self, char: str) -> int:
        """Advance by one character; the length of the longest stop string that ends with it, or 0."""
        found = 0
        for n, stop in enumerate(self._stops):
            matched = self._matched[n]
            while matched and stop[matched] != char:
                matched = self._tables[n][matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                found = max(found, matched)
            self._matched[n] = matched
        return found


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = table[length - 1]
        if pattern[at] == pattern[length]:
            length += 1
        table[at] = length
    return table
