"""The loop that turns prompts into more tokens. Ids only: the engine never sees text.

One thread runs it. Others send requests (`submit`) and read what happened; the loop never waits for them: what it
computes next depends on tokens alone, and readers get theirs through a sink or at the end. With nothing to do it
sleeps.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qkv.engine.blocks import BlockPool
from qkv.engine.logprobs import token_logprobs
from qkv.engine.mailbox import Mailbox
from qkv.engine.params import MAX_SEED, SamplingParams
from qkv.engine.prefix import CacheStats
from qkv.engine.repetition import Repetition
from qkv.engine.request import Answer, FinishReason, Guide, Handle, Sink, Watcher
from qkv.engine.sampling import Sampler
from qkv.engine.scheduler import Scheduler, Slice
from qkv.engine.session import StepRunner
from qkv.engine.speculation import Lookup
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import ContextLengthError, ParameterError, QkvError, QueueFullError, RequestCancelledError
from qkv.kernels.sizes import BLOCK
from qkv.model.feed import CacheOverflowError, StepAbortedError

if TYPE_CHECKING:
    from qkv.model.probe import Edits
    from qkv.model.readback import Tapped

MAX_QUEUE = 1024


@dataclass(frozen=True)
class Stats:
    """What the engine is doing."""

    running: int
    """Answers that take part in the steps."""
    waiting: int
    """Answers that wait for their turn."""
    preemptions: int
    """How often an answer had to give its blocks up, and wait again, since the start."""
    cache: CacheStats


class Engine:
    """Runs requests on a model of this vocabulary with room for `context` positions.

    max_queue: how many answers may wait for their turn. speculation: whether to guess tokens (see `lookup`).
    """

    def __init__(
        self,
        model: StepRunner,
        *,
        vocabulary: Vocabulary,
        context: int,
        end_ids: Iterable[int],
        max_queue: int = MAX_QUEUE,
        speculation: bool = False,
        name: str = "the model",
    ) -> None:
        self.model, self.vocabulary, self.name = model, vocabulary, name
        self.context = min(context, model.blocks * BLOCK)
        self.end_ids = frozenset(end_ids)
        self.max_queue, self.speculation = max_queue, speculation
        self._closed = False
        self._begin_anew()
        _engines.add(self)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(BlockPool(self.model.blocks), step_tokens=self.model.step_tokens, rows=self.model.outputs)

    def _begin_anew(self) -> None:
        self.scheduler = self._new_scheduler()
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._handle_of: dict[Answer, Handle] = {}  # of those that have not ended
        self._in_step: list[Handle] = []  # whose tokens are being computed now
        self._lock = threading.Lock()  # guards the start and the end of the thread
        self._thread: threading.Thread | None = None

    # -------------------------------------------------------------------------------------- from any thread

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain integers. Raises `ParameterError` or `ContextLengthError` for what cannot be run."""
        if not len(prompt_ids):
            raise ParameterError("prompt is empty: there is nothing to continue; give at least one token")
        if len(prompt_ids) >= self.context:
            raise ContextLengthError(
                f"prompt has {len(prompt_ids)} tokens and the context holds {self.context}: "
                "no room for an answer; shorten the prompt"
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                self.vocabulary.check(name, token)
        return [self.vocabulary.check("prompt", token) for token in prompt_ids]

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        guides: Sequence[Guide | None] = (),
        sinks: Sequence[Sink | None] = (),
        mailbox: Mailbox | None = None,
        watcher: Watcher | None = None,
        edits: Edits | None = None,
    ) -> Handle:
        """Queue a request; one guide and one sink for each of its n answers, or none. `mailbox` gets it at its end.

        `watcher` looks into the first answer; `edits` change what is computed for all of them.
        Raises what `check` raises, `QueueFullError`, and `QkvError` after `close`; nothing is queued then.
        """
        ids = self.check(prompt_ids, params)
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        none: list[None] = [None] * params.n
        brought = zip(range(params.n), guides or none, sinks or none, strict=True)
        answers = [self._answer(ids, params, choice, guide, sink) for choice, guide, sink in brought]
        for answer in answers:
            answer.edits = edits
        if watcher is not None:
            answers[0].watcher, answers[0].lookup = watcher, None
        handle = Handle(answers, mailbox, self._cancel)
        with self._lock:
            if self._closed:
                raise QkvError(f"{self.name} has been closed")
            waiting = self._mail.qsize() + len(self.scheduler.waiting)
            if waiting + params.n > self.max_queue:
                raise QueueFullError(
                    f"{waiting} answers are waiting and the queue holds {self.max_queue}: try again later"
                )
            handle.submitted = time.perf_counter()
            self._handle_of.update(dict.fromkeys(answers, handle))
            self._mail.put(partial(self._begin, handle))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qkv-engine", daemon=True)
                self._thread.start()
        return handle

    def _answer(
        self, ids: list[int], params: SamplingParams, choice: int, guide: Guide | None, sink: Sink | None
    ) -> Answer:
        room = self.context - len(ids)
        return Answer(
            choice=choice,
            prompt_ids=ids,
            params=params,
            sampler=Sampler(
                params, choice=choice, prompt_ids=ids, vocab_size=self.vocabulary.size, end_ids=self.end_ids
            ),
            guide=guide,
            sink=sink,
            lookup=Lookup() if self.speculation else None,
            repetition=Repetition() if params.end_repetition else None,
            ending=params.ending_ids(self.end_ids),
            limit=min(room, params.max_tokens or room),
        )

    def _cancel(self, handle: Handle, at_once: bool) -> None:
        self._mail.put(partial(self._end_cancelled, handle))
        in_step = self._in_step
        if at_once and in_step and all(one.cancelled for one in in_step):
            self.model.abort()  # if that is another step by now, it is run again

    def stats(self) -> Stats:
        """The counters now."""
        unfinished = [answer for answer in list(self._handle_of) if answer.finish_reason is None]
        running = len(self.scheduler.running)
        cache = self.scheduler.prefix.stats()
        return Stats(running, max(0, len(unfinished) - running), self.scheduler.preemptions, cache)

    @property
    def healthy(self) -> bool:
        """Whether it takes requests: it has not been closed, and its thread has not died."""
        thread = self._thread
        return not self._closed and (thread is None or thread.is_alive())

    def close(self) -> None:
        """End the thread, and every request with an error. Calling it twice is fine."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._mail.put(lambda: None)
            while thread.is_alive():
                self.model.abort()  # again and again: it may just be between two steps
                thread.join(timeout=0.02)

    # -------------------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._read_mail()
                if not self._closed and not self.scheduler.idle:
                    self._step()
            except BaseException as error:  # a defect, here or in a plan: whoever waits must hear of it
                self._end_all(QkvError(f"the engine failed: {type(error).__name__}: {error}"), error)
        self._end_all(QkvError(f"{self.name} has been closed"))

    def _end_all(self, failure: QkvError, cause: BaseException | None = None) -> None:
        """End every request, and forget everything."""
        failure.__cause__ = cause
        handles = set(self._handle_of.values())
        self._handle_of.clear()
        self.scheduler = self._new_scheduler()
        for handle in handles:
            handle.end(failure)

    def _read_mail(self) -> None:
        """Do what the others have asked for; if there is nothing else to do, wait until they ask."""
        if self.scheduler.idle:
            self._mail.get()()
        while not self._mail.empty():
            self._mail.get()()

    def _begin(self, handle: Handle) -> None:
        if not handle.ended:
            for answer in handle.answers:
                self.scheduler.add(answer)

    def _end_cancelled(self, handle: Handle) -> None:
        if not handle.ended:
            self._fail(handle, RequestCancelledError("the request was cancelled"))

    def _fail(self, handle: Handle, error: BaseException) -> None:
        """End a request. Nothing it computed stays in the cache."""
        for answer in handle.answers:
            self.scheduler.remove(answer)
            self.scheduler.prefix.withdraw(answer)
        self._end(handle, error)

    def _end(self, handle: Handle, error: BaseException | None = None) -> None:
        for answer in handle.answers:
            del self._handle_of[answer]
        handle.end(error)

    def _step(self) -> None:
        """Run one step, and choose the next tokens."""
        started = time.perf_counter()
        plan = self.scheduler.plan()
        for piece in plan:
            piece.answer.started = piece.answer.started or started
        assert plan, "a lone request always finds room: its context is no larger than the cache"
        try:
            self._in_step = [self._handle_of[piece.answer] for piece in plan]
            feeds = [piece.feed for piece in plan]
            logits = self.model.step(feeds, copy=False)
        except StepAbortedError:
            return  # for a cancel or a close, which the mail tells of
        except CacheOverflowError as error:
            self._fail_overflowed([plan[i] for i in error.feeds], error)
            return  # the others run again
        except Exception as error:
            self._fail_step(plan, error)
            return
        finally:
            self._in_step = []
        self.scheduler.record(time.perf_counter() - started)
        logits, likeliest = self.vocabulary.only_tokens(logits, self.model.likeliest().tolist())
        row = 0
        for i, piece in enumerate(plan):
            outputs, count = piece.feed.outputs, len(piece.feed.ids)
            first, row = row, row + (1 if outputs == "last" else count if outputs == "all" else 0)
            if piece.answer in self._handle_of:  # another of its request's answers may have failed just now
                tapped = self.model.tapped(feeds, i) if piece.feed.taps else None
                self._go_on(piece, logits[first:row], likeliest[first:row], tapped)

    def _fail_overflowed(self, pieces: list[Slice], error: CacheOverflowError) -> None:
        """End those whose keys or values do not fit the cache. Drafts may be why, so these first go on without."""
        for piece in pieces:
            if piece.drafts:
                piece.answer.lookup = None
        if certain := [piece for piece in pieces if not piece.drafts]:
            self._fail_step(certain, error)

    def _fail_step(self, plan: list[Slice], error: Exception) -> None:
        """End those whose step it was."""
        text = str(error) if isinstance(error, QkvError) else f"the step failed: {type(error).__name__}: {error}"
        for handle in {self._handle_of[piece.answer]: None for piece in plan}:
            failure = QkvError(text)
            failure.__cause__ = error
            self._fail(handle, failure)

    def _go_on(self, piece: Slice, rows: NDArray[np.float32], likeliest: list[int], tapped: Tapped | None) -> None:
        """Take the results of an answer's part of a step. Whatever fails in that ends its request, and no other."""
        try:
            if tapped is not None and piece.answer.watcher is not None:
                piece.answer.watcher.take(piece.answer.cache.length - len(piece.feed.ids), tapped)
            reason = self._take(piece, rows, likeliest)
        except BaseException as error:
            self._fail(self._handle_of[piece.answer], error)
            return
        answer = piece.answer
        self.scheduler.prefix.publish(answer)
        if reason is None:
            return
        answer.finish_reason = reason
        self.scheduler.remove(answer)
        handle = self._handle_of[answer]
        if all(other.finish_reason for other in handle.answers):
            self._end(handle)

    def _take(self, piece: Slice, rows: NDArray[np.float32], likeliest: list[int]) -> FinishReason | None:
        """Check the rows, and choose the next token if they say what it may be, or several if drafts were right."""
        answer, drafts = piece.answer, piece.drafts
        if -1 in likeliest:
            raise QkvError("the model computed a value that is not a number: its weights are damaged")
        if answer.reads_its_prompt:
            self._read_prompt(answer, rows, len(piece.feed.ids))
        if answer.cache.length < len(answer.ids):
            return None  # there is more of its text to run
        complete = len(answer.ids)
        reason = None
        last = -1 - len(drafts)
        for row, best, draft in zip(rows[last:], likeliest[last:], [*drafts, None], strict=True):
            reason = self._choose(answer, row, best)
            if reason is not None or answer.ids[-1] != draft:
                break
            complete += 1  # the draft was what comes: its keys and values are right, and the next row is too
        self._count_step(answer, len(drafts), complete)
        return reason

    def _choose(self, answer: Answer, row: NDArray[np.float32], likeliest: int) -> FinishReason | None:
        """Choose one token; why the answer ends with it, if it does."""
        guide = answer.guide
        allowed = None if guide is None else guide.allowed()
        choice = answer.sampler.choose(row, position=len(answer.ids), allowed=allowed, likeliest=likeliest)
        if choice.token in answer.ending:
            return "stop"
        if guide is not None:
            guide.push(choice.token)
        answer.append(choice)
        if answer.sink is not None and answer.sink.push(choice):
            return "stop"
        if answer.repetition is not None and answer.repetition.push(choice.token):
            return "repetition"
        return "length" if len(answer.token_ids) == answer.limit else None

    def _count_step(self, answer: Answer, drafts: int, complete: int) -> None:
        """Keep of the cache what is right: `complete` positions. Note times and drafts."""
        accepted = complete - (answer.cache.length - drafts)
        answer.cache.length = complete
        answer.last_token = time.perf_counter()
        if not answer.first_token:
            answer.first_token = answer.last_token
            self.scheduler.prefix.count(answer)
        else:
            answer.decode_steps += 1
        if drafts:
            assert answer.lookup is not None
            answer.drafted += drafts
            answer.accepted += accepted
            answer.lookup.learn(len(answer.ids), drafts, accepted)

    def _read_prompt(self, answer: Answer, rows: NDArray[np.float32], count: int) -> None:
        """Note the log-probabilities of the prompt's tokens: a position's row is about the token after it."""
        start = answer.cache.length - count
        following = answer.prompt_ids[start + 1 : start + 1 + count]
        known = len(answer.prompt_logprobs) - start  # more than none after a preemption
        wanted = np.array(following[known:], np.int64)
        answer.prompt_logprobs += token_logprobs(rows[known : len(following)], wanted).tolist()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    """At exit: no thread may be in a step when the interpreter goes."""
    for engine in list(_engines):
        engine.close()


def _after_fork() -> None:
    """In a forked child the engine's thread does not exist: what was running goes on in the parent alone."""
    for engine in list(_engines):
        handle_of = engine._handle_of
        engine._begin_anew()
        engine._handle_of = handle_of
        for handle in handle_of.values():
            handle.forked()
        engine._end_all(QkvError("this request runs in the process that this one was forked from"))


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
