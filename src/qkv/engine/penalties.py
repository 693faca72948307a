"""What is added to logits and taken from them before anything is drawn: logit_bias and the three penalties.

Only the logits of tokens that were seen or biased are touched, so a step costs as much as there are such tokens, not
as the vocabulary is large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from qkv.engine.params import BANNED, SamplingParams


class Counts:
    """How often each token was seen."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        unique, counts = np.unique(np.fromiter(ids, np.int64), return_counts=True)
        self._ids, self._counts = unique, counts.astype(np.int64)
        self._place = {int(token): place for place, token in enumerate(unique)}

    def add(self, token: int) -> None:
        """See a token once more."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):  # the arrays are full: twice the room
            spare = np.zeros(max(64, place), np.int64)
            self._ids, self._counts = np.append(self._ids, spare), np.append(self._counts, spare)
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each token once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often `ids` were seen."""
        return self._counts[: len(self._place)]


class Penalties:
    """The logit_bias and penalties of one answer, which count its tokens as it grows.

    repetition_penalty looks at prompt and answer (as in CTRL, Keskar et al. 2019, §4.1, with the rule of transformers
    for negative logits); presence and frequency penalty look at the answer only (as OpenAI defines them).
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        repetition = params.repetition_penalty
        self._repetition = 1.0 if repetition is None else float(repetition)
        self._presence, self._frequency = float(params.presence_penalty), float(params.frequency_penalty)
        self._seen = Counts(prompt_ids) if self._repetition != 1 else None
        self._answer = Counts() if self._presence or self._frequency else None
        self._bias_ids, self._bias = _as_arrays(params.logit_bias)
        self.active = self._seen is not None or self._answer is not None or len(self._bias_ids) > 0

    def count(self, token: int) -> None:
        """The answer has one more token."""
        for counts in (self._seen, self._answer):
            if counts is not None:
                counts.add(token)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change a row of logits in place. The sums are float64, rounded once per step; banned ones become -inf."""
        if len(self._bias_ids):
            logits[self._bias_ids] = logits[self._bias_ids] + self._bias
        if self._seen is not None:
            ids = self._seen.ids
            seen = logits[ids].astype(np.float64)
            logits[ids] = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        if self._answer is not None:
            ids = self._answer.ids
            logits[ids] = logits[ids] - (self._presence + self._frequency * self._answer.counts)


def _as_arrays(bias: Mapping[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, added = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float64)
    return ids, np.where(added == BANNED, -np.inf, added)
