"""`tools` and `tool_choice` as OpenAI's API has them: whether calls are looked for, and the grammar of a forced one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.errors import ParameterError
from qkv.text.answer.tools import CLOSE, OPEN
from qkv.text.constrain.schema import grammar_source, schema_options
from qkv.text.tokens.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
ToolChoice = str | Mapping[str, Any] | None


def may_call(tools: Tools | None, choice: ToolChoice) -> bool:
    """Whether an answer may hold calls: tools are given, and the choice is not "none"."""
    return bool(tools) and choice != "none"


def chosen_tools(tools: Tools | None, choice: ToolChoice) -> dict[int, Mapping[str, Any]]:
    """The tools of which one has to be called: none ("auto", "none"), any of them ("required"), or the one named.

    The keys are their places in `tools`. Raises ParameterError for a choice that is none of these, and for one that
    needs tools that were not given.
    """
    if choice is None or (isinstance(choice, str) and choice in ("auto", "none")):
        return {}
    name = _chosen_name(choice)
    functions = {n: _function(tool, f"tools[{n}]") for n, tool in enumerate(tools or ())}
    found = {n: function for n, function in functions.items() if name is None or function.get("name") == name}
    if not found:
        reason = "no tools are given" if name is None else f"no tool is named {name[:80]!r}"
        raise ParameterError(f"tool_choice: {reason}")
    return found


def strict_tools(tools: Tools | None, choice: ToolChoice, tokenizer: Tokenizer) -> dict[int, Mapping[str, Any]]:
    """The tools, if the model may call one or not ("auto") and one of them is `strict`; otherwise none.

    The keys are their places in `tools`. Those that are not strict take any object here. Raises ParameterError where
    no token tells that a call begins.
    """
    if choice not in (None, "auto"):
        return {}
    functions = {n: _function(tool, f"tools[{n}]") for n, tool in enumerate(tools or ())}
    strict = [n for n, function in functions.items() if function.get("strict") is True]
    if strict and not {OPEN, CLOSE} <= tokenizer.marker_ids.keys():
        raise ParameterError(
            f"tools[{strict[0]}].function.strict: this model has no token that begins a call, so its arguments are "
            'held to their schema only with tool_choice "required"; leave strict out, or require a call'
        )
    anything = {"parameters": {"type": "object"}}
    return {n: function if n in strict else {**function, **anything} for n, function in functions.items() if strict}


def tools_grammar(
    functions: Mapping[int, Mapping[str, Any]], tokenizer: Tokenizer, *, once: bool, opened: bool = False
) -> tuple[str, dict[int, str]]:
    """Calls of these functions as Qwen's models write them, with the arguments that their schemas allow.

    The keys are the functions' places in `tools`. once: one call; otherwise one or more, each on lines of its own.
    opened: what follows the opening marker of the first.
    Also the fields that the grammar's lines come from, by the lines' numbers, for messages.
    """
    opening, closing = (_marker(tokenizer, marker) for marker in (OPEN, CLOSE))
    rules = [
        f"start: {'rest' if opened else 'block'}{'' if once else ' (LINE block)*'}",
        f"block: {opening} rest",
        f"rest: LINE call LINE {closing}",
        f"LINE: {json.dumps(chr(10))}",
        f"call: {' | '.join(f'call{n}' for n in functions)}",
    ]
    fields = {}
    for n, function in functions.items():
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ParameterError(f"tools[{n}].function.name: must be a non-empty string")
        field = f"tools[{n}].function.parameters of {name[:40]!r}"
        schema = schema_options(_parameters(function), field)
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        rules.append(f'call{n}: {json.dumps(head, ensure_ascii=False)} arguments{n} "}}"')
        rules.append(f"arguments{n}: %json {json.dumps(schema)}")
        fields[len(rules)] = field
    return grammar_source("tools", "\n".join(rules)), fields


def _chosen_name(choice: str | Mapping[str, Any]) -> str | None:
    """The name in {"type": "function", "function": {"name": …}}; None for "required"."""
    if isinstance(choice, str) and choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ParameterError(
            'tool_choice: must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}, '
            f"not {str(choice)[:80]!r}"
        )
    return name


def _function(tool: object, field: str) -> Mapping[str, Any]:
    """A tool's function; {"type": "function", "function": {…}} and the bare inner object are both in use."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ParameterError(f"{field}.function: must be an object")
    return function


def _parameters(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments, which are an object; without one it has no arguments."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", **schema} if isinstance(schema, Mapping) else schema


def _marker(tokenizer: Tokenizer, marker: str) -> str:
    """A marker in a grammar: its token, or its letters."""
    id = tokenizer.marker_ids.get(marker)
    return json.dumps(marker) if id is None else f"<[{id}]>"
