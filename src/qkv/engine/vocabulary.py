"""Which rows of a model's head are tokens.

The head may have more rows than the tokenizer has tokens: Qwen3's has 151,936 for 151,669. The other rows are noise
that training never corrected. They are never chosen and never counted.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from qkv.checks import shown
from qkv.engine.params import token_id
from qkv.errors import ParameterError


class Vocabulary:
    """The tokens of a model: the ids below `size`, without `unused`, which no token has."""

    def __init__(self, size: int, unused: Collection[int] = ()) -> None:
        self.size, self._unused = size, frozenset(id for id in unused if id < size)
        self._unused_ids = np.array(sorted(self._unused), np.int64)

    def __contains__(self, id: int) -> bool:
        return 0 <= id < self.size and id not in self._unused

    def check(self, name: str, id: object) -> int:
        """The id as an int. Raises ParameterError, naming the field, for one that no token has."""
        if type(id) is int and id in self:
            return id  # so a long prompt takes no longer than it has to
        known = token_id(name, id)
        if known in self._unused:
            raise ParameterError(f"{name}: {known} is not a token id; the vocabulary has no token of that number")
        if known >= self.size:
            raise ParameterError(f"{name}: {shown(id)} is not a token id; ids go from 0 to {self.size - 1}")
        return known

    def only_tokens(self, logits: NDArray[np.float32], likeliest: list[int]) -> tuple[NDArray[np.float32], list[int]]:
        """Of rows of logits [n, rows of the head] those of tokens [n, size], without a copy, and the likeliest tokens.

        Unused ids get -inf, in place. `likeliest` are the ids of the largest logits of all, -1 for a damaged row.
        """
        logits = logits[:, : self.size]
        if len(self._unused_ids):
            logits[:, self._unused_ids] = -np.inf
        pairs = zip(logits, likeliest, strict=True)
        return logits, [best if best < 0 or best in self else int(row.argmax()) for row, best in pairs]
