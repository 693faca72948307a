"""Answers: as they are made (`Chunk`, `Stream`), and when they are complete (`Completion`).

The engine's thread hands each token to a `Writer`, which makes text of it. What the reader of a stream has not taken
yet waits in a mailbox; the engine never waits for the reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from qkv.engine.engine import Engine
from qkv.engine.mailbox import Mailbox
from qkv.engine.params import SamplingParams
from qkv.engine.request import Answer, Guide, Handle, Watcher
from qkv.engine.sampling import Choice
from qkv.errors import QkvError
from qkv.text.answer.output import Delta, OutputPipeline
from qkv.text.answer.tools import ToolCall

if TYPE_CHECKING:
    from qkv.model.probe import Edits


@dataclass(frozen=True)
class Timings:
    """How long a request took. Times are in seconds."""

    prompt_tokens: int
    first_token_seconds: float
    """From the start of its first step to the first token: the whole prompt is computed in it."""
    decode_steps: int
    decode_seconds: float
    decode_bytes: float
    """Weights and cache that the decode steps read, as if it had been alone."""
    reused_tokens: int = 0
    """How many of the prompt's tokens were found in the prefix cache, and not computed again."""
    queued_seconds: float = 0.0
    """From the request to the start of its first step."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Guesses that were tried (`speculation`), and those that were right: each a token beside the step's own."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of the tokens that were computed."""
        computed = self.prompt_tokens - self.reused_tokens
        return computed / self.first_token_seconds if self.first_token_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """0 when there was no step after the first token."""
        return (self.decode_steps + self.accepted_tokens) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """1 without speculation, 0 when there was no step after the first token."""
        return (self.decode_steps + self.accepted_tokens) / self.decode_steps if self.decode_steps else 0.0

    @property
    def decode_gigabytes_per_second(self) -> float:
        """How fast weights and cache were read, in 10⁹ bytes per second."""
        return self.decode_bytes / self.decode_seconds / 1e9 if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer, whole characters only. Either text may be empty."""

    text: str
    thinking: str
    index: int = 0
    """Which of the n answers it belongs to."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that are complete with it."""
    logprobs: tuple[Choice, ...] = ()
    """The tokens that came since the answer's last chunk, if log-probabilities are asked for."""


@dataclass(frozen=True)
class Completion:
    """A finished answer; with n > 1 the first one, and `choices` has all."""

    text: str
    thinking: str
    """What the model wrote between its thinking markers; never part of `text`."""
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"]
    """"stop": an end token or a stop string; "length": max_tokens or the end of the context; "tool_calls": it ended,
    and it has calls; "repetition": it only repeated itself (`end_repetition`)."""
    seed: int
    timings: Timings
    logprobs: list[Choice] | None = None
    """Each token with its log-probability and the likeliest others, if asked for."""
    prompt_logprobs: list[float] | None = None
    """Of the prompt's tokens from the second on, if asked for; with the first of n answers."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that the model calls, if tools were given; never part of `text`."""
    stop_string: str | None = None
    """The one of `SamplingParams.stop` that ended it, if one did."""
    others: tuple[Completion, ...] = ()
    """With n > 1 the other answers to the same prompt: this one is the first of them."""

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All n answers."""
        return (self, *self.others)


class Writer:
    """Makes text of the tokens of one answer; `mailbox` gets it piece by piece, if there is one."""

    def __init__(self, pipeline: OutputPipeline, index: int, mailbox: Mailbox | None) -> None:
        self._pipeline, self._index, self._mailbox = pipeline, index, mailbox
        self._deltas: list[Delta] = []
        self._untold: list[Choice] = []  # with log-probabilities, since the last chunk

    def push(self, choice: Choice) -> bool:
        """Take a token; True if a stop string ends the text."""
        if choice.logprob is not None:
            self._untold.append(choice)
        return self._write(self._pipeline.push(choice.token)).stopped

    def finish(self, answer: Answer, timings: Timings) -> Completion:
        """No more tokens come: write what was held back; the whole answer."""
        self._write(self._pipeline.finish(cut=answer.finish_reason != "stop"), last=True)
        params = answer.params
        assert answer.finish_reason is not None and params.seed is not None
        return Completion(
            text="".join(delta.content for delta in self._deltas),
            thinking="".join(delta.thinking for delta in self._deltas),
            token_ids=answer.token_ids,
            finish_reason=self._pipeline.finish_reason(answer.finish_reason),
            seed=params.seed,
            timings=timings,
            logprobs=answer.choices if params.logprobs else None,
            prompt_logprobs=answer.prompt_logprobs if params.prompt_logprobs and not self._index else None,
            tool_calls=tuple(call for delta in self._deltas for call in delta.tool_calls),
            stop_string=self._pipeline.stops.found,
        )

    def _write(self, delta: Delta, *, last: bool = False) -> Delta:
        if delta.content or delta.thinking or delta.tool_calls or (last and self._untold):
            self._deltas.append(delta)
            logprobs, self._untold = tuple(self._untold), []
            if self._mailbox is not None:
                self._mailbox.put(Chunk(delta.content, delta.thinking, self._index, delta.tool_calls, logprobs))
        return delta


@dataclass(frozen=True)
class Request:
    """A request with everything about it checked: what it takes to start it, and to make its completion."""

    engine: Engine
    prompt_ids: list[int]
    params: SamplingParams
    pipeline: Callable[[], OutputPipeline]
    """Makes what makes text of one answer's tokens."""
    guide: Callable[[], Guide] | None
    """Makes what restricts one answer."""
    decode_bytes: Callable[[int, int], float]
    """Of a prompt's tokens and the steps after it: the bytes that these steps read."""
    edits: Edits | None = None
    watcher: Watcher | None = None
    owner: object = None
    """Kept alive until the request has ended: the model."""

    def start(self, mailbox: Mailbox, *, chunks: bool) -> Handle:
        """Queue it. The mailbox gets the handle at the end, and the chunks before if they are wanted."""
        answers = range(self.params.n)
        writers = [Writer(self.pipeline(), i, mailbox if chunks else None) for i in answers]
        guides = [] if self.guide is None else [self.guide() for _ in answers]
        return self.engine.submit(
            self.prompt_ids, self.params, guides=guides, sinks=writers, mailbox=mailbox,
            watcher=self.watcher, edits=self.edits,
        )  # fmt: skip

    def completion(self, handle: Handle) -> Completion:
        """The answers of this request, which has ended. Raises what ended it otherwise."""
        first, *others = [self._finished(handle, answer) for answer in handle.wait()]
        return replace(first, others=tuple(others))

    def _finished(self, handle: Handle, answer: Answer) -> Completion:
        writer = answer.sink
        assert isinstance(writer, Writer)
        return writer.finish(
            answer,
            Timings(
                prompt_tokens=len(answer.prompt_ids),
                first_token_seconds=answer.first_token - answer.started,
                decode_steps=answer.decode_steps,
                decode_seconds=answer.last_token - answer.first_token,
                decode_bytes=self.decode_bytes(len(answer.prompt_ids), answer.decode_steps),
                reused_tokens=answer.reused,
                queued_seconds=answer.started - handle.submitted,
                drafted_tokens=answer.drafted,
                accepted_tokens=answer.accepted,
            ),
        )


class Stream:
    """An answer as it is made: iterate it for `Chunk`s, with `for` or `async for`; `completion` is there afterwards.

    The work goes on whether it is read or not, until it ends; `close()` cancels it, and so does dropping the stream.
    """

    def __init__(self, request: Request) -> None:
        self.prompt_tokens = len(request.prompt_ids)
        self._request = request
        self._mailbox = Mailbox()
        self._ready: deque[Chunk] = deque()
        self._over = False
        self._completion: Completion | None = None
        self._handle = request.start(self._mailbox, chunks=True)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        while not self._ready:
            if self._over:
                raise StopIteration
            self._take(self._mailbox.get())
        return self._ready.popleft()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            self._take(await self._mailbox.aget())
        return self._ready.popleft()

    def _take(self, item: Chunk | Handle) -> None:
        if isinstance(item, Chunk):
            self._ready.append(item)
        elif not self._over:
            self._over = True
            completion = self._request.completion(self._handle)  # which may write the last chunks
            while (chunk := self._mailbox.get_nowait()) is not None:
                self._ready.append(chunk)
            self._completion = completion

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises `QkvError` before the stream has been read to its end."""
        if self._completion is None or self._ready:
            raise QkvError("the stream has not ended yet: read it to its end first")
        return self._completion

    def close(self) -> None:
        """Stop the work. No more chunks come, and there is no completion if it was not read to its end."""
        if self._ready:
            self._completion = None
        self._over = True
        self._ready.clear()
        self._handle.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # its start may have failed
            self._handle.cancel(at_once=False)
