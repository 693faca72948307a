"""Prompts of families whose templates are written differently: Hugging Face's for all shapes of conversation."""

from __future__ import annotations

import itertools
import json

import pytest
from test_chat_ids import CONVERSATIONS, TOOLS, called, turn
from vocabularies import llama3_tokenizer_json, scored_pieces, sentencepiece_json

from qkv.errors import ParameterError, TemplateError
from qkv.text.prompt.template import ChatTemplate, encode_chat
from qkv.text.tokens.sentencepiece import merges_from_scores
from qkv.text.tokens.tokenizer import Tokenizer

LLAMA3 = """{{- bos_token }}
{%- if date is not defined %}
    {%- set date = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set ns = namespace(first=true) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date + "\n\n" }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}{{- "\n\n" }}
{%- endfor %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'developer' %}{%- continue %}{%- endif %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("Only one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- (message.content if message.content is string else message.content | tojson) + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
"""In the style of Llama 3.x: BOS from the template, trimmed contents, one tool call a turn, indented tools."""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if message.role in ["user", "assistant"] and message.tool_calls is not defined %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] " + (tools | map(attribute="function") | list | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- set opening = system + "\n\n" if loop.first and system is defined else "" %}
        {{- "[INST] " + opening + message["content"] + " [/INST]" }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson) ~ (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS] " + message.content + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
"""In the style of Mistral: the system text in the first user turn, strict turns, no generation prompt."""

SHAPES = CONVERSATIONS | {
    "reasoning by another name": [turn("user", "a"), turn("assistant", "b", reasoning="r"), turn("user", "c")],
    "two calls at once": [
        turn("user", "a"),
        turn("assistant", "", tool_calls=called({})["tool_calls"] * 2),
        turn("tool", "1"),
        turn("tool", "2"),
    ],
    "system twice": [turn("system", "a"), turn("system", "b"), turn("user", "c")],
    "developer": [turn("developer", "a"), turn("user", "b")],
    "text to trim": [turn("system", " s\n"), turn("user", "\n u  "), turn("assistant", "  a \n")],
    "long": [turn("user" if n % 2 == 0 else "assistant", f"turn {n} " * 50) for n in range(31)],
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """name → (tokenizer, template, path of its tokenizer.json, bos, eos)."""
    pieces = scored_pieces()
    normal = {piece: id for id, (piece, _, kind) in enumerate(pieces) if kind == 1}
    merges = merges_from_scores(normal, {piece: pieces[id][1] for piece, id in normal.items()})
    specs = {
        "llama3": (llama3_tokenizer_json(), LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
        "mistral": (sentencepiece_json(pieces, merges), MISTRAL, "<s>", "</s>"),
        "mistral, newer file": (sentencepiece_json(pieces, merges, "first"), MISTRAL, "<s>", "</s>"),
    }
    found = {}
    for name, (spec, source, bos, eos) in specs.items():
        path = tmp_path_factory.mktemp("family") / "tokenizer.json"
        path.write_text(json.dumps(spec))
        tokenizer = Tokenizer.from_file(path, {"bos_token": bos, "eos_token": eos, "add_bos_token": True})
        found[name] = tokenizer, ChatTemplate(source, bos_token=bos, eos_token=eos, name=name), path, bos, eos
    return found


NAMES = ["llama3", "mistral", "mistral, newer file"]


def outcome(function):
    """What a function returns, or that it refused."""
    try:
        return function()
    except Exception as error:
        assert isinstance(error, (TemplateError, ParameterError)) or type(error).__module__.startswith("jinja2")
        return "refused"


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("messages", SHAPES.values(), ids=SHAPES)
def test_prompts_equal_transformers(families, name, messages):
    transformers = pytest.importorskip("transformers")
    tokenizer, template, path, bos, eos = families[name]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token=bos, eos_token=eos)
    theirs.chat_template = template.source
    for tools, prompt in itertools.product((None, TOOLS), (True, False)):
        options = {"tools": tools, "add_generation_prompt": prompt, "date": "1 May 2031"}

        meant = messages
        if name != "llama3":  # whose template knows the role
            meant = [message | {"role": message["role"].replace("developer", "system")} for message in messages]

        def expected(tokenize, options=options, meant=meant):
            return theirs.apply_chat_template(meant, tokenize=tokenize, return_dict=False, **options)

        text = outcome(lambda: expected(False))
        assert outcome(lambda options=options: template.render(messages, **options)) == text
        ids = outcome(lambda options=options: encode_chat(template, tokenizer, messages, **options))
        assert ids == outcome(lambda: expected(True))
        if name == "llama3":
            assert (text == "refused") == (messages is SHAPES["two calls at once"])
        if text != "refused":
            assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == text.count(bos) == 1


@pytest.mark.parametrize("name", NAMES)
def test_exactly_one_bos_wherever_it_comes_from(families, name):
    tokenizer, template, _, bos, _ = families[name]
    ids = encode_chat(template, tokenizer, [turn("user", "hi " + bos)])
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    for text in ("hi", bos + "hi"):
        assert tokenizer.prompt(text).count(tokenizer.bos_id) == 1 and tokenizer.prompt(text)[0] == tokenizer.bos_id


def test_refusals_have_the_templates_words(families):
    for name, messages, words in [
        ("mistral", [turn("user", "a"), turn("user", "b")], "roles must alternate"),
        ("mistral", [turn("assistant", "a")], "roles must alternate"),
        ("mistral", [turn("critic", "a")], "Only user, assistant and tool roles"),
        ("llama3", SHAPES["two calls at once"], "Only one tool call at a time"),
    ]:
        tokenizer, template, *_ = families[name]
        for render in (template.render, lambda m, t=template, k=tokenizer: encode_chat(t, k, m)):
            with pytest.raises(TemplateError, match=words):
                render(messages)


def test_every_shape_renders_or_is_refused(families):
    shapes = [*SHAPES.values(), [turn("system", "x")], [turn("tool", "x")], [turn("user", None)], [], [turn("", "x")]]
    rendered = 0
    for tokenizer, template, *_ in families.values():
        for messages in shapes:
            result = outcome(lambda t=template, k=tokenizer, m=messages: encode_chat(t, k, m, tools=TOOLS))
            rendered += result != "refused"
    assert len(SHAPES) < rendered < 3 * len(shapes)
