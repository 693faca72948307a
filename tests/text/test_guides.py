"""Guides: thinking of a bounded length, then content that follows a grammar; and calls that have to be made."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.errors import ParameterError
from qkv.text.answer.output import OutputPipeline
from qkv.text.answer.thinking import ThinkingSplit
from qkv.text.constrain.guides import Guides
from qkv.text.constrain.masks import ids_of
from qkv.text.constrain.toolchoice import may_call


def wanted(**fields):
    names = ("thinking_budget", "json_schema", "regex", "grammar", "choices")
    return SimpleNamespace(**(dict.fromkeys(names) | fields))


def split_of(tokenizer, prompt):
    ids = tokenizer.encode(prompt, markers=True)
    return ThinkingSplit(tokenizer.id("<think>"), tokenizer.id("</think>"), ids, tokenizer.special_ids)


@pytest.fixture(scope="module")
def guides(tiny):
    return Guides(tiny, vocab_size=tiny.vocab_size + 9, end_ids={tiny.id("<|im_end|>"), tiny.id("<|endoftext|>")})


def guide(guides, tiny, prompt="", tools=None, tool_choice=None, **fields):
    plan = guides.plan(split_of(tiny, prompt), wanted(**fields), tools=tools, tool_choice=tool_choice)
    assert plan is not None
    return plan()


def push(guide, tokenizer, text):
    """Push a text's tokens, each of which has to be allowed."""
    for id in tokenizer.encode(text, markers=True):
        mask = guide.allowed()
        assert mask is None or id in ids_of(mask), (text, tokenizer.token_bytes(id))
        guide.push(id)


def allowed(guide, tokenizer):
    mask = guide.allowed()
    return None if mask is None else {tokenizer.token_bytes(id).decode("utf-8", "replace") for id in ids_of(mask)}


ENDS = {"<|im_end|>", "<|endoftext|>"}


# ------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["<think>\n", ""])
def test_after_the_budget_only_the_closing_marker_is_allowed(guides, tiny, budget, prompt):
    one = guide(guides, tiny, prompt, thinking_budget=budget)
    if not prompt:
        push(one, tiny, "<think>")
    for _ in range(budget):
        assert one.allowed() is None
        one.push(tiny.id("a"))
    assert allowed(one, tiny) == {"</think>"}
    one.push(tiny.id("</think>"))
    for _ in range(10):  # content has no budget
        assert one.allowed() is None
        one.push(tiny.id("a"))
    one.push(tiny.id("<think>"))  # thinking is over: this is content too
    assert one.allowed() is None


def test_a_model_that_closes_early_is_left_alone(guides, tiny):
    one = guide(guides, tiny, "<think>\n", thinking_budget=3)
    push(one, tiny, "a</think>bcdefgh")
    assert one.allowed() is None


def test_each_answer_has_a_guide_of_its_own(guides, tiny):
    plan = guides.plan(split_of(tiny, "<think>\n"), wanted(thinking_budget=2, choices=["a", "b"]))
    one, other = plan(), plan()
    push(one, tiny, "xy</think>a")
    assert allowed(one, tiny) == ENDS
    push(other, tiny, "x</think>b")
    assert allowed(other, tiny) == ENDS


def test_a_budget_needs_thinking(tiny, spm, guides):
    with pytest.raises(ParameterError, match=r"^thinking_budget: there is no thinking"):
        guides.plan(ThinkingSplit(None, None, []), wanted(thinking_budget=1))
    assert guides.plan(split_of(tiny, ""), wanted()) is None


# ------------------------------------------------------------------------------------- then content


@pytest.mark.parametrize("prompt", ["<think>\n\n</think>\n\n", "x<think>\n\n</think>"])
def test_where_thinking_is_over_the_grammar_holds_at_once(guides, tiny, prompt):
    one = guide(guides, tiny, prompt, choices=["ab"])
    assert allowed(one, tiny) == {"a"}


@pytest.mark.parametrize("newline", ["", "\n"])
def test_the_grammar_begins_after_the_thinking(guides, tiny, newline):
    one = guide(guides, tiny, "<think>\n", choices=["ab"])
    possible = allowed(one, tiny)
    assert not possible & ENDS  # the answer is still to come
    assert {"z", "</think>", "<tool_call>"} <= possible
    push(one, tiny, f"any {{thing}}</think>{newline}")
    assert allowed(one, tiny) == ({"a"} if newline else {"a", "\n"})
    push(one, tiny, "ab")
    assert allowed(one, tiny) == ENDS


def test_where_the_prompt_leaves_it_open_the_model_may_think_first(guides, tiny):
    one = guide(guides, tiny, "hi<|im_end|>", choices=["ab"])
    assert allowed(one, tiny) == {"a", "<think>"}
    one.push(tiny.id("a"))
    assert allowed(one, tiny) == {"b"}
    one = guide(guides, tiny, "hi<|im_end|>", choices=["ab"], thinking_budget=1)
    push(one, tiny, "<think>x")
    assert allowed(one, tiny) == {"</think>"}
    push(one, tiny, "</think>")
    assert allowed(one, tiny) == {"a", "\n"}
    one.push(tiny.id("a"))
    assert allowed(one, tiny) == {"b"}


def test_without_thinking_markers_the_grammar_holds_at_once(guides, tiny):
    plan = guides.plan(ThinkingSplit(None, None, []), wanted(regex="a|b"))
    assert allowed(plan(), tiny) == {"a", "b"}


@settings(deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from(["<think>\n", "", "<think>\n\n</think>\n\n"]), st.none() | st.integers(0, 4)
)
def test_whatever_is_thought_the_content_is_what_was_asked_for(guides, tiny, seed, prompt, budget):
    """A random model; the text goes through the output pipeline."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, "é"]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    draw = random.Random(seed)
    one = guide(guides, tiny, prompt, json_schema=schema, thinking_budget=budget)
    path = OutputPipeline(tiny, (), split_of(tiny, prompt))
    ends = {tiny.id(text) for text in ENDS}
    deltas, thought = [], 0
    for _ in range(300):
        ids = ids_of(one.allowed())
        close = tiny.id("</think>")
        id = close if close in ids and draw.random() < 0.2 else draw.choice(ids)
        if id in ends:
            break
        one.push(id)
        thought += path._split.kind == "thinking" and id not in (close, tiny.id("<think>"))
        deltas.append(path.push(id))
    else:
        raise AssertionError("no end")
    deltas.append(path.finish())
    jsonschema.validate(json.loads("".join(delta.content for delta in deltas)), schema)
    assert budget is None or thought <= budget


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"json_schema": {"type": "xml"}}, "json_schema: Invalid type"),
        ({"json_schema": "{"}, "json_schema: is not valid JSON"),
        ({"json_schema": "[1]"}, "json_schema: must be a JSON object"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema: is not valid JSON"),
        ({"json_schema": {"minimum": float("inf")}}, "json_schema: is not JSON"),
        ({"json_schema": {"enum": [{1: 2}]}}, "json_schema: keys must be strings"),
        ({"json_schema": {"enum": [object()]}}, "json_schema: must be made of JSON values"),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "json_schema: x-guidance"),
        ({"json_schema": {"multipleOf": 999983}}, "json_schema: multipleOf 999983"),
        ({"json_schema": {"allOf": [{"multipleOf": p} for p in (331, 337, 347)]}}, "json_schema: multipleOf 337"),
        ({"json_schema": {"minProperties": 2}}, "json_schema: minProperties 2"),
        ({"json_schema": {"exclusiveMinimum": 0, "maximum": 0.5}}, "json_schema: exclusiveMinimum 0"),
        ({"json_schema": {"enum": [2**53 + 1]}}, "json_schema: 9007199254740993"),
        ({"json_schema": {"const": "a\x1f"}}, "json_schema: 'const' has a control"),
        ({"json_schema": {"patternProperties": {f"^{n}$": {} for n in range(101)}}}, "json_schema: patternProperties"),
        ({"json_schema": {"anyOf": [{"enum": [n]} for n in range(2500)]}}, "json_schema: has more than 4000"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema: has half a character"),
        ({"json_schema": {"properties": {"\ud800": {}}}}, "json_schema: has half a character"),
        ({"json_schema": '{"const": "\\ud800"}'}, "json_schema: has half a character"),
        ({"json_schema": '{"type": "string"'}, "json_schema: is not valid JSON"),
        ({"json_schema": ""}, "json_schema: is not valid JSON"),
        ({"regex": "a" * 300_000}, "regex: has 300,000 characters"),
        ({"regex": "\ud800"}, "regex: has half a character"),
        ({"regex": "("}, "regex: invalid regex"),
        ({"grammar": "start: " + ":" * 5000}, "grammar: has more than 4000"),
        ({"grammar": "x: y"}, "grammar: "),
        ({"choices": ["\ud83d"]}, "choices: "),
        ({"regex": "a", "tools": [{"name": "f"}], "tool_choice": "required"}, "tool_choice: a call cannot be forced"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_any_token(guides, tiny, fields, match):
    with pytest.raises(ParameterError, match=f"^{match}") as caught:
        guide(guides, tiny, **fields)
    assert "\n" not in str(caught.value)


def deep(levels):
    value: dict = {}
    for _ in range(levels):
        value = {"not": value}
    return value


def test_endless_nesting_is_refused(guides, tiny):
    for schema in (deep(5000), '{"not":' * 200_000 + "{}", "[" * 100_000):
        with pytest.raises(ParameterError, match=r"^json_schema: "):
            guide(guides, tiny, json_schema=schema)


def test_a_model_without_an_end_cannot_be_held_to_a_grammar(tiny):
    with pytest.raises(ParameterError, match=r"^regex: this model has no token to end"):
        Guides(tiny, vocab_size=tiny.vocab_size, end_ids=[]).plan(split_of(tiny, ""), wanted(regex="a"))


# ------------------------------------------------------------------------------------- calls

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "東京"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": 'say "é"', "parameters": {"properties": {"x": {"type": "boolean"}}}}},
]


def calls_of(tokenizer, guides, choice, seed, *, prompt="<think>\n\n</think>\n\n", limit=400):
    """The calls that a random model makes under a guide, and the content beside them."""
    draw = random.Random(seed)
    plan = guides.plan(split_of(tokenizer, prompt), wanted(), tools=TOOLS, tool_choice=choice)
    one, path = plan(), OutputPipeline(tokenizer, (), split_of(tokenizer, prompt), tools=True)
    ends = {tokenizer.id(text) for text in ENDS}
    quote = tokenizer.id('"')
    deltas = []
    for step in range(limit):
        ids = set(ids_of(one.allowed()))
        if ids & ends and (step > 100 or not ids - ends or draw.random() < 0.7):
            break
        closing = ids & {quote, tokenizer.id("}")}
        id = draw.choice(sorted(closing if closing and draw.random() < 0.5 else ids - ends))
        one.push(id)
        deltas.append(path.push(id))
    else:
        raise AssertionError("no end")
    deltas.append(path.finish())
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert path.finish_reason("stop") == "tool_calls"
    return calls, "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("seed", range(12))
def test_required_is_one_call_or_more_of_the_tools(tiny, guides, seed):
    calls, content = calls_of(tiny, guides, "required", seed)
    assert content == ""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), {"type": "object", **schemas[call.name]})


@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_called_once(tiny, guides, seed):
    (call,), content = calls_of(tiny, guides, {"type": "function", "function": {"name": "weather"}}, seed)
    assert (call.name, content) == ("weather", "")
    jsonschema.validate(json.loads(call.arguments), CITY)


def test_required_after_thinking(tiny, guides):
    one = guide(guides, tiny, "<think>\n", tools=TOOLS, tool_choice="required")
    push(one, tiny, "hm</think>\n<tool_call>\n")
    push(one, tiny, '{"name": "now", "arguments": {}}\n</tool_call>')
    assert allowed(one, tiny) == {*ENDS, "\n"}


def test_without_marker_tokens_the_letters_are_forced(spm):
    made = Guides(spm, vocab_size=spm.vocab_size, end_ids={spm.eos_id})
    one = made.plan(ThinkingSplit(None, None, []), wanted(), tools=TOOLS, tool_choice="required")()
    text = b""
    while not text.startswith(b'<tool_call>\n{"name": "'):
        id = ids_of(one.allowed())[0]
        one.push(id)
        text += spm.token_bytes(id)


@pytest.mark.parametrize(
    ("tools", "choice", "match"),
    [
        (None, "required", "tool_choice: no tools are given"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice: no tool is named 'f'"),
        (TOOLS, {"type": "function", "function": {"name": "f"}}, "tool_choice: no tool is named 'f'"),
        (TOOLS, "sometimes", "tool_choice: must be"),
        (TOOLS, {"type": "function"}, "tool_choice: must be"),
        (TOOLS, 5, "tool_choice: must be"),
        ([5], "required", r"tools\[0\].function: must be an object"),
        ([{"function": {}}], "required", r"tools\[0\].function.name: must be"),
        ([{"name": "f", "parameters": [1]}], "required", r"tools\[0\].function.parameters of 'f': must be"),
        ([{"name": "f", "parameters": {"multipleOf": 999983}}], "required", r"tools\[0\].* of 'f': multipleOf"),
        ([*TOOLS, {"name": "f", "parameters": {"uniqueItems": True}}], "required", r"tools\[3\].* of 'f': Unimpl"),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}}],
            "required",
            r"tools\[0\].* of 'f': regex parse",
        ),
        ([{"name": "f", "parameters": {"not": {}}}], {"function": {"name": "f"}}, r"tools\[0\].* of 'f': Unimplem"),
    ],
)
def test_choices_that_cannot_be_kept_are_refused(guides, tiny, tools, choice, match):
    with pytest.raises(ParameterError, match=f"^{match}"):
        guides.plan(split_of(tiny, ""), wanted(), tools=tools, tool_choice=choice)


def test_auto_and_none_restrict_nothing(guides, tiny):
    for choice in (None, "auto", "none"):
        assert guides.plan(split_of(tiny, ""), wanted(), tools=TOOLS, tool_choice=choice) is None
    assert may_call(TOOLS, None) and may_call(TOOLS, "auto") and may_call(TOOLS, "required")
    assert not may_call(TOOLS, "none") and not may_call([], "auto") and not may_call(None, None)


STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, *TOOLS[1:]]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_call_of_strict_tools_keeps_to_its_schema_once_it_has_begun(guides, tiny, choice):
    one = guide(guides, tiny, "<think>\n", tools=STRICT, tool_choice=choice)
    push(one, tiny, "<tool_call> I think</think>")
    for _ in range(2):
        push(one, tiny, "What is the weather? ")
        assert one.allowed() is None
        push(one, tiny, '<tool_call>\n{"name": "weather", "arguments": {"city": "')
        assert "P" in allowed(one, tiny) and not {"B", '"', *ENDS} & allowed(one, tiny)
        push(one, tiny, 'Paris", "days": 3}}\n')
        assert not ENDS & allowed(one, tiny)
        push(one, tiny, "</tool_call>")
        assert one.allowed() is None


def test_beside_strict_tools_the_others_take_any_object(guides, tiny):
    one = guide(guides, tiny, "</think>", tools=STRICT)
    push(one, tiny, '<tool_call>\n{"name": "now", "arguments": {"zone": [1, "x"]}}\n</tool_call>')
    assert one.allowed() is None


def test_strict_is_refused_where_it_cannot_be_kept(guides, tiny, spm):
    made = Guides(spm, vocab_size=spm.vocab_size, end_ids={spm.eos_id})
    with pytest.raises(ParameterError, match=r"^tools\[0\]\.function\.strict: this model has no token"):
        made.plan(ThinkingSplit(None, None, []), wanted(), tools=STRICT)
    unknown = [{"function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
    with pytest.raises(ParameterError, match=r"^tools\[0\].* of 'f': Unimplem"):
        guides.plan(split_of(tiny, ""), wanted(), tools=unknown)


def test_one_call_is_all_that_is_forced_where_no_second_may_come(guides, tiny):
    plan = guides.plan(split_of(tiny, "</think>"), wanted(), tools=TOOLS, tool_choice="required", one_call=True)
    one = plan()
    push(one, tiny, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert allowed(one, tiny) == ENDS


def test_qwen3_thinks_and_then_calls(qwen3):
    made = Guides(qwen3, vocab_size=151_936, end_ids={151645, 151643})
    one = made.plan(
        split_of(qwen3, "<|im_start|>assistant\n"), wanted(thinking_budget=3), tools=TOOLS, tool_choice="required"
    )()
    assert ids_of(one.allowed()) == [151657, 151667]
    push(one, qwen3, "<think>\nI call")
    assert ids_of(one.allowed()) == [151668]
    push(
        one,
        qwen3,
        '</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "東京", "days": 3}}\n</tool_call>',
    )
    assert {151643, 151645} <= set(ids_of(one.allowed()))
