"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from qkv.llm import Chunk, Completion
from qkv.server import openai
from qkv.server.answering import Ask
from qkv.server.fields import Objects, Sampling, Whole, names, read, sampling_params
from qkv.server.service import described, service_of
from qkv.server.streaming import event
from qkv.text.answer.tools import ToolCall

router = APIRouter()


class ChatRequest(Sampling):
    """A conversation to answer."""

    WITHOUT_EFFECT = names(
        "user store metadata service_tier verbosity prompt_cache_key prompt_cache_retention "
        "safety_identifier prediction stream"
    )
    REFUSED = {  # noqa: RUF012
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "chat_template": (),
        "moderation": (),
    }

    messages: Objects
    stream_options: dict[str, Any] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: Annotated[Whole, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@router.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    asked = await read(request, ChatRequest)
    service = service_of(request)
    model = service.model_name(asked.model)
    answer = await service.answerer.start(to_ask(asked))
    return await ChatReply(service, answer, model, asked).response(request, asked.stream)


def to_ask(asked: ChatRequest) -> Ask:
    """What the model is asked."""
    variables = dict(asked.chat_template_kwargs or {})
    thinking, budget = openai.effort(asked.reasoning_effort, "reasoning_effort")
    if isinstance(variables.get("enable_thinking"), bool):
        thinking = variables.pop("enable_thinking")
    if asked.thinking_budget is not None:
        budget = asked.thinking_budget
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    tools = openai.functions(asked.tools)
    choice = asked.tool_choice
    if asked.functions is not None:
        tools = [{"type": "function", "function": function} for function in asked.functions]
        choice = asked.function_call
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
    one_call = asked.parallel_tool_calls is False or asked.functions is not None
    return Ask(
        messages=[_message(message) for message in asked.messages],
        params=sampling_params(
            asked,
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
            thinking_budget=None if thinking is False else budget,
            json_schema=openai.schema_of(asked.response_format, "response_format"),
        ),
        thinking=thinking,
        tools=tools,
        tool_choice=choice,
        variables=variables,
        one_call=one_call,
    )


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in the words that chat templates know; what is wrong with it, `qkv.text` finds out."""
    out = dict(message)
    if out.get("role") in ("developer", "function"):
        out["role"] = {"developer": "system", "function": "tool"}[out["role"]]
    if out.get("role") == "assistant":
        call = out.pop("function_call", None)
        if call is not None:
            out["tool_calls"] = [{"type": "function", "function": call}]
        if out.get("content") is None:
            out["content"] = out.pop("refusal", None) or ""
    return out


class ChatReply(openai.OpenAIReply):
    """An answer in the API's words. To those who sent `functions`, calls are told as `function_call`."""

    KIND = "chatcmpl"

    async def whole(self) -> dict[str, Any]:
        """The body of a reply that is not a stream."""
        completions = await self.answer.read()
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(at, completion) for at, completion in enumerate(completions)],
            **self.totals(),
        }

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream."""
        count = self.answer.asks[0].params.n
        for index in range(count):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for chunk in self.answer:
            yield self._chunk(chunk.index, self._delta(chunk), logprobs=chunk.logprobs)
        for index, completion in enumerate(self.answer.completions):
            totals = {} if self.with_usage or index < count - 1 else {"timings": self.totals()["timings"]}
            yield self._chunk(index, {}, reason=self._reason(completion), **totals)
        if self.with_usage:
            yield event({**self.head, "object": "chat.completion.chunk", "choices": [], **self.totals()})
        yield openai.DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: Sequence[Any] = (),
        **more: Any,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs or None), "finish_reason": reason}
        return event({**self.head, "object": "chat.completion.chunk", "choices": [choice], **more})

    def _delta(self, chunk: Chunk) -> dict[str, Any]:
        calls = [{"index": call.index, **_call(call)} for call in chunk.tool_calls]
        return ({"content": chunk.text} if chunk.text else {}) | self._more(chunk.thinking, calls)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        calls = [_call(call) for call in completion.tool_calls]
        message = {"role": "assistant", "content": completion.text or (None if calls else ""), "refusal": None}
        return {
            "index": index,
            "message": message | self._more(completion.thinking, calls),
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": self._reason(completion),
        }

    def _more(self, thinking: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Thinking, under the two names that clients read, and calls."""
        more: dict[str, Any] = {"reasoning_content": thinking, "reasoning": thinking} if thinking else {}
        if calls:
            more |= {"function_call": calls[0]["function"]} if self.asked.functions else {"tool_calls": calls}
        return more

    def _reason(self, completion: Completion) -> str:
        called = completion.finish_reason == "tool_calls" and self.asked.functions
        return "function_call" if called else openai.finish_reason(completion)

    def _logprobs(self, choices: Sequence[Any] | None) -> dict[str, Any] | None:
        if choices is None:
            return None
        llm = self.service.llm
        return {"content": [openai.logprob(llm, choice) for choice in choices], "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    """A call, which comes whole in streams too."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
