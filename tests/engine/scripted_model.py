"""A model without weights that needs its cache: what comes next depends on every token it finds in its blocks.

So a block that is shared wrongly, written twice or given out too early shows in the tokens. `expected` says what a
request must give, by a loop that has neither cache nor batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from qkv.engine.blocks import BlockPool
from qkv.engine.engine import Engine
from qkv.engine.params import SamplingParams
from qkv.engine.sampling import Sampler
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import QkvError

VOCAB, END = 50, 49
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """Logits that the last token decides, so that text repeats itself, and at every seventh place all tokens."""
    seed = 7
    for token in tokens if len(tokens) % 7 == 0 else tokens[-1:]:
        seed = (seed * 1_000_003 + int(token) + 1) % 2**31
    waves = np.sin(np.arange(VOCAB) * (seed % 9973 + 1.0)) * 4
    waves[END] = 3.9 if len(tokens) % 7 == 0 and seed % 9 == 0 else -9  # now and then the end
    return waves.astype(np.float32)


def expected(prompt: Sequence[int], params: SamplingParams, *, choice: int = 0, context: int = 256, guide=None):
    """(tokens, finish_reason) of a request on its own."""
    ids = list(prompt)
    sampler = Sampler(params, choice=choice, prompt_ids=ids, vocab_size=VOCAB, end_ids=[END])
    limit = min(context - len(ids), params.max_tokens or context)
    while True:
        allowed = None if guide is None else guide.allowed()
        token = sampler.choose(logits_after(ids), position=len(ids), allowed=allowed).token
        if token in params.ending_ids([END]):
            return ids[len(prompt) :], "stop"
        ids.append(token)
        if guide is not None:
            guide.push(token)
        if len(ids) - len(prompt) == limit:
            return ids[len(prompt) :], "length"


class ScriptedModel:
    """Follows `StepRunner`. `before_step(feeds)` may wait, count or raise; `spoil(ids)` says whose rows are damaged."""

    def __init__(self, blocks: int = 64, *, step_tokens: int = 512, outputs: int = 128) -> None:
        self.blocks = blocks
        self.engine: Engine | None = None
        """Whose it is."""
        self.step_tokens, self.outputs = step_tokens, outputs
        self.memory = np.full((blocks, 32), -1)
        self.steps: list[list[int]] = []
        """How many tokens each sequence had in each step."""
        self.before_step: Callable[[Sequence], None] | None = None
        self.spoil: Callable[[list[int]], bool] = lambda ids: False
        self.aborted = False

    @property
    def pool(self) -> BlockPool:
        """The blocks, as its engine keeps them."""
        assert self.engine is not None
        return self.engine.scheduler.pool

    def step(self, feeds: Sequence, *, copy: bool = True) -> np.ndarray:
        if self.before_step is not None:
            self.before_step(feeds)
        assert feeds
        assert len({id(feed.cache) for feed in feeds}) == len(feeds)
        assert 0 < sum(len(feed.ids) for feed in feeds) <= self.step_tokens
        self.steps.append([len(feed.ids) for feed in feeds])
        for feed in feeds:
            self._write(feed)
        rows = [row for feed in feeds for row in self._rows(feed)]
        assert len(rows) <= self.outputs
        for feed in feeds:
            feed.cache.length += len(feed.ids)
        self.rows = np.array(rows, np.float32).reshape(len(rows), VOCAB)
        return self.rows

    def _write(self, feed) -> None:
        for position, token in enumerate(feed.ids, feed.cache.length):
            block = feed.cache.blocks[position // 32]
            assert self.pool._users[block] == 1, "written into a block that others read"
            self.memory[block, position % 32] = token

    def _rows(self, feed) -> Iterable[np.ndarray]:
        cache, count = feed.cache, len(feed.ids)
        wanted = {"none": 0, "last": 1, "all": count}[feed.outputs]
        history = self.memory[cache.blocks].ravel()[: cache.length + count].tolist()
        assert history[cache.length :] == list(feed.ids)
        for end in range(cache.length + count - wanted + 1, cache.length + count + 1):
            row = logits_after(history[:end])
            yield row * np.float32(np.nan) if self.spoil(history[:end]) else row

    def likeliest(self) -> np.ndarray:
        return np.where(np.isfinite(self.rows).all(axis=1), self.rows.argmax(axis=1), -1)

    def abort(self) -> None:
        self.aborted = True


def engine_of(model: ScriptedModel, *, context: int = 256, **options) -> Engine:
    model.engine = Engine(model, vocabulary=Vocabulary(VOCAB), context=context, end_ids=[END], **options)
    return model.engine


def by_hand(model: ScriptedModel, **options) -> Engine:
    """An engine without a thread: `turn` is its loop's body."""
    engine = engine_of(model, **options)
    engine._thread = threading.Thread()  # never started: so that no other is
    return engine


def turn(engine: Engine) -> None:
    """Read the mail, and run a step if there is work."""
    while not engine._mail.empty():
        engine._mail.get()()
    if not engine.scheduler.idle:
        engine._step()


def run_all(engine: Engine, most: int = 5000) -> None:
    """Until nothing is left to do."""
    for _ in range(most):
        turn(engine)
        if engine.scheduler.idle and engine._mail.empty():
            return
    raise AssertionError("it does not come to an end")


def all_free(model: ScriptedModel) -> bool:
    """Whether every block has come back, within a moment of the last request's end."""
    deadline = time.monotonic() + 5
    while model.pool.free < model.pool.size and time.monotonic() < deadline:
        time.sleep(0.001)
    assert model.pool._users == [0] * model.pool.size
    return model.pool.free == model.pool.size


class BurningError(QkvError):
    """What goes wrong in these tests."""
