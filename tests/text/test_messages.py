"""Conversations as callers send them: given one shape, or refused with the field's name."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from qkv.errors import ParameterError
from qkv.text.prompt.messages import as_json, normalize_messages


def user(content):
    return {"role": "user", "content": content}


def calls(arguments, **function):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments, **function}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


def test_text_parts_are_joined_and_other_keys_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([user(parts)]) == [user("ab")]
    assert normalize_messages([user([])]) == [user("")]
    message = {"role": "tool", "content": "1", "tool_call_id": "x", "name": None, "extra": {"a": (1, 2.5, True)}}
    expected = {"role": "tool", "content": "1", "tool_call_id": "x", "extra": {"a": [1, 2.5, True]}}
    assert normalize_messages((message,)) == [expected]


@pytest.mark.parametrize(
    ("given", "parsed"),
    [('{"city":"Paris"}', {"city": "Paris"}), ("", {}), (" ", {}), (None, {}), ({"a": [1]}, {"a": [1]}), ("{}", {})],
)
def test_arguments_become_an_object_and_missing_content_empty(given, parsed):
    (message,) = normalize_messages(calls(given))
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": parsed}
    flat = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": given}]}]
    assert normalize_messages(flat)[0]["tool_calls"] == [{"name": "f", "arguments": parsed}]


def test_the_callers_messages_are_not_changed():
    messages = calls('{"a":1}')
    normalize_messages(messages)
    assert messages == calls('{"a":1}')


def test_subclasses_lose_their_methods():
    class Shouting(str):
        def strip(self, *_):
            return "GOTCHA"

    (message,) = normalize_messages([OrderedDict(role=Shouting("user"), content=Shouting(" a "), name=Shouting("n"))])
    assert {type(value) for value in message.values()} == {str} and type(message) is dict


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages: must be a list"),
        ("hi", "messages: must be a list"),
        ({"role": "user"}, "messages: must be a list"),
        ([], "messages: must not be empty"),
        (["hi"], r"messages\[0\]: must be an object"),
        ([user("a"), {"content": "x"}], r"messages\[1\]\.role: "),
        ([{"role": 5, "content": "x"}], r"messages\[0\]\.role: "),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role: "),
        ([{"role": "user"}], r"messages\[0\]\.content: is missing"),
        ([user(None)], r"messages\[0\]\.content: is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\]\.content: is missing"),
        ([user(5)], r"messages\[0\]\.content: must be a string"),
        ([user({"type": "text", "text": "a"})], r"messages\[0\]\.content: must be a string"),
        ([user([{"type": "image_url", "image_url": {}}])], r"messages\[0\]\.content\[0\]: only parts .*'image_url'"),
        ([user([{"type": "text", "text": 5}])], r"messages\[0\]\.content\[0\]: only parts"),
        ([user(["a"])], r"messages\[0\]\.content\[0\]: only parts"),
        ([user("x") | {"reasoning_content": 5}], r"messages\[0\]\.reasoning_content: must be a string"),
        ([user("x") | {"tool_calls": 5}], r"messages\[0\]\.tool_calls: must be a list"),
        ([user("x") | {"tool_calls": [5]}], r"messages\[0\]\.tool_calls\[0\]: must be an object"),
        ([user("x") | {"tool_calls": [{"function": 5}]}], r"tool_calls\[0\]\.function\.name: "),
        ([user("x") | {"tool_calls": [{}]}], r"tool_calls\[0\]\.name: "),
        (calls("{}", name=""), r"tool_calls\[0\]\.function\.name: "),
        (calls("{"), r"tool_calls\[0\]\.function\.arguments: is not valid JSON"),
        (calls('{"a": NaN}'), r"function\.arguments: is not valid JSON"),
        (calls('{"a":' * 100_000), r"function\.arguments: nested too deeply"),
        (calls("9" * 5000), r"function\.arguments: "),
        (calls("[1]"), r"function\.arguments: must be a JSON object, not list"),
        (calls(5), r"function\.arguments: must be a JSON object, not int"),
        ([user("x") | {"meta": {1: 2}}], r"messages\[0\]\.meta: keys must be strings"),
        ([user("x") | {5: 1}], r"messages\[0\]: keys must be strings, not int"),
        ([user("x") | {"meta": object()}], r"messages\[0\]\.meta: must be made of JSON values, not object"),
    ],
)
def test_malformed_conversations_are_refused_by_field(messages, words):
    with pytest.raises(ParameterError, match=f"^{words}" if words.startswith("messages") else words) as caught:
        normalize_messages(messages)
    assert str(caught.value).startswith("messages") and "\n" not in str(caught.value)


HALF = "a\ud83d"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([user(HALF)], "messages[0].content"),
        ([user("a"), user([{"type": "text", "text": HALF}])], "messages[1].content[0].text"),
        ([{"role": HALF, "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "name": HALF}], "messages[0].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": HALF}], "messages[0].tool_call_id"),
        ([user("x") | {HALF: 1}], "messages[0]"),
        ([user("x") | {"meta": [{HALF: 1}]}], "messages[0].meta"),
        ([user("x") | {"reasoning": HALF}], "messages[0].reasoning"),
        (calls({"a": [HALF]}), "messages[0].tool_calls[0]"),
        (calls("{}", name=HALF), "messages[0].tool_calls[0]"),
        (calls('{"a": "\\ud83d"}'), "messages[0].tool_calls[0].function.arguments"),
        (calls(HALF), "messages[0].tool_calls[0]"),
    ],
)
def test_half_a_character_is_refused_wherever_it_stands(messages, field):
    with pytest.raises(ParameterError) as caught:
        normalize_messages(messages)
    assert str(caught.value).startswith(f"{field}: has half a character (lone surrogate '\\ud83d') at position ")


def test_endless_nesting_is_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ParameterError, match="tools: nested too deeply"):
        as_json(deep, "tools")
