"""Checking a conversation before any template sees it, and giving templates the one shape they expect.

Callers send what the OpenAI API allows; templates are written for less. So text parts are joined, a missing content
beside tool calls becomes "", and the JSON string in a tool call's `arguments` becomes the object it describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from qkv.errors import ParameterError

Message = dict[str, Any]
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def normalize_messages(messages: object) -> list[Message]:
    """New messages of plain JSON types, `content` always a string. Raises ParameterError naming the field."""
    if not isinstance(messages, (list, tuple)):
        raise ParameterError(f"messages: must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ParameterError("messages: must not be empty")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def as_json(value: object, field: str) -> Any:
    """A copy of `value` in plain JSON types, so that nothing a template can reach has methods of its own.

    Raises ParameterError, naming `field`, for what JSON does not have, nested too deeply, or half a character.
    """
    try:
        return _as_json(value, field)
    except RecursionError:
        raise ParameterError(f"{field}: nested too deeply") from None


def parse_json(text: str, field: str) -> Any:
    """The value of a JSON text. Raises ParameterError, naming `field`, for any other text and for NaN."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ParameterError(f"{field}: nested too deeply") from None
    except ValueError as error:
        raise ParameterError(f"{field}: is not valid JSON ({error})") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _as_json(value: object, field: str) -> Any:
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return _text(value, field)
    if isinstance(value, Mapping):
        return {_key(key, field): _as_json(item, field) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, field) for item in value]
    raise ParameterError(f"{field}: must be made of JSON values, not {type(value).__name__}")


def _key(key: object, field: str) -> str:
    if not isinstance(key, str):
        raise ParameterError(f"{field}: keys must be strings, not {type(key).__name__}")
    return _text(key, field)


def _text(value: str, field: str) -> str:
    """A string without methods of its own. Raises ParameterError for half a character, which no encoder takes."""
    half = _SURROGATE.search(value)
    if half:
        raise ParameterError(
            f"{field}: has half a character (lone surrogate {half[0]!a}) at position {half.start()}; "
            "send whole characters"
        )
    return str.__str__(value)


def _message(message: object, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise ParameterError(f"{field}: must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError(f"{field}.role: must be a non-empty string")
    calls = message.get("tool_calls")
    handled = ("role", "content", "tool_calls")
    # A key with null is the same as no key: many templates print "None" otherwise.
    others = {_key(key, field): value for key, value in message.items() if value is not None and key not in handled}
    out: Message = {key: as_json(value, f"{field}.{key[:40]}") for key, value in others.items()}
    # Templates read the first of these names; clients send any.
    reasoning = next((out[key] for key in ("reasoning_content", "reasoning", "thinking") if key in out), None)
    if reasoning is not None:
        out["reasoning_content"] = reasoning
    if not isinstance(out.get("reasoning_content", ""), str):
        raise ParameterError(f"{field}.reasoning_content: must be a string")
    out = {
        "role": _text(role, f"{field}.role"),
        "content": _content(message.get("content"), bool(calls), f"{field}.content"),
        **out,
    }
    if calls is not None:
        if not isinstance(calls, (list, tuple)):
            raise ParameterError(f"{field}.tool_calls: must be a list, not {type(calls).__name__}")
        if calls:
            out["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return out


def _content(content: object, has_calls: bool, field: str) -> str:
    if isinstance(content, str):
        return _text(content, field)
    if content is None:
        if has_calls:
            return ""
        raise ParameterError(f"{field}: is missing; only a message with tool_calls may have none")
    if not isinstance(content, (list, tuple)):
        raise ParameterError(f"{field}: must be a string or a list of text parts, not {type(content).__name__}")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ParameterError(f"{field}[{at}]: only parts of type text are supported, not {str(kind)[:40]!r}")
        texts.append(_text(text, f"{field}[{at}].text"))
    return "".join(texts)


def _tool_call(call: object, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ParameterError(f"{field}: must be an object, not {type(call).__name__}")
    out: dict[str, Any] = as_json(call, field)
    inner = "function" if "function" in out else ""
    function = out["function"] if inner else out
    where = f"{field}.{inner}" if inner else field
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ParameterError(f"{where}.name: must be a non-empty string")
    function["arguments"] = _arguments(function.get("arguments"), f"{where}.arguments")
    return out


def _arguments(arguments: object, field: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        arguments = as_json(parse_json(arguments, field), field) if arguments.strip() else {}
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ParameterError(f"{field}: must be a JSON object, not {type(arguments).__name__}")
    return arguments
