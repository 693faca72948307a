"""What OpenAI's three interfaces share: messages and tools as clients send them, usage, timings, log-probabilities."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.engine.sampling import Choice
from qkv.llm import LLM, Completion
from qkv.server.answering import Answer
from qkv.server.errors import ApiError
from qkv.server.service import Service
from qkv.server.streaming import Reply, event

DONE = "data: [DONE]\n\n"
LEAST = -9999.0
"""JSON has no infinity."""
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}
"""reasoning_effort → the most tokens of thinking; 0 is no thinking, None has no limit."""


class OpenAIReply(Reply):
    """What the replies of chat and completions share. KIND: what their ids begin with."""

    KIND = ""

    def __init__(self, service: Service, answer: Answer, model: str, asked: Any) -> None:
        super().__init__(service, answer)
        self.asked, self.with_usage = asked, bool((asked.stream_options or {}).get("include_usage"))
        self.head = {
            "id": f"{self.KIND}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        }

    def failure(self, error: ApiError) -> str:
        """An event, and the end."""
        return event(error.openai()) + DONE

    def totals(self) -> dict[str, Any]:
        """The tokens of all choices, and the times of the first."""
        firsts, completions = self.answer.prompts, self.answer.completions
        made = sum(len(completion.token_ids) for completion in completions)
        prompt = sum(first.timings.prompt_tokens for first in firsts)
        thinking = sum(map(self.service.answerer.thinking_tokens, completions))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(first.timings.reused_tokens for first in firsts)},
            "completion_tokens_details": {"reasoning_tokens": thinking},
        }
        return {"usage": usage, "timings": timings(completions[0])}


def finish_reason(completion: Completion) -> str:
    """The API's word: an answer that was ended because it repeated itself has stopped."""
    return completion.finish_reason if completion.finish_reason in ("length", "tool_calls") else "stop"


def effort(word: Any, field: str) -> tuple[bool | None, int | None]:
    """Whether to think, and the most tokens of it."""
    if word is None:
        return None, None
    if not isinstance(word, str) or word not in EFFORTS:
        raise ApiError(f"{field}: must be one of {', '.join(EFFORTS)}", param=field, code="invalid_value")
    return EFFORTS[word] != 0, EFFORTS[word] or None


def schema_of(form: Mapping[str, Any] | None, field: str) -> Any:
    """The JSON schema that `response_format` (or `text.format`) asks for; None for plain text."""
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema")
        return {"type": "object"} if schema is None else schema
    if kind != "json_schema":
        raise ApiError(f"{field}.type: must be text, json_object or json_schema, not {str(kind)[:40]!r}", param=field)
    inner = form.get("json_schema", form)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise ApiError(f"{field}.json_schema.schema: is missing", param=field, code="invalid_value")
    return schema


def functions(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """The tools, if all are functions."""
    for at, tool in enumerate(tools or ()):
        if tool.get("type", "function") != "function":
            kind = str(tool["type"])[:40]
            raise ApiError(f"tools[{at}].type: only functions can be called, not {kind!r}", param=f"tools[{at}].type")
    return tools


def timings(completion: Completion) -> dict[str, Any]:
    """Counts and milliseconds under the names of llama.cpp's server."""
    t = completion.timings
    computed = t.prompt_tokens - t.reused_tokens
    decoded = t.decode_steps + t.accepted_tokens
    return {
        "cache_n": t.reused_tokens,
        "prompt_n": computed,
        "prompt_ms": 1000 * t.first_token_seconds,
        "prompt_per_second": t.prefill_tokens_per_second,
        "predicted_n": len(completion.token_ids),
        "predicted_ms": 1000 * t.decode_seconds,
        "predicted_per_token_ms": 1000 * t.decode_seconds / decoded if decoded else 0.0,
        "predicted_per_second": t.decode_tokens_per_second,
        "queued_ms": 1000 * t.queued_seconds,
    }


def logprob(llm: LLM, choice: Choice) -> dict[str, Any]:
    """A token with its log-probability and the likeliest others."""
    assert choice.logprob is not None
    return {
        **token(llm, choice.token, choice.logprob),
        "top_logprobs": [token(llm, other, value) for other, value in choice.top],
    }


def token(llm: LLM, id: int, value: float) -> dict[str, Any]:
    """A token as text and as bytes; the text of a part of a character is U+FFFD."""
    raw = llm.tokenizer.token_bytes(id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(value, LEAST), "bytes": list(raw)}
