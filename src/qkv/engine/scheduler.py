"""Who runs next: requests join and leave the batch at any step.

A step first takes one token of every answer that is being decoded, then pieces of prompts, first come first served.
While anything is decoding, a piece is no larger than what takes about `STEP_SECONDS`, so that nobody's words stop for
long. When the blocks of the cache run out, the youngest gives its own back and returns to the front of the queue; it
keeps its tokens, and its text is run again later.

This is logic alone: no thread, no clock, no model. The engine asks for a `plan`, runs it, and says how it went.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from qkv.engine.blocks import BlockPool
from qkv.engine.prefix import PrefixCache
from qkv.engine.request import Answer
from qkv.kernels.sizes import BLOCK, blocks_for
from qkv.model.feed import Feed

STEP_SECONDS = 0.15
"""How long a step may take while anything is decoding."""
FEWEST_TOKENS = 16
"""… but it takes so many tokens of a prompt even on the slowest machine."""
FIRST_GUESS = 64
"""How many tokens a step of that length takes, before there was one."""
MOST_RUNNING = 64
MOST_GUESSING = 12
"""No drafts make a step longer than so many tokens. The more answers share a step, the more a token adds to its time:
alone, three guesses cost about half a step; beside fifteen others, they cost more than they bring."""


class Slice(NamedTuple):
    """An answer's part of a step: its feed ends in the drafts, which are guesses of what comes next."""

    answer: Answer
    feed: Feed
    drafts: list[int]


class Scheduler:
    """Plans steps of at most `step_tokens` tokens and `rows` rows of logits over the blocks of `pool`."""

    def __init__(self, pool: BlockPool, *, step_tokens: int, rows: int, most_running: int = MOST_RUNNING) -> None:
        self.pool, self.prefix = pool, PrefixCache(pool)
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        """Oldest first."""
        self.preemptions = 0
        self._step_tokens, self._rows = step_tokens, rows
        self._most_running = min(most_running, rows)
        self._tokens_per_second = FIRST_GUESS / STEP_SECONDS
        self._prompt_tokens = 0  # in the newest plan

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def add(self, answer: Answer) -> None:
        """Queue an answer."""
        self.waiting.append(answer)

    def remove(self, answer: Answer) -> None:
        """Forget an answer, wherever it is, and take its blocks back."""
        if answer in self.running:
            self.running.remove(answer)
        elif answer in self.waiting:
            self.waiting.remove(answer)
        self._release(answer)

    def record(self, seconds: float) -> None:
        """Learn from the step that was planned last how fast prompts are computed."""
        if self._prompt_tokens >= FEWEST_TOKENS and seconds > 0:
            self._tokens_per_second += 0.5 * (self._prompt_tokens / seconds - self._tokens_per_second)

    def plan(self) -> list[Slice]:
        """What the next step computes; empty if there is nothing to do, or nobody can go on whatever is given up."""
        while True:
            plan = self._decodes()
            self._add_prompts(plan)
            if plan or len(self.running) <= 1:
                return plan
            self._preempt()  # prompts that together fill the cache wait for each other: the older ones go first

    # -------------------------------------------------------------------------------------- decoding

    def _decodes(self) -> list[Slice]:
        plan: list[Slice] = []
        at = 0
        spare = min(self._rows, MOST_GUESSING) - len(self.running)
        while at < len(self.running):
            answer = self.running[at]
            if answer.remaining == 1 and self._make_room(answer):
                drafts = self._drafts(answer, spare) if answer.lookup is not None else []
                spare -= len(drafts)
                ids = [answer.ids[-1], *drafts]
                plan.append(Slice(answer, answer.feed(ids, "all" if drafts else "last"), drafts))
            at += 1
        return plan

    def _make_room(self, answer: Answer) -> bool:
        """Have a block for one more position. The youngest give theirs up; False if this is the youngest itself."""
        cache = answer.cache
        while cache.length == len(cache.blocks) * BLOCK and not self.pool.free:
            if self._preempt() is answer:
                return False
        self.pool.grow(cache, cache.length + 1)
        return True

    def _preempt(self) -> Answer:
        youngest = self.running.pop()
        self._release(youngest)
        if not youngest.token_ids:
            youngest.reused = 0  # what it finds again it computed itself
        self.waiting.appendleft(youngest)
        self.preemptions += 1
        return youngest

    def _release(self, answer: Answer) -> None:
        self.pool.release(answer.cache)
        answer.looked_at = 0

    def _drafts(self, answer: Answer, most: int) -> list[int]:
        """Guesses that can still become part of the answer, and for which there is room without taking anyone's."""
        assert answer.lookup is not None
        cache = answer.cache
        room = (len(cache.blocks) + min(self.pool.free, 1)) * BLOCK - cache.length - 1
        most = min(most, room, answer.limit - len(answer.token_ids) - 1)
        drafts = answer.lookup.propose(answer.ids, most) if most > 0 else []
        self.pool.grow(cache, cache.length + 1 + len(drafts))
        return drafts

    # -------------------------------------------------------------------------------------- prompts

    def _add_prompts(self, plan: list[Slice]) -> None:
        self._prompt_tokens = 0
        left = self._step_tokens - sum(len(work.feed.ids) for work in plan)
        if plan:
            left = min(left, max(FEWEST_TOKENS, int(self._tokens_per_second * STEP_SECONDS)))
        rows = self._rows - sum(1 + len(work.drafts) for work in plan)
        coming: set[bytes] = set()  # blocks that an older prompt is going to compute
        for answer in self._prompts():
            if left <= 0 or rows <= 0:
                return
            self.prefix.adopt(answer)
            key = self.prefix.next_key(answer)
            if key is None or key not in coming:
                count = self._piece(answer, left, rows)
                if count:
                    plan.append(self._prompt_slice(answer, count))
                    self._prompt_tokens += count
                    left -= count
                    rows -= count if answer.reads_its_prompt else 1
            if self.waiting or answer is not self.running[-1]:
                coming.update(self.prefix.keys_to_come(answer))

    def _prompts(self) -> Iterator[Answer]:
        """Those that run and have more than their newest token to compute, then those that can join."""
        for answer in list(self.running):
            if answer.remaining > 1:
                yield answer
        while self.waiting and len(self.running) < self._most_running and self._fits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            yield self.running[-1]

    def _fits(self, answer: Answer) -> bool:
        """Whether its whole text finds room beside what the others still need and a block more for each."""
        if not self.running:
            return True
        needed = blocks_for(len(answer.ids)) - self.prefix.shared_blocks(answer) + len(self.running)
        for other in self.running:
            needed += max(0, blocks_for(len(other.ids)) - len(other.cache.blocks))
        return needed <= self.pool.free

    def _piece(self, answer: Answer, left: int, rows: int) -> int:
        """How many tokens of its text to run now; a piece ends with a block where it can."""
        cache = answer.cache
        room = (len(cache.blocks) + self.pool.free) * BLOCK - cache.length
        count = min(answer.remaining, left, room, rows if answer.reads_its_prompt else left)
        end = cache.length + count
        if count < answer.remaining and end // BLOCK * BLOCK > cache.length:
            count = end // BLOCK * BLOCK - cache.length
        return count

    def _prompt_slice(self, answer: Answer, count: int) -> Slice:
        cache = answer.cache
        end = cache.length + count
        self.pool.grow(cache, end)
        outputs = "all" if answer.reads_its_prompt else "last" if end == len(answer.ids) else "none"
        return Slice(answer, answer.feed(answer.ids[cache.length : end], outputs), [])  # type: ignore[arg-type]
