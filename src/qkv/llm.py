"""The front door: a model by name, and text in, text out.

Text becomes ids (`qkv.text`), ids become more ids (`qkv.engine`), ids become text again (`qkv.text.output`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from qkv.engine.defaults import model_defaults
from qkv.engine.engine import Engine, FinishReason, Generation
from qkv.engine.params import SamplingParams
from qkv.errors import ModelFileError, ParameterError, QkvError
from qkv.kernels.cores import available_cores
from qkv.kernels.kvcache import KINDS
from qkv.kernels.team import MAX_THREADS
from qkv.model.compiled import CompiledDecoder, block_bytes, compile_kernels
from qkv.model.config import ModelConfig
from qkv.model.cost import decode_bytes
from qkv.progress import Progress, silent
from qkv.text.output import OutputPipeline
from qkv.text.template import ChatTemplate, encode_chat
from qkv.text.thinking import ThinkingSplit
from qkv.text.tokenizer import Tokenizer
from qkv.weights.checkpoint import Checkpoint, open_checkpoint
from qkv.weights.load import formats_of, load_weights
from qkv.weights.names import resolve
from qkv.weights.report import report

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Timings:
    """How long a request took. Times are in seconds."""

    prompt_tokens: int
    first_token_seconds: float
    """From the start to the first token: the whole prompt is computed in it."""
    decode_steps: int
    decode_seconds: float
    decode_bytes: float
    """Weights and cache that the decode steps read."""

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.first_token_seconds if self.first_token_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """0 when there was no step after the first token."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decode_gigabytes_per_second(self) -> float:
        """How fast weights and cache were read, in 10⁹ bytes per second."""
        return self.decode_bytes / self.decode_seconds / 1e9 if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer, whole characters only. Either text may be empty."""

    text: str
    thinking: str


@dataclass(frozen=True)
class Completion:
    """A finished answer."""

    text: str
    thinking: str
    """What the model wrote between its thinking markers; never part of `text`."""
    token_ids: list[int]
    finish_reason: FinishReason
    """"stop": an end token or a stop string; "length": max_tokens or the end of the context."""
    seed: int
    timings: Timings


class Stream:
    """An answer as it is made: iterate it for `Chunk`s; `completion` is there afterwards. `close()` cancels."""

    def __init__(self, chunks: Iterator[Chunk | Completion]) -> None:
        self._chunks = chunks
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[Chunk]:
        for item in self._chunks:
            if isinstance(item, Completion):
                self._completion = item
            else:
                yield item

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises `QkvError` before the stream has been read to its end."""
        if self._completion is None:
            raise QkvError("the stream has not ended yet: read it to its end first")
        return self._completion

    def close(self) -> None:
        """Stop the work. No more chunks come, and there is no completion."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()


class LLM:
    """A model ready to answer.

        with LLM("smollm2") as llm:
            print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)

    `model` is a hub id, a short tag, a .gguf file or a folder; it is fetched when it is not here yet.

    weights: "int8", "int4", "bf16" or "f32"; None keeps a GGUF file's own 4- and 8-bit matrices and makes others int8.
    cache: how keys and values are kept, "f16", "int8" or "f32".
    threads: how many cores to use; None is those this process may use.
    context: the most positions a request may use; None is the model's own maximum.

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
        progress: Progress = silent,
    ) -> None:
        self.name = str(model)
        checkpoint = open_checkpoint(resolve(self.name, progress=progress))
        self.config = checkpoint.config
        self.cache = _cache(cache, self.config)
        self.context = _context(context, self.config.max_position_embeddings)
        self.threads = _threads(threads)
        self.tokenizer = open_tokenizer(checkpoint)
        checkpoint.notes.extend(self.tokenizer.assumed)
        self._generation_config = checkpoint.generation_config
        self._template = _template(checkpoint, self.tokenizer)
        compile_kernels(formats_of(self.config, checkpoint.tensors, weights), progress)
        started = time.perf_counter()
        loaded = load_weights(self.config, checkpoint.tensors, wanted=weights, threads=self.threads, progress=progress)
        self.load_report = report(checkpoint, loaded, time.perf_counter() - started)
        self.weight_bytes = loaded.bytes_per_token
        self._decoder = CompiledDecoder(
            self.config, loaded, cache=cache, context=self.context, threads=self.threads, progress=progress
        )
        self._engine: Engine | None = Engine(
            self._decoder, vocab_size=self.config.vocab_size, context=self.context, end_ids=checkpoint.end_ids
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a sequence of str; the first match counts
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Continue a text or a list of token ids. A list of such prompts gives a list of completions, in order."""
        if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt or isinstance(prompt[0], Integral):
            return _finish(self.stream(prompt, params))  # type: ignore[arg-type]
        streams = [self.stream(one, params) for one in prompt]  # type: ignore[arg-type]  # all are checked first
        return [_finish(stream) for stream in streams]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Answer a conversation: messages as OpenAI clients send them, {"role": …, "content": …}.

        `thinking` turns a thinking model's thinking on or off; None leaves it to the model's template.
        """
        return _finish(self.stream_chat(messages, params, thinking=thinking, tools=tools))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Like `generate` for one prompt, piece by piece. A bad request raises here, before the first piece."""
        if not isinstance(prompt, Sequence):
            raise ParameterError(f"prompt must be a text or a list of token ids, not {type(prompt).__name__}")
        ids = self.tokenizer.prompt(prompt) if isinstance(prompt, str) else list(prompt)
        return self._stream(ids, params, thinking=True, split=ThinkingSplit(None, None, ids))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Stream:
        """Like `chat`, piece by piece."""
        if self._template is None:
            raise ParameterError(f"messages: {self.name} has no chat template; use generate() with a plain prompt")
        if thinking and not self.can_think:
            raise ParameterError(f"thinking: {self.name} cannot think: its vocabulary has no thinking markers")
        ids = encode_chat(self._template, self.tokenizer, messages, tools=tools, thinking=thinking)
        split = ThinkingSplit(
            self.tokenizer.id("<think>"), self.tokenizer.id("</think>"), ids, self.tokenizer.special_ids
        )
        return self._stream(ids, params, thinking=thinking is not False, split=split)

    def _stream(
        self, prompt_ids: list[int], params: SamplingParams | None, *, thinking: bool, split: ThinkingSplit
    ) -> Stream:
        engine = self._running_engine()
        if not isinstance(params, SamplingParams | None):
            raise ParameterError(f"params must be SamplingParams, not {type(params).__name__}")
        defaults = model_defaults(self.config.architecture, self._generation_config, thinking=thinking)
        request = engine.submit(prompt_ids, (params or SamplingParams()).with_defaults(defaults))
        pipeline = OutputPipeline(self.tokenizer, request.params.stop, split)
        return Stream(self._run(engine, request, pipeline))

    def _run(self, engine: Engine, request: Generation, pipeline: OutputPipeline) -> Iterator[Chunk | Completion]:
        """The pieces of one answer, then the whole of it."""
        text: list[str] = []
        thinking: list[str] = []
        stopped = False
        for token in engine.generate(request):
            self._running_engine()
            delta = pipeline.push(token)
            text.append(delta.content)
            thinking.append(delta.thinking)
            if delta.content or delta.thinking:
                yield Chunk(delta.content, delta.thinking)
            if delta.stopped:
                stopped = True
                break
        delta = pipeline.finish()
        text.append(delta.content)
        thinking.append(delta.thinking)
        if delta.content or delta.thinking:
            yield Chunk(delta.content, delta.thinking)
        assert request.params.seed is not None
        yield Completion(
            text="".join(text),
            thinking="".join(thinking),
            token_ids=request.token_ids,
            finish_reason="stop" if stopped else request.finish_reason or "stop",
            seed=request.params.seed,
            timings=Timings(
                prompt_tokens=len(request.prompt_ids),
                first_token_seconds=request.first_token_seconds,
                decode_steps=request.decode_steps,
                decode_seconds=request.decode_seconds,
                decode_bytes=decode_bytes(
                    self.config, self.cache, self.weight_bytes, len(request.prompt_ids), request.decode_steps
                ),
            ),
        )

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise QkvError(f"{self.name} has been closed")
        return self._engine

    @property
    def can_think(self) -> bool:
        """Whether the model can write thinking that is told apart from its answer."""
        return None not in (self.tokenizer.id("<think>"), self.tokenizer.id("</think>"))

    def close(self) -> None:
        """Free the model's memory. Running streams end with an error; calling it twice is fine."""
        if self._engine is not None:
            self._engine = None
            self._decoder.close()
            del self._decoder

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _finish(stream: Stream) -> Completion:
    for _ in stream:
        pass
    return stream.completion


def _context(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 2 <= wanted <= most:
        raise ParameterError(f"context must be a whole number from 2 to the model's {most}, got {wanted!r}")
    return wanted


def _cache(kind: str, config: ModelConfig) -> str:
    if not isinstance(kind, str):
        raise ParameterError(f"cache must be one of {', '.join(KINDS)}, got {kind!r}")
    block_bytes(config, kind)  # raises for a kind that does not exist, or not for this model
    return kind


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model's files. Raises ModelFileError where they have none."""
    if isinstance(checkpoint.tokenizer, Path):
        return Tokenizer.from_file(checkpoint.tokenizer, checkpoint.tokenizer_config)
    if checkpoint.tokenizer is None:
        raise ModelFileError(f"{checkpoint.path}: has no tokenizer.json; put the model's own beside its weights")
    return Tokenizer.from_gguf(checkpoint.tokenizer, checkpoint.path.name)


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(
        checkpoint.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        name=checkpoint.path.name,
    )


def _threads(wanted: int | None) -> int:
    if wanted is None:
        return available_cores()
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MAX_THREADS:
        raise ParameterError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {wanted!r}")
    return wanted
