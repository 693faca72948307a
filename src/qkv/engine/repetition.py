"""When an answer only repeats itself: its last tokens are one short sequence, many times over."""

from __future__ import annotations

import numpy as np

LONGEST_PERIOD = 64
"""The most tokens of the sequence that is repeated."""
FEWEST_TOKENS = 512
FEWEST_TIMES = 16
"""The repetition has at least so many tokens, and holds its sequence at least so many times.

Tables, lists and code change from line to line, and nobody laughs for 512 tokens. So none of them comes near this.
"""

_PERIODS = np.arange(1, LONGEST_PERIOD + 1)
_ENOUGH = np.maximum(FEWEST_TOKENS, FEWEST_TIMES * _PERIODS) - _PERIODS


class Repetition:
    """Watches the tokens of one answer."""

    def __init__(self) -> None:
        self._recent = np.full(LONGEST_PERIOD, -1)  # the newest token first
        self._same = np.zeros(LONGEST_PERIOD, np.int64)
        """For each period, how many of the newest tokens equal the token that stands a period before them."""

    def push(self, token: int) -> bool:
        """Take the next token; True if the answer only repeats itself by now."""
        self._same = np.where(self._recent == token, self._same + 1, 0)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._same >= _ENOUGH).any())
