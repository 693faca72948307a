"""Chat templates: from a conversation to a prompt, as the model's own Jinja template writes it.

`ChatTemplate.render` gives the prompt as a string, like Hugging Face's `apply_chat_template`. `encode_chat` gives ids,
and differs from Hugging Face in one point: the text of a marker (`<|im_end|>`) inside a message stays text. Only what
the template itself writes becomes a marker, so no message can close its own turn and open one that nobody wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from qkv.errors import ParameterError, TemplateError
from qkv.text.prompt.budget import Budget, running
from qkv.text.prompt.disguise import Disguise, unused
from qkv.text.prompt.messages import as_json, normalize_messages
from qkv.text.prompt.sandbox import GuardedEnvironment
from qkv.text.tokens.tokenizer import Tokenizer

MAX_SOURCE = 1 << 16
"""Characters of template source; the longest in use have about 30,000."""


class ChatTemplate:
    """A compiled template. `name` is how errors call it (a file's name). Safe to use from several threads.

    Raises TemplateError if the source does not compile or needs what a chat template must not have.
    """

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None, name: str) -> None:
        self.source = source
        self.name = name
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {key: token for key, token in tokens.items() if token is not None}
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"{name}: the chat template has {len(source)} characters, at most {MAX_SOURCE} are read"
            )
        functions = {"raise_exception": raise_exception, "strftime_now": strftime_now}
        environment = GuardedEnvironment({"tojson": tojson}, functions)
        try:
            self._template = environment.from_string(source)
            self._roles = _compared(environment.parse(source))
        except Exception as error:
            raise self._error(error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **extra: Any,
    ) -> str:
        """The prompt. `thinking`, unless None, becomes the template's `enable_thinking`; `extra` its other variables.

        Raises ParameterError for a malformed conversation, TemplateError (the template's words) if it is refused.
        """
        return self._render(self._variables(messages, tools, add_generation_prompt, thinking, extra))

    def _variables(
        self, messages: object, tools: object, add_generation_prompt: bool, thinking: bool | None, extra: dict[str, Any]
    ) -> dict[str, Any]:
        variables: dict[str, Any] = {"documents": None, **self._tokens}
        variables |= {name: as_json(value, name) for name, value in extra.items()}
        if thinking is not None:
            if variables.get("enable_thinking", thinking) != thinking:
                raise ParameterError("thinking: contradicts enable_thinking in the template's variables")
            variables["enable_thinking"] = thinking
        variables["messages"] = normalize_messages(messages)
        for message in variables["messages"]:
            if message["role"] == "developer" and "developer" not in self._roles:
                message["role"] = "system"
        variables["tools"] = _tools(tools)
        variables["add_generation_prompt"] = add_generation_prompt
        return variables

    def _render(self, variables: dict[str, Any], stand_ins: frozenset[str] = frozenset()) -> str:
        try:
            running.set(Budget(variables, stand_ins))
            return self._template.render(variables)
        except Exception as error:
            raise self._error(error) from error

    def _check_roles(self, variables: dict[str, Any]) -> None:
        """Refuse a message that the template leaves out because it does not know its role.

        Messages with roles that the template compares with are its own business. The others get a mark that must show.
        """
        messages = variables["messages"]
        asked = [at for at, message in enumerate(messages) if message["role"] not in self._roles]
        if not asked:
            return
        mark = next(unused(variables, self.source), None)
        if mark is None:
            raise ParameterError("messages: use too many rare characters to find each message in the prompt")
        marked = [_marked(message, f"{mark}{at}{mark}") for at, message in enumerate(messages)]
        rendered = self._render(variables | {"messages": marked}, frozenset({mark}))
        for at in asked:
            if f"{mark}{at}{mark}" not in rendered:
                raise ParameterError(
                    f"messages[{at}].role: {self.name}'s chat template leaves out messages of role "
                    f"{messages[at]['role'][:40]!r}; use system, user, assistant or tool"
                )

    def _error(self, error: Exception) -> TemplateError:
        reason = " ".join(str(error).split())[:500]
        if isinstance(error, RecursionError):
            reason = "it calls itself without end"
        elif not isinstance(error, jinja2.TemplateError):
            reason = f"{type(error).__name__}: {reason}"
        line = getattr(error, "lineno", None)
        return TemplateError(f"{self.name}: chat template{f', line {line}' if line else ''}: {reason}")


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | None = None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> list[int]:
    """The ids of a conversation. Marker text inside messages, tools and other variables stays plain text.

    One exception: in an assistant message's `content`, markers that are not control tokens (`<think>`, `<tool_call>`)
    are parsed, because that is where a model wrote them and templates look for them. Where nobody wrote marker text,
    the ids are those of Hugging Face's `apply_chat_template`.
    """
    variables = template._variables(messages, tools, add_generation_prompt, thinking, extra)
    disguise = Disguise(tokenizer, variables, template.source)
    rendered = template._render(disguise.hide_in(variables), disguise.stand_ins)
    template._check_roles(variables)
    if not disguise.stand_ins:
        return tokenizer.encode(rendered, markers=True)
    ids: list[int] = []
    for at, piece in enumerate(tokenizer.segments(rendered)):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids.extend(tokenizer.encode(disguise.reveal(piece), inner=at > 0))
    return ids


def _compared(source: jinja2.nodes.Template) -> frozenset[str]:
    """The texts that a template compares something with, the roles it knows among them."""
    comparisons = source.find_all((jinja2.nodes.Compare, jinja2.nodes.Test))
    constants = (constant.value for node in comparisons for constant in node.find_all(jinja2.nodes.Const))
    return frozenset(value for value in constants if isinstance(value, str))


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """A message with a mark at the end of its content and of its calls' names: templates may show either."""
    marked = {**message, "content": message["content"] + mark}
    if "tool_calls" in message:
        marked["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
    return marked


def _marked_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _marked_call(call["function"], mark)}
    return {**call, "name": call["name"] + mark}


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter as Hugging Face's templates expect it: no HTML escaping, readable non-ASCII."""
    width = len(indent) if isinstance(indent, str) else (indent or 0)
    if width > 16 or sum(map(len, separators or ())) > 16:
        raise jinja2.exceptions.SecurityError("tojson: indent and separators take at most 16 characters")
    stand_ins = running.get().stand_ins
    if ensure_ascii and stand_ins:
        # Escape like json.dumps, but for the characters whose text is still to come.
        text = tojson(value, False, indent, separators, sort_keys)
        return re.sub(
            r"[^\x00-\x7e]", lambda char: char[0] if char[0] in stand_ins else json.dumps(char[0])[1:-1], text
        )
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Indentation can make a text far larger than its value, so it is counted while it is made.
    return "".join(running.get().iterate(encoder.iterencode(value))) if width else encoder.encode(value)


def raise_exception(message: str) -> NoReturn:
    """`raise_exception("…")`: how a template refuses a conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(form: str) -> str:
    """`strftime_now("%d %b %Y")`: today, for templates that tell the model the date."""
    if len(form) > 200 or re.sub(r"%[-#]?[A-Za-z%]", "", form).count("%"):
        raise jinja2.exceptions.SecurityError(f"strftime_now: unknown format {form[:40]!r}")
    return datetime.now().strftime(form)


def _tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ParameterError("tools: must be a list of objects")
    return as_json(tools, "tools") if tools else None


_OWN_VARIABLES = {"messages", "tools", "thinking", "add_generation_prompt", "continue_final_message", "chat_template"}


def free_variables(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of a chat template that a request may set. Raises ParameterError for one that is not free."""
    for name in given:
        if name in _OWN_VARIABLES or name.endswith("_token") or not name.isidentifier():
            raise ParameterError(f"template_variables: {name[:40]!r} cannot be set; leave it out")
    return given
