"""Anthropic's `/v1/messages`, and its `count_tokens`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from qkv.llm import Chunk, Completion
from qkv.server import openai
from qkv.server.answering import Answer, Ask
from qkv.server.errors import ApiError
from qkv.server.fields import Fields, Objects, Sampled, Whole, names, read, sampling_params
from qkv.server.service import Service, described, service_of
from qkv.server.streaming import Reply, event

router = APIRouter()
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""Claude Code begins its system text with a line that changes: with it, no turn would find its prefix in the cache."""


class CountRequest(Fields):
    """A conversation to count."""

    WITHOUT_EFFECT = names(
        "metadata service_tier cache_control context_management container mcp_servers betas output_format "
        "inference_geo speed"
    )

    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest, Sampled):
    """A conversation to answer."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None


@router.post("/v1/messages", openapi_extra=described(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    asked = await read(request, MessagesRequest)
    service = service_of(request)
    model = service.model_name(asked.model) if service.settings.strict else asked.model or service.id
    answer = await service.answerer.start(to_ask(asked))
    return await MessagesReply(service, answer, model).response(request, asked.stream)


@router.post("/v1/messages/count_tokens", openapi_extra=described(CountRequest))
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens the prompt has."""
    ask = to_ask(await read(request, CountRequest))
    return {"input_tokens": len(await service_of(request).answerer.prompt_ids(ask))}


def to_ask(asked: CountRequest) -> Ask:
    """What the model is asked."""
    messages: list[Mapping[str, Any]] = []
    system = _system(asked.system)
    if system:
        messages.append({"role": "system", "content": system})
    for at, message in enumerate(asked.messages):
        messages += _messages(message, f"messages[{at}]")
    choice = asked.tool_choice or {}
    config = asked.output_config or {}
    thinking, budget = _thinking(asked, config)
    more: dict[str, Any] = {
        "thinking_budget": budget,
        "json_schema": openai.schema_of(config.get("format"), "output_config.format"),
    }
    if isinstance(asked, MessagesRequest):
        more["stop"] = asked.stop_sequences
    return Ask(
        messages=messages,
        params=sampling_params(asked, **more),
        thinking=thinking,
        tools=[_tool(tool) for tool in asked.tools or () if tool.get("type", "custom") in ("custom", None)] or None,
        tool_choice=_tool_choice(choice),
        one_call=choice.get("disable_parallel_tool_use") is True,
    )


def _thinking(asked: CountRequest, config: Mapping[str, Any]) -> tuple[bool | None, int | None]:
    """Whether to think, and the most tokens of it. In this API a model thinks when it is asked to."""
    given = asked.thinking or {}
    kind, word, budget = given.get("type"), config.get("effort"), given.get("budget_tokens")
    asked_effort = openai.effort(word, "output_config.effort")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ApiError("thinking.budget_tokens: must be a whole number of at least 1", param="thinking")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        told = str(kind)[:40]
        raise ApiError(f"thinking.type: must be enabled, adaptive or disabled, not {told!r}", param="thinking")
    if kind == "enabled":
        return True, budget
    return asked_effort if kind == "adaptive" or (kind is None and word is not None) else (False, None)


def _system(system: str | Objects | None) -> str:
    if system is None or isinstance(system, str):
        return BILLING.sub("", system or "")
    texts = [BILLING.sub("", _text(block, f"system[{at}]")) for at, block in enumerate(system)]
    return "\n\n".join(text for text in texts if text)


def _text(block: Mapping[str, Any], field: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise ApiError(f"{field}: only blocks of text are supported, not {str(block.get('type'))[:40]!r}", param=field)
    return str(block["text"])


def _messages(message: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """A message as OpenAI has it. Tool results are messages of their own there, and come first."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{field}.role: must be user or assistant, not {str(role)[:40]!r}", param=f"{field}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(f"{field}.content: must be a string or a list of blocks", param=f"{field}.content")
    out: dict[str, Any] = {"role": role}
    texts, thinking, calls, results = [], [], [], []
    for at, block in enumerate(content):
        where, kind = f"{field}.content[{at}]", block.get("type")
        if kind == "tool_result":
            results.append(_tool_result(block, where))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thinking.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    if calls:
        out["tool_calls"] = calls
    if thinking:
        out["reasoning_content"] = "".join(thinking)
    out["content"] = "".join(texts)
    return [*results, out] if texts or calls or thinking or not results else results


def _tool_result(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = "".join(_text(part, f"{field}.content[{at}]") for at, part in enumerate(content))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise ApiError(
            f"tool_choice.type: must be auto, any, tool or none, not {str(kind)[:40]!r}", param="tool_choice"
        )
    return "required" if kind == "any" else kind


class MessagesReply(Reply):
    """An answer in the API's words."""

    PING = event({"type": "ping"}, "ping")

    def __init__(self, service: Service, answer: Answer, model: str) -> None:
        super().__init__(service, answer)
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._open: str | None = None  # the kind of the block that is being written
        self._index = -1

    async def whole(self) -> dict[str, Any]:
        """The body of a reply that is not a stream."""
        (completion,) = await self.answer.read()
        content: list[dict[str, Any]] = []
        if completion.thinking:
            content.append({"type": "thinking", "thinking": completion.thinking, "signature": ""})
        if completion.text or not (completion.tool_calls or completion.thinking):
            content.append({"type": "text", "text": completion.text})
        for call in completion.tool_calls:
            arguments = _object(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return {**self._head, "content": content, **self._end(completion), "usage": self._usage(completion)}

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream."""
        usage = {"input_tokens": self.answer.prompt_tokens, "output_tokens": 0, "cache_read_input_tokens": 0}
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, **nothing, "usage": usage})
        async for chunk in self.answer:
            for text in self._of_chunk(chunk):
                yield text
        (completion,) = self.answer.completions
        if self._index < 0:
            yield self._start({"type": "text", "text": ""})
        yield self._stop()
        yield _event("message_delta", delta=self._end(completion), usage=self._usage(completion))
        yield _event("message_stop")

    def failure(self, error: ApiError) -> str:
        """One event."""
        return event(error.anthropic(), "error")

    def _of_chunk(self, chunk: Chunk) -> list[str]:
        out: list[str] = []
        if chunk.thinking:
            out += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out.append(self._delta({"type": "thinking_delta", "thinking": chunk.thinking}))
        if chunk.text:
            out += self._block("text", {"type": "text", "text": ""})
            out.append(self._delta({"type": "text_delta", "text": chunk.text}))
        for call in chunk.tool_calls:
            out += self._block(call.id, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            out.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return out

    def _block(self, kind: str, block: dict[str, Any]) -> list[str]:
        """Begin a block, unless it is the one that is being written."""
        if kind == self._open:
            return []
        ended = [] if self._open is None else [self._stop()]
        self._open = kind
        return [*ended, self._start(block)]

    def _start(self, block: dict[str, Any]) -> str:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> str:
        return _event("content_block_stop", index=self._index)

    def _end(self, completion: Completion) -> dict[str, Any]:
        if completion.finish_reason == "stop" and completion.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_string}
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(completion.finish_reason, "end_turn"), "stop_sequence": None}

    def _usage(self, completion: Completion) -> dict[str, int]:
        times = completion.timings
        return {
            "input_tokens": times.prompt_tokens - times.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": times.reused_tokens,
            "output_tokens": len(completion.token_ids),
        }


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _object(arguments: str) -> Any:
    """A call's input; a call that was cut off has none that could be read."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
