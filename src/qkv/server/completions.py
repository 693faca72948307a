"""OpenAI's `/v1/completions`: a text, or several, continued."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from qkv.engine.sampling import Choice
from qkv.server import openai
from qkv.server.answering import Answer, Ask
from qkv.server.errors import ApiError
from qkv.server.fields import Sampling, Whole, read, sampling_params
from qkv.server.service import Service, described, service_of
from qkv.server.streaming import event

router = APIRouter()
MOST_PROMPTS = 64
Ids = list[Annotated[Whole, Field(ge=0)]]
MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


class CompletionRequest(Sampling):
    """Prompts to continue."""

    WITHOUT_EFFECT = frozenset({"user", "metadata", "store"})
    REFUSED = {"best_of": (1,), "prompt_embeds": ()}  # noqa: RUF012

    prompt: str | list[str] | Ids | list[Ids]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    stream_options: dict[str, Any] | None = None


@router.post("/v1/completions", openapi_extra=described(CompletionRequest))
async def complete(request: Request) -> Response:
    """Continue a text, whole or as a stream."""
    asked = await read(request, CompletionRequest)
    service = service_of(request)
    model = service.model_name(asked.model)
    prompts = await _prompts(asked, service)
    told = asked.logprobs is not None
    params = sampling_params(
        asked, logprobs=told, top_logprobs=asked.logprobs or 0, prompt_logprobs=told and bool(asked.echo)
    )
    answer = await service.answerer.start(*(Ask(params, prompt=prompt) for prompt in prompts))
    return await CompletionReply(service, answer, model, asked, prompts).response(request, asked.stream)


async def _prompts(asked: CompletionRequest, service: Service) -> list[list[int]]:
    """The ids of each prompt."""
    given: Any = asked.prompt
    several = isinstance(given, list) and (not given or not isinstance(given[0], int))
    prompts = given if several else [given]
    if not 0 < len(prompts) <= MOST_PROMPTS or not all(prompts):
        raise ApiError(f"prompt: must be a text, or 1 to {MOST_PROMPTS} of them, none empty", param="prompt")
    encoded = [
        await service.answerer.encode(prompt, special=True) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    if asked.suffix is None:
        return encoded
    markers = [service.llm.tokenizer.id(marker) for marker in MARKERS]
    if None in markers or asked.echo:
        raise ApiError("suffix: this model cannot fill in the middle, or not with echo", param="suffix")
    prefix, suffix, middle = markers
    tail = await service.answerer.encode(asked.suffix, special=False)
    return [[prefix, *ids, suffix, *tail, middle] for ids in encoded]  # type: ignore[list-item]


class CompletionReply(openai.OpenAIReply):
    """An answer in the API's words. With `echo` the prompts are repeated before the answers."""

    KIND = "cmpl"

    def __init__(self, service: Service, answer: Answer, model: str, asked: Any, prompts: list[list[int]]) -> None:
        super().__init__(service, answer, model, asked)
        self.head["object"] = "text_completion"
        self._n = answer.asks[0].params.n
        self._echoed = [ids for ids in prompts for _ in range(self._n)] if asked.echo else []

    async def whole(self) -> dict[str, Any]:
        """The body of a reply that is not a stream."""
        completions = await self.answer.read()
        choices = []
        for index, completion in enumerate(completions):
            text, told = completion.text, completion.logprobs
            if self._echoed:
                text = self._prompt_text(index) + text
                told = None if told is None else [*self._prompt_choices(index), *told]
            choices.append(self._choice(index, text, told, openai.finish_reason(completion)))
        return {**self.head, "choices": choices, **self.totals()}

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream."""
        for index in range(len(self._echoed)):
            yield self._chunk(index, self._prompt_text(index))
        async for chunk in self.answer:
            yield self._chunk(chunk.index, chunk.text, chunk.logprobs or None)
        for index, completion in enumerate(self.answer.completions):
            yield self._chunk(index, "", reason=openai.finish_reason(completion))
        if self.with_usage:
            yield event({**self.head, "choices": [], **self.totals()})
        yield openai.DONE

    def _chunk(self, index: int, text: str, told: Sequence[Choice] | None = None, reason: str | None = None) -> str:
        return event({**self.head, "choices": [self._choice(index, text, told, reason)]})

    def _choice(self, index: int, text: str, told: Sequence[Choice] | None, reason: str | None) -> dict[str, Any]:
        logprobs = None if told is None else self._logprobs(told)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_text(self, index: int) -> str:
        return self.service.llm.tokenizer.decode(self._echoed[index], skip_special=False)

    def _prompt_choices(self, index: int) -> list[Choice]:
        """The prompt's tokens; the first has no log-probability."""
        values = self.answer.prompts[index // self._n].prompt_logprobs or []
        return [Choice(id, value) for id, value in zip(self._echoed[index], [None, *values], strict=True)]

    def _logprobs(self, told: Sequence[Choice]) -> dict[str, Any]:
        llm = self.service.llm
        offset, tokens, offsets, values, tops = 0, [], [], [], []
        for choice in told:
            text = llm.tokenizer.token_bytes(choice.token).decode("utf-8", "replace")
            tokens.append(text)
            offsets.append(offset)
            values.append(None if choice.logprob is None else max(choice.logprob, openai.LEAST))
            top = [openai.token(llm, id, value) for id, value in choice.top]
            tops.append({one["token"]: one["logprob"] for one in top} or None)
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
