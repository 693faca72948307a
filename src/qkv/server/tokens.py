"""`/tokenize` and `/detokenize`, under the names that vLLM and llama.cpp use."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from qkv.engine.params import SamplingParams
from qkv.server.answering import Ask
from qkv.server.errors import ApiError
from qkv.server.fields import Fields, Objects, Whole, read
from qkv.server.service import described, service_of

router = APIRouter()


class TokenizeRequest(Fields):
    """A text (`prompt` or `content`), or a conversation (`messages`)."""

    prompt: str | None = None
    content: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None


class DetokenizeRequest(Fields):
    """Token ids."""

    tokens: list[Annotated[Whole, Field(ge=0)]]


@router.post("/tokenize", openapi_extra=described(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """The token ids of a text or a conversation."""
    asked = await read(request, TokenizeRequest)
    service = service_of(request)
    texts = [text for text in (asked.prompt, asked.content) if text is not None]
    if len(texts) + (asked.messages is not None) != 1:
        raise ApiError("prompt: give one of prompt, content and messages", param="prompt")
    special = asked.add_special_tokens or asked.add_special or False
    if asked.messages is not None:
        ids = await service.answerer.prompt_ids(Ask(SamplingParams(), messages=asked.messages, tools=asked.tools))
    else:
        ids = await service.answerer.encode(texts[0], special=special)
    return {"tokens": ids, "count": len(ids), "max_model_len": service.llm.context}


@router.post("/detokenize", openapi_extra=described(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids."""
    asked = await read(request, DetokenizeRequest)
    text = await service_of(request).answerer.decode(asked.tokens)
    return {"prompt": text, "content": text}
