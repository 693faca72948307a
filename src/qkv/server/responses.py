"""OpenAI's `/v1/responses`, without memory: each request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from qkv.llm import Chunk, Completion
from qkv.server import openai
from qkv.server.answering import Answer, Ask
from qkv.server.errors import ApiError
from qkv.server.fields import Objects, Sampled, Whole, names, read, sampling_params
from qkv.server.service import Service, described, service_of
from qkv.server.streaming import Reply, event

router = APIRouter()
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ResponsesRequest(Sampled):
    """A conversation to answer."""

    WITHOUT_EFFECT = names(
        "store include metadata prompt_cache_key prompt_cache_retention truncation user service_tier "
        "safety_identifier stream_options max_tool_calls client_metadata"
    )
    REFUSED = {  # noqa: RUF012
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "moderation": (),
    }

    input: Annotated[str, Field(min_length=1)] | Objects
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None


@router.post("/v1/responses", openapi_extra=described(ResponsesRequest))
async def respond(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    asked = await read(request, ResponsesRequest)
    service = service_of(request)
    model = service.model_name(asked.model)
    answer = await service.answerer.start(to_ask(asked))
    return await ResponsesReply(service, answer, model, asked).response(request, asked.stream)


@router.post("/v1/responses/input_tokens", openapi_extra=described(ResponsesRequest))
async def count_input(request: Request) -> dict[str, Any]:
    """How many tokens the prompt has."""
    ask = to_ask(await read(request, ResponsesRequest))
    ids = await service_of(request).answerer.prompt_ids(ask)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def to_ask(asked: ResponsesRequest) -> Ask:
    """What the model is asked."""
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    for at, item in enumerate(items):
        _add(messages, item, f"input[{at}]")
    word = (asked.reasoning or {}).get("effort")
    thinking, budget = openai.effort(word, "reasoning.effort")
    return Ask(
        messages=messages,
        params=sampling_params(
            asked,
            max_tokens=asked.max_output_tokens,
            logprobs=asked.top_logprobs is not None,
            top_logprobs=asked.top_logprobs,
            thinking_budget=budget,
            json_schema=openai.schema_of((asked.text or {}).get("format"), "text.format"),
        ),
        thinking=thinking,
        tools=[_tool(tool) for tool in asked.tools or () if tool.get("type") == "function"] or None,
        tool_choice=_tool_choice(asked.tool_choice),
        variables={} if word is None else {"reasoning_effort": word},
        one_call=asked.parallel_tool_calls is False,
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], field: str) -> None:
    """Add an item. Reasoning, text and calls of one turn become one message, as templates expect it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        text = _text(item.get("content"), f"{field}.content")
        if role == "assistant":
            turn = _turn(messages)
            turn["content"] += text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or [], f"{field}.content")
        if text:
            turn = _turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _text(item.get("output"), f"{field}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        raise ApiError(f"{field}.type: {str(kind)[:40]!r} is not supported", param=f"{field}.type")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{field}: must be a string or a list of parts", param=field)
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ApiError(f"{field}[{at}]: only parts of text are supported, not {str(kind)[:40]!r}", param=field)
        texts.append(part["text"])
    return "".join(texts)


class ResponsesReply(Reply):
    """An answer in the API's words: items of output, each begun, filled and done."""

    def __init__(self, service: Service, answer: Answer, model: str, asked: ResponsesRequest) -> None:
        super().__init__(service, answer)
        params = answer.asks[0].params
        self._head = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": asked.instructions,
            "tools": asked.tools or [],
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": asked.max_output_tokens,
            "text": asked.text or {"format": {"type": "text"}},
            "reasoning": asked.reasoning or {"effort": None, "summary": None},
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "metadata": (asked.model_extra or {}).get("metadata") or {},
        }
        self._number = -1
        self._output: list[dict[str, Any]] = []  # the items, the last of them open while it is written
        self._open = False

    async def whole(self) -> dict[str, Any]:
        """The body of a reply that is not a stream: the stream's last state."""
        async for chunk in self.answer:
            self._of_chunk(chunk)
        self._close("completed")
        return self._final()

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._state("in_progress"))
        async for chunk in self.answer:
            for text in self._of_chunk(chunk):
                yield text
        for text in self._close("completed"):
            yield text
        final = self._final()
        yield self._event(f"response.{final['status']}", response=final)

    def failure(self, error: ApiError) -> str:
        """How a stream tells that it cannot go on."""
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("error", **told, param=error.param) + self._event(
            "response.failed", response={**self._state("failed"), "error": told}
        )

    def _state(self, status: str) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **nothing, "status": status, "output": self._output}

    def _final(self) -> dict[str, Any]:
        (completion,) = self.answer.completions
        cut = completion.finish_reason == "length"
        if cut and self._output:
            self._output[-1]["status"] = "incomplete"
        return {
            **self._state("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": self._usage(completion),
        }

    def _usage(self, completion: Completion) -> dict[str, Any]:
        times, made = completion.timings, len(completion.token_ids)
        return {
            "input_tokens": times.prompt_tokens,
            "input_tokens_details": {"cached_tokens": times.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.service.answerer.thinking_tokens(completion)},
            "total_tokens": times.prompt_tokens + made,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    # ------------------------------------------------------------------------------ items

    def _of_chunk(self, chunk: Chunk) -> list[str]:
        out: list[str] = []
        if chunk.thinking:
            out += self._begin("reasoning", {"id": _id("rs"), "summary": [], "content": []})
            out += self._add_text("reasoning_text", chunk.thinking, {})
        if chunk.text:
            out += self._begin("message", {"id": _id("msg"), "role": "assistant", "content": []})
            logprobs = [openai.logprob(self.service.llm, choice) for choice in chunk.logprobs]
            out += self._add_text("output_text", chunk.text, {"logprobs": logprobs})
        for call in chunk.tool_calls:
            item = {"id": _id("fc"), "call_id": call.id, "name": call.name, "arguments": ""}
            out += [*self._close("completed"), *self._begin("function_call", item)]
            self._output[-1]["arguments"] += call.arguments
            out.append(self._of_item("response.function_call_arguments.delta", delta=call.arguments))
        return out

    def _begin(self, kind: str, item: dict[str, Any]) -> list[str]:
        """Begin an item, unless one of its kind is being written."""
        if self._open and self._output[-1]["type"] == kind:
            return []
        ended = self._close("completed")
        self._output.append({"type": kind, "status": "in_progress", **item})
        self._open = True
        return [*ended, self._event("response.output_item.added", output_index=self._at, item=self._output[-1])]

    def _add_text(self, part: str, text: str, told: dict[str, Any]) -> list[str]:
        """Add text to the item's only part."""
        parts, out = self._output[-1]["content"], []
        if not parts:
            new: dict[str, Any] = {"type": part, "text": ""}
            parts.append(new | ({"annotations": [], "logprobs": []} if part == "output_text" else {}))
            out.append(self._of_item("response.content_part.added", content_index=0, part=parts[0]))
        parts[0]["text"] += text
        if "logprobs" in parts[0]:
            parts[0]["logprobs"] += told["logprobs"]
        out.append(self._of_item(f"response.{part}.delta", content_index=0, delta=text, **told))
        return out

    def _close(self, status: str) -> list[str]:
        """Say that the item which is being written is done, and what is in it."""
        if not self._open:
            return []
        self._open, item, out = False, self._output[-1], []
        if item["type"] == "function_call":
            whole_call = {"arguments": item["arguments"], "name": item["name"]}
            out.append(self._of_item("response.function_call_arguments.done", **whole_call))
        else:
            part = item["content"][0]
            told = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            out.append(self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **told))
            out.append(self._of_item("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        out.append(self._event("response.output_item.done", output_index=self._at, item=item))
        return out

    @property
    def _at(self) -> int:
        return len(self._output) - 1

    def _of_item(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=self._at, **fields)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
