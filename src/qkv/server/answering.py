"""From a request to its answer: the only module that talks to the `LLM`.

All APIs are translated to an `Ask`, and what comes of it is one kind of stream: an `Answer` gives `Chunk`s and at the
end the `Completion`. Templates, tokenization and grammars run in threads of their own, never on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from qkv.engine.params import SamplingParams
from qkv.errors import QueueFullError
from qkv.llm import LLM, Chunk, Completion, Stream
from qkv.server.errors import ApiError
from qkv.server.metrics import Metrics
from qkv.server.settings import Settings

T = TypeVar("T")
log = logging.getLogger("qkv.server")
PREPARING_THREADS = 2


@dataclass(frozen=True)
class Ask:
    """One request to the model, whatever API it came by: a conversation, or a prompt.

    thinking: on, off, or as the model's template has it; a model that cannot think ignores it.
    variables: what the model's chat template reads besides. one_call: the answer ends after its first tool call.
    """

    params: SamplingParams
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | list[int] = ""
    thinking: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    one_call: bool = False


class Answer:
    """The answers to one or more asks, as they are made: iterate it once, then `completions` has them all.

    `prompts` has the first completion of each ask. A chunk's `index` counts the choices of all asks. `close` stops the
    work, at any time, as often as you like.
    """

    def __init__(self, asks: Sequence[Ask], streams: Sequence[Stream], metrics: Metrics, asked: float) -> None:
        self.asks = asks
        self.prompt_tokens = sum(stream.prompt_tokens for stream in streams)
        self.completions: list[Completion] = []
        self._streams, self._metrics, self._asked = streams, metrics, asked
        self.prompts: list[Completion] = []
        self._failure: Exception | None = None
        self._first: float | None = None
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """All run together; those of the second ask are told when the first is complete."""
        before = 0
        try:
            for ask, stream in zip(self.asks, self._streams, strict=True):
                async for chunk in stream:
                    if self._first is None:
                        self._first = time.perf_counter()
                        self._metrics.first_token.observe(self._first - self._asked)
                    yield replace(chunk, index=before + chunk.index) if before else chunk
                before += ask.params.n
            if self._failure is not None:
                raise self._failure
            self.prompts = [stream.completion for stream in self._streams]
            self.completions = [completion for first in self.prompts for completion in first.choices]
        except Exception as error:
            self._failure = error
            raise

    async def read(self) -> list[Completion]:
        """Wait for the end: the completions."""
        async for _ in self:
            pass
        return self.completions

    def end(self, failure: ApiError) -> None:
        """Stop the work; whoever reads it gets the failure."""
        self._failure = failure
        for stream in self._streams:
            stream.close()

    def close(self) -> None:
        """Stop what still runs, and count how it went."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.close()
        outcome = "answered" if self.prompts else "failed" if self._failure else "cancelled"
        self._metrics.count(self.prompts, outcome, time.perf_counter() - self._asked)


class Answerer:
    """Starts answers on a model, and knows those that run."""

    def __init__(self, llm: LLM, settings: Settings, metrics: Metrics) -> None:
        self.llm = llm
        self.stopping = False
        self._settings, self._metrics = settings, metrics
        self._preparing = 0
        self._open: set[Answer] = set()
        self._pool = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="qkv-prepare")
        self._pool.submit(llm.prepare_grammars)  # where this fails, a request with a grammar tells why

    @property
    def healthy(self) -> bool:
        """Whether it can answer."""
        return self.llm.healthy and not self.stopping

    @property
    def open(self) -> int:
        """How many requests are being prepared or answered."""
        self._open = {answer for answer in self._open if not answer._closed}
        return self._preparing + len(self._open)

    async def start(self, *asks: Ask) -> Answer:
        """Queue what is asked. Everything that can be wrong with it is raised here."""
        asked = time.perf_counter()
        streams: list[Stream] = []
        try:
            for ask in asks:
                streams.append(await self.prepare(partial(self._stream, ask)))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        answer = Answer(asks, streams, self._metrics, asked)
        self._open.add(answer)
        return answer

    async def prepare(self, work: Callable[[], T]) -> T:
        """Run `work` in another thread, for so long at most. A stream that comes too late is closed."""
        if self.stopping:
            raise ApiError("the server is stopping; ask again soon", 503, code="stopping")
        if self.open >= self._settings.max_waiting:
            raise QueueFullError(f"{self.open} requests wait or run, and no more may; try again later")
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._preparing += 1
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._settings.prepare_seconds)
        except (TimeoutError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            future.add_done_callback(_close_late)
            if isinstance(error, asyncio.CancelledError):
                raise
            seconds = self._settings.prepare_seconds
            raise ApiError(f"the request was not understood within {seconds:g} s; send a simpler one", 503) from None
        finally:
            self._preparing -= 1

    def _stream(self, ask: Ask) -> Stream:
        if self._settings.log_prompts:
            log.info("asked: %r", ask.prompt if ask.messages is None else ask.messages)
        if ask.messages is None:
            return self.llm.stream(ask.prompt, ask.params)
        params, thinking = ask.params, ask.thinking
        if not self.llm.can_think:
            params, thinking = replace(params, thinking_budget=None), None
        return self.llm.stream_chat(
            ask.messages,
            params,
            thinking=thinking,
            tools=ask.tools,
            tool_choice=ask.tool_choice,
            parallel_tool_calls=not ask.one_call,
            template_variables=ask.variables,
        )

    async def prompt_ids(self, ask: Ask) -> list[int]:
        """The token ids of a conversation as the model would get it."""
        thinking = ask.thinking if self.llm.can_think else None
        asked = partial(self.llm.chat_ids, ask.messages or [], thinking=thinking, tools=ask.tools)
        return await self.prepare(partial(asked, template_variables=ask.variables))

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text; special: with what the tokenizer puts before a prompt."""
        tokenizer = self.llm.tokenizer
        return await self.prepare(lambda: tokenizer.prompt(text) if special else tokenizer.encode(text))

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        size = self.llm.tokenizer.vocab_size
        for at, id in enumerate(ids):
            if id >= size:
                raise ApiError(f"tokens[{at}]: {id} is not a token id; ids go from 0 to {size - 1}", param="tokens")
        return await self.prepare(lambda: self.llm.tokenizer.decode(ids, skip_special=False))

    def stop(self) -> None:
        """Refuse new requests; end those that still run when the time for it is over."""
        self.stopping = True
        asyncio.get_running_loop().call_later(self._settings.stop_seconds, self._end_all)

    def close(self) -> None:
        """End the threads. Running answers are stopped."""
        self._end_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end_all(self) -> None:
        for answer in self._open:
            answer.end(ApiError("the server has stopped", 503, code="stopping"))

    def thinking_tokens(self, completion: Completion) -> int:
        """How many of its tokens are thinking, the markers among them."""
        opening, closing = self.llm.tokenizer.id("<think>"), self.llm.tokenizer.id("</think>")
        markers = [token for token in completion.token_ids if token in (opening, closing)]
        if not markers:
            return len(completion.token_ids) if completion.thinking else 0
        inside, count = markers[0] == closing, 0
        for token in completion.token_ids:
            inside = inside or token == opening
            count += inside
            inside = inside and token != closing
        return count


def _close_late(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None and isinstance(future.result(), Stream):
        future.result().close()
