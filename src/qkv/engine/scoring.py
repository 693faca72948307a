"""How likely a model finds a text that is already there: log-probabilities, perplexity, and how far formats differ.

A text longer than the window is scored in windows that overlap: each starts `stride` tokens after the last and scores
the tokens that no window before it has scored, so each token is scored once, and with at least window - stride tokens
before it (but for the first window's). Of logits only a few rows are in memory at a time: they are reduced at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.checks import whole
from qkv.engine.engine import Engine
from qkv.engine.logprobs import divergences, log_normalizers, token_logprobs
from qkv.engine.params import SamplingParams
from qkv.engine.session import Session
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import ParameterError, QkvError
from qkv.model.feed import Feed, PagedCache
from qkv.progress import Progress, silent

_ASK = SamplingParams(temperature=0, seed=0, max_tokens=1, prompt_logprobs=True)


@dataclass(frozen=True)
class Score:
    """A text's log-probabilities, natural, of the model's own distribution."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Of each token given those before it; the first is None, for nothing comes before it. The others are finite."""

    @property
    def total(self) -> float:
        """Their sum: the logarithm of the probability that the text goes on like this after its first token."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """e^(-mean), over all tokens but the first."""
        return perplexity(self.total, len(self.token_ids) - 1)


def perplexity(total: float, count: int) -> float:
    """e^(-total / count); infinity where that is too large for a float."""
    try:
        return math.exp(-total / count)
    except OverflowError:
        return math.inf


class Window(NamedTuple):
    """Tokens start … end - 1 are run together, and of them first … end - 1 are scored."""

    start: int
    first: int
    end: int


def windows(length: int, window: int, stride: int) -> list[Window]:
    """How a text of `length` tokens is scored. Raises ParameterError for one without anything to predict."""
    if length < 2:
        raise ParameterError(f"text has {length} token{'s' * (length != 1)}: scoring needs two, to predict the second")
    result = [Window(0, 1, min(window, length))]
    while result[-1].end < length:
        start = result[-1].start + stride
        result.append(Window(start, result[-1].end, min(start + window, length)))
    return result


def window_and_stride(window: int | None, stride: int | None, most: int) -> tuple[int, int]:
    """Both checked; None are the most tokens that can be run, and half the window. Raises ParameterError."""
    window = whole("window", most if window is None else window, 2, most)
    return window, whole("stride", window // 2 if stride is None else stride, 1, window - 1)


def score(
    engine: Engine,
    ids: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress = silent,
) -> Score:
    """Score a text with a running engine, beside its other requests. A window is less than the context.

    Raises ParameterError before anything runs, and what ended a request of the engine.
    """
    window, stride = window_and_stride(window, stride, engine.context - 1)
    parts = windows(len(ids), window, stride)
    requests = [engine.check(ids[part.start : part.end], _ASK) for part in parts]
    logprobs: list[float | None] = [None]
    for part, request in zip(parts, requests, strict=True):
        progress("scoring", part.first, len(ids), "tokens")
        handle = engine.submit(request, _ASK)
        try:
            (answer,) = handle.wait()
        finally:
            handle.cancel()  # does nothing unless Ctrl-C came
        logprobs += answer.prompt_logprobs[part.first - part.start - 1 :]
    progress("scoring", len(ids), len(ids), "tokens")
    return Score([int(token) for token in ids], logprobs)


# ------------------------------------------------------------------------------------------ formats side by side


@dataclass
class Quality:
    """What a model in one format made of a text; against the first format, how far its distributions are from that."""

    logprobs: list[float] = field(default_factory=list)
    """Of each token but the first."""
    divergences: list[float] = field(default_factory=list)
    """KL(first ‖ this) at each of these places, in nats; 0 for the first itself."""
    same_top: int = 0
    """At how many of these places both have the same likeliest token."""
    tokens_run: int = 0
    seconds: float = 0.0
    """The model's own time for `tokens_run`, without what is computed here from its logits."""

    @property
    def perplexity(self) -> float:
        """e^(-mean log-probability)."""
        return perplexity(math.fsum(self.logprobs), len(self.logprobs))

    @property
    def divergence(self) -> float:
        """The mean of `divergences`."""
        return math.fsum(self.divergences) / len(self.divergences)

    @property
    def agreement(self) -> float:
        """The share of places with the same likeliest token."""
        return self.same_top / len(self.divergences)


def compare(
    sessions: Sequence[Session],
    ids: Sequence[int],
    *,
    vocabulary: Vocabulary,
    window: int,
    stride: int,
    progress: Progress = silent,
) -> list[Quality]:
    """Score a text with models of one vocabulary, a few rows at a time side by side, each against the first of them.

    Whole distributions are compared, and no more than `outputs` rows of each model's are kept: a row of 151,936 logits
    has 600 kB, so those of a long text fit into no memory. Raises ParameterError, QkvError for damaged weights, and
    CacheOverflowError for keys or values that an f16 cache cannot hold.
    """
    text = [vocabulary.check("text", token) for token in ids]
    results = [Quality() for _ in sessions]
    for start, first, end in windows(len(text), window, stride):
        streams = [
            rows_about(session, vocabulary, result, text[start:end], first - start)
            for session, result in zip(sessions, results, strict=True)
        ]
        place = first
        try:
            for rows in zip(*streams, strict=True):
                progress("scoring", place, len(text), "tokens")
                _add(results, rows, np.array(text[place : place + len(rows[0].logits)]))
                place += len(rows[0].logits)
        finally:
            for stream in streams:
                stream.close()
    progress("scoring", len(text), len(text), "tokens")
    return results


class Rows(NamedTuple):
    """Logits [n, tokens of the vocabulary], and the likeliest token of each row, -1 for a damaged one."""

    logits: NDArray[np.float32]
    likeliest: list[int]


def rows_about(
    session: Session, vocabulary: Vocabulary, result: Quality, ids: Sequence[int], first: int
) -> Generator[Rows, None, None]:
    """Logits about tokens first, first + 1, … of a text, `outputs` rows at a time; valid until the next are asked for.

    The row about a token is that of the position before it, so the last token is not run at all.
    """
    decoder, cache = session.decoder, PagedCache()
    try:
        for start in range(0, len(ids) - 1, decoder.outputs):
            part = ids[start : min(start + decoder.outputs, len(ids) - 1)]
            started = time.perf_counter()
            logits = session.step([Feed(cache, part, "none" if start + len(part) < first else "all")], copy=False)
            result.seconds += time.perf_counter() - started
            result.tokens_run += len(part)
            if len(logits):
                known = max(0, first - 1 - start)
                yield Rows(*vocabulary.only_tokens(logits[known:], decoder.likeliest().tolist()[known:]))
    finally:
        session.release(cache)


def _add(results: list[Quality], rows: Sequence[Rows], following: NDArray[np.int64]) -> None:
    """Reduce the rows of each model to what is kept of them."""
    normalizers = [log_normalizers(own.logits) for own in rows]
    for result, own, own_normalizers in zip(results, rows, normalizers, strict=True):
        if -1 in own.likeliest:
            raise QkvError("the model computed a value that is not a number: its weights are damaged")
        result.logprobs += token_logprobs(own.logits, following, own_normalizers).tolist()
        result.same_top += sum(map(eq, own.likeliest, rows[0].likeliest))
        if own is rows[0]:
            result.divergences += [0.0] * len(following)
        else:
            result.divergences += divergences(rows[0].logits, own.logits, normalizers[0], own_normalizers).tolist()
