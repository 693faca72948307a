"""The front door: a model by name, and text in, text out.

Text becomes ids (`qkv.text`), ids become more ids (`qkv.engine`), ids become text again (`qkv.text.answer.output`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

from qkv.batch import Requests
from qkv.checks import whole
from qkv.completion import Chunk, Completion, Request, Stream, Timings
from qkv.engine.engine import MAX_QUEUE, Engine, Stats
from qkv.engine.params import SamplingParams, model_defaults
from qkv.engine.prefix import CacheStats
from qkv.engine.scoring import Score, score
from qkv.errors import ParameterError, QkvError
from qkv.kernels.sizes import CACHE_KINDS
from qkv.look.edits import Edit, compiled
from qkv.look.look import Look
from qkv.look.names import numbers
from qkv.look.readout import Readout
from qkv.look.recorder import Recorder
from qkv.model.compiled import CompiledDecoder, kv_block_bytes, pool_blocks
from qkv.model.config import ModelConfig
from qkv.model.cost import decode_bytes
from qkv.opened import open_model, thread_count
from qkv.progress import Progress, silent
from qkv.text.answer.output import OutputPipeline
from qkv.text.answer.thinking import ThinkingSplit
from qkv.text.constrain.guides import Guides
from qkv.text.constrain.toolchoice import ToolChoice, Tools, may_call
from qkv.text.prompt.template import encode_chat, free_variables
from qkv.weights.choices import check_format

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LLM", "Chunk", "Completion", "Score", "Stream", "Timings"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Edits = Edit | Sequence[Edit]

STEP_ROWS = 128
"""The most rows of logits of a step: one for each answer that runs, and more for guessed tokens and prompt logprobs."""
SPECULATION = (None, "prompt")


class ChatOptions(TypedDict, total=False):
    """What the answers to a conversation may be given beside `SamplingParams`."""

    thinking: bool | None
    """Turns a thinking model's thinking on or off; None leaves it to the model's template."""
    tools: Tools | None
    """Functions that the model may call, as OpenAI clients send them."""
    tool_choice: ToolChoice
    """Whether it must: "auto", "none", "required" or {"type": "function", "function": {"name": …}}."""
    parallel_tool_calls: bool
    """False ends the answer after its first call."""
    template_variables: Mapping[str, Any] | None
    """What the model's chat template reads besides."""
    edit: Edits
    """Changes of what the model computes: see `qkv.look.edits`."""


class LLM:
    """A model ready to answer.

        with LLM("smollm2") as llm:
            print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)

    `model` is a hub id, a short tag, a .gguf file or a folder; it is fetched when it is not here yet.

    weights: "int8", "int4", "bf16" or "f32"; None keeps a GGUF file's own 4- and 8-bit matrices and makes others int8.
    cache: how keys and values are kept, "f16", "int8" or "f32".
    threads: how many cores to use; None is those this process may use.
    context: the most positions a request may use; None is the model's own maximum.
    cache_bytes: memory for keys and values, of running requests and of what is kept of earlier ones for later ones that
        begin alike; None is a quarter of the memory that is free, but no less than one context and no more than eight.
    speculation: "prompt" guesses tokens from what the text already has; it changes the speed and no token.
    max_queue: how many answers may wait for their turn; more are a `QueueFullError`.

    Requests from any number of threads or coroutines run together.
    Raises a `QkvError` for anything wrong with the name, the files or a value.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        weights: str | None = None,
        cache: str = "f16",
        threads: int | None = None,
        context: int | None = None,
        cache_bytes: int | None = None,
        speculation: str | None = None,
        max_queue: int = MAX_QUEUE,
        progress: Progress = silent,
    ) -> None:
        self.name = str(model)
        check_format(weights)
        self.threads = thread_count(threads)
        opened = open_model(self.name, progress)
        self.config = opened.config
        self.cache = _cache(cache, self.config)
        self.context = _context(context, self.config.max_position_embeddings)
        if speculation not in SPECULATION:
            raise ParameterError(f'speculation must be None or "prompt", got {speculation!r}')
        max_queue = whole("max_queue", max_queue, 1)
        pool_blocks(self.config, self.cache, self.context, cache_bytes)  # raises for too few bytes, before loading
        self.tokenizer, self._template = opened.tokenizer, opened.template
        self._generation_config = opened.generation_config
        loaded = opened.load(weights, threads=self.threads, progress=progress)
        self.load_report = loaded.report
        self.weight_bytes = loaded.weights.bytes_per_token
        decoder = CompiledDecoder(
            self.config,
            loaded.weights,
            cache=cache,
            context=self.context,
            threads=self.threads,
            outputs=STEP_ROWS,
            cache_bytes=cache_bytes,
            progress=progress,
        )
        self._decoder = decoder
        end_ids = [id for id in opened.end_ids if id in opened.vocabulary]
        self._engine = Engine(
            decoder,
            vocabulary=opened.vocabulary,
            context=self.context,
            end_ids=end_ids,
            max_queue=max_queue,
            speculation=speculation == "prompt",
            name=self.name,
        )
        self._guides = Guides(self.tokenizer, vocab_size=self.config.vocab_size, end_ids=end_ids)
        self._end = weakref.finalize(self, _end, self._engine, decoder)
        self._end.atexit = False  # the engine has its own

    # -------------------------------------------------------------------------------------- whole answers

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a sequence of str; the first match counts
        self, prompt: Prompt, params: SamplingParams | None = None, *, edit: Edits = (), progress: Progress = silent
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: Params = None, *, edit: Edits = (), progress: Progress = silent
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: Params = None, *, edit: Edits = (), progress: Progress = silent
    ) -> Completion | list[Completion]:
        """Continue a text or a list of token ids.

        A list of such prompts gives a list of completions, in order; they run together. `params` is then one for all or
        a list of as many; `progress` hears of each that is complete. All are checked before any runs. An error in one
        of them, and Ctrl-C, cancels the others. `edit` changes what the model computes for them: see `qkv.look.edits`.
        """
        completions = self._requests(prompt, params, edit, progress).run()
        return completions[0] if _is_one(prompt) else completions

    async def agenerate(
        self, prompt: Prompt | Sequence[Prompt], params: Params = None, *, edit: Edits = (), progress: Progress = silent
    ) -> Completion | list[Completion]:
        """Like `generate`, for coroutines. Cancelling the task cancels the requests.

        Here, and in the other coroutines, all preparing is done in another thread: the event loop goes on.
        """
        requests = await asyncio.to_thread(self._requests, prompt, params, edit, progress)
        completions = await requests.arun()
        return completions[0] if _is_one(prompt) else completions

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """Answer a conversation: messages as OpenAI clients send them, {"role": …, "content": …}.

        options: `thinking`, `tools`, `tool_choice`, `template_variables` and `edit`, see `ChatOptions`.
        """
        return Requests([self._chat_request(messages, params, **options)]).run()[0]

    async def achat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """Like `chat`, for coroutines. Cancelling the task cancels the request."""
        request = await asyncio.to_thread(self._chat_request, messages, params, **options)
        return (await Requests([request]).arun())[0]

    # -------------------------------------------------------------------------------------- answers in pieces

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, edit: Edits = ()) -> Stream:
        """Like `generate` for one prompt, piece by piece: `for chunk in stream`, or `async for` in a coroutine.

        A bad request raises here, before the first piece. The work starts at once. Log-probabilities of the whole
        answer are in `completion`, when the stream has ended. In a coroutine `await astream(…)` gives the same stream.
        """
        if not _is_one(prompt):
            raise ParameterError("prompt: a stream is of one prompt; generate() takes a list of them")
        return Stream(self._prompt_request(prompt, params, edit))

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None, *, edit: Edits = ()) -> Stream:
        """Like `stream`, for coroutines: `async for chunk in await llm.astream(…)`."""
        return await asyncio.to_thread(self.stream, prompt, params, edit=edit)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Like `chat`, piece by piece. In a coroutine `await astream_chat(…)` gives the same stream."""
        return Stream(self._chat_request(messages, params, **options))

    async def astream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Like `stream_chat`, for coroutines: `async for chunk in await llm.astream_chat(…)`."""
        return await asyncio.to_thread(self.stream_chat, messages, params, **options)

    # -------------------------------------------------------------------------------------- texts that are there

    def score(
        self,
        text: Prompt,
        *,
        window: int | None = None,
        stride: int | None = None,
        progress: Progress = silent,
    ) -> Score:
        """How likely the model finds a text or a list of token ids: each token's log-probability, and the perplexity.

        A text longer than `window` tokens (None: as many as the context holds, but one) is scored in windows that
        begin `stride` tokens apart (None: half a window); each token is scored once, in the first that has it. The
        first token has no log-probability (None): nothing comes before it.
        """
        if not isinstance(text, Sequence):
            raise ParameterError(f"text must be a text or a list of token ids, not {type(text).__name__}")
        if not _is_one(text):
            raise ParameterError("text: one text or one list of token ids at a time, not a list of texts")
        ids = self.tokenizer.prompt(text) if isinstance(text, str) else list(text)
        return score(self._engine, ids, window=window, stride=stride, progress=progress)

    def look(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        generate: int = 0,
        **options: Unpack[ChatOptions],
    ) -> Look:
        """What these layers and heads (None: all) have inside while the model reads a text or a conversation.

        It also answers with up to `generate` tokens, always the likeliest, and looks at those too. The engine computes
        what it always computes, beside its other requests; numbers are copied, and none is changed but by `edit`.
        `options` are those of `chat`; all but `edit` are for conversations.
        """
        edit = options.pop("edit", ())
        chosen_layers = numbers("layers", layers, self.config.num_hidden_layers)
        chosen_heads = numbers("heads", heads, self.config.num_attention_heads)
        params = SamplingParams(temperature=0, max_tokens=whole("generate", generate, 0, self.context) + 1)
        is_chat = not _is_one(prompt) and isinstance(prompt[0], Mapping)
        if options and not is_chat:
            raise ParameterError(f"{next(iter(options))} is for conversations; the prompt is a text")
        make: Any = self._chat_request if is_chat else self._prompt_request
        request = make(prompt, params, edit=edit, **options)
        recorder = Recorder(chosen_layers, chosen_heads, min(self.context, len(request.prompt_ids) + generate))
        completion = Requests([replace(request, watcher=recorder)]).run()[0]
        ids = [*request.prompt_ids, *completion.token_ids][: recorder.length]
        tokens = [self.tokenizer.token_bytes(id).decode("utf-8", "backslashreplace") for id in ids]
        readout = Readout(self.config, self._decoder.weights)
        return Look(recorder, readout, ids, tokens, prompt_tokens=len(request.prompt_ids))

    # -------------------------------------------------------------------------------------- from text to ids

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool | None = None,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt that a conversation is for the model. The options are those of `ChatOptions`."""
        if self._template is None:
            raise ParameterError(f"messages: {self.name} has no chat template; use generate() with a plain prompt")
        variables = free_variables(template_variables or {})
        return encode_chat(self._template, self.tokenizer, messages, tools=tools, thinking=thinking, **variables)

    def _requests(self, prompt: Prompt | Sequence[Prompt], params: Params, edit: Edits, progress: Progress) -> Requests:
        """One prompt's request, or those of a list."""
        if _is_one(prompt):
            return Requests([self._prompt_request(prompt, params, edit)])  # type: ignore[arg-type]
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompt)
        if len(each) != len(prompt):
            raise ParameterError(f"params has {len(each)} entries for {len(prompt)} prompts; give as many, or one")
        pairs = enumerate(zip(prompt, each, strict=True))
        return Requests([self._numbered_request(i, *pair, edit) for i, pair in pairs], progress)  # type: ignore[arg-type]

    def _numbered_request(self, number: int, prompt: Prompt, params: SamplingParams | None, edit: Edits) -> Request:
        """One of several: an error says which."""
        try:
            return self._prompt_request(prompt, params, edit)
        except QkvError as error:
            error.args = (f"prompts[{number}]: {error}",)
            raise

    def _prompt_request(self, prompt: Prompt, params: SamplingParams | None, edit: Edits = ()) -> Request:
        if not isinstance(prompt, Sequence):
            raise ParameterError(f"prompt must be a text or a list of token ids, not {type(prompt).__name__}")
        ids = self.tokenizer.prompt(prompt) if isinstance(prompt, str) else list(prompt)
        return self._request(ids, params, ThinkingSplit(None, None, ids), thinking=True, edit=edit)

    def _chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        *,
        thinking: bool | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        edit: Edits = (),
    ) -> Request:
        if thinking and not self.can_think:
            raise ParameterError(f"thinking: {self.name} cannot think: its vocabulary has no thinking markers")
        ids = self.chat_ids(messages, thinking=thinking, tools=tools, template_variables=template_variables)
        markers = self.tokenizer.id("<think>"), self.tokenizer.id("</think>")
        split = ThinkingSplit(*markers, ids, self.tokenizer.special_ids)
        return self._request(
            ids,
            params,
            split,
            thinking=thinking is not False,
            tools=tools,
            tool_choice=tool_choice,
            one_call=not parallel_tool_calls,
            edit=edit,
        )

    def _request(
        self,
        ids: list[int],
        asked: SamplingParams | None,
        split: ThinkingSplit,
        *,
        thinking: bool,
        tools: Tools | None = None,
        tool_choice: ToolChoice = None,
        one_call: bool = False,
        edit: Edits,
    ) -> Request:
        """A request that can run, with everything about it checked."""
        if not isinstance(asked, SamplingParams | None):
            raise ParameterError(f"params must be SamplingParams, not {type(asked).__name__}")
        defaults = model_defaults(self.config.family, self._generation_config, thinking=thinking)
        params = (asked or SamplingParams()).with_defaults(defaults)
        calls = may_call(tools, tool_choice)
        return Request(
            engine=self._engine,
            prompt_ids=self._engine.check(ids, params),
            params=params,
            pipeline=lambda: OutputPipeline(self.tokenizer, params.stop, copy(split), tools=calls, one_call=one_call),
            guide=self._guides.plan(split, params, tools=tools, tool_choice=tool_choice, one_call=one_call),
            decode_bytes=partial(decode_bytes, self.config, self.cache, self.weight_bytes),
            edits=compiled(edit, self.config),
            owner=self,
        )

    # -------------------------------------------------------------------------------------- how it is

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def can_think(self) -> bool:
        """Whether the model can write thinking that is told apart from its answer."""
        return None not in (self.tokenizer.id("<think>"), self.tokenizer.id("</think>"))

    def prepare_grammars(self) -> None:
        """Do now what the first request with a schema, a grammar or a forced call would have to do.

        It takes about 0.7 s for Qwen3's vocabulary, and no other Python runs in most of them: for servers at their
        start.
        """
        self._guides.prepare()

    def stats(self) -> Stats:
        """How many answers run and wait, and what the prefix cache holds and how often it helped."""
        return self._engine.stats()

    @property
    def cache_stats(self) -> CacheStats:
        """The part of `stats` about the prefix cache."""
        return self._engine.stats().cache

    @property
    def healthy(self) -> bool:
        """Whether requests can be answered: the model has not been closed, and its thread lives. Takes no time."""
        return self._engine.healthy

    def close(self) -> None:
        """Free the model's memory. Running requests end with an error; calling it twice is fine."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _end(engine: Engine, decoder: CompiledDecoder) -> None:
    engine.close()
    decoder.close()


def _is_one(prompt: Any) -> bool:
    """Whether it is a single prompt. What is no prompt at all counts as one too, so that its error is about one."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return True
    return isinstance(prompt[0], Integral)


def _context(wanted: int | None, most: int) -> int:
    return most if wanted is None else whole("context", wanted, 2, most)


def _cache(kind: str, config: ModelConfig) -> str:
    if not isinstance(kind, str):
        raise ParameterError(f"cache must be one of {', '.join(CACHE_KINDS)}, got {kind!r}")
    kv_block_bytes(config, kind)  # raises for a kind that does not exist, or not for this model
    return kind
