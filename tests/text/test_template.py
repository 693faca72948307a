"""Chat templates: what Hugging Face renders, and nothing else a template might try."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys

import jinja2.sandbox
import pytest

from qkv.errors import ParameterError, TemplateError
from qkv.text.prompt.template import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "Be kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""In the shape of SmolLM2's template, which looks at messages[0]."""


def compiled(source, **tokens):
    tokens = {"bos_token": None, "eos_token": None} | tokens
    return ChatTemplate(source, name="test", **tokens)


def render(source, messages=({"role": "user", "content": "hi"},), **options):
    return compiled(source).render(messages, **options)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def test_a_template_that_looks_at_the_first_message():
    assert render(SMOLLM2) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    system = [turn("system", "s")]
    assert render(SMOLLM2, system, add_generation_prompt=False) == "<|im_start|>system\ns<|im_end|>\n"


USUAL = {
    "{{ messages[::-1][0].content ~ 1 ~ none }}": "hi1None",
    "{{ '<think>a</think>b'.split('</think>')[-1].lstrip('\n') }}": "b",
    "{{ ['x', 1] | join('-') ~ ('%s=%03d' % ('a', 7)) ~ '{:>4}'.format(5) }}": "x-1a=007   5",
    "{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}": "6",
    "{% macro f(x, y=2) %}[{{ x * y }}]{% endmacro %}{{ f(3) }}{{ f('a') }}": "[6][aa]",
    "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}": "b1Falsea2True",
    "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ loop.length }}{% endfor %}": "a2b2",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}": "['hi']",
    "{{ messages | rejectattr('role', 'in', ['user']) | list | length }}": "0",
    "{% for m in messages if m.role == 'user' recursive %}{{ m.content }}{% endfor %}": "hi",
    "{{ x is defined }}{{ messages is iterable }}{{ x | default('d') }}{{ none is none }}": "FalseTruedTrue",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}": "hi",
    "{% set x %}a{{ 1 }}{% endset %}{{ x | upper | indent(2, true) }}{% filter upper %}b{% endfilter %}": "  A1B",
    "{{ [3, 1, 2] | sort | first }}{{ [1, 2] + [3] }}{{ (1, 2) }}{{ {'a': [1.5]} }}": "1[1, 2, 3](1, 2){'a': [1.5]}",
    "{% for c in cycler('a', 'b').next() %}{{ c }}{% endfor %}{{ 7 // 2 }}{{ 2 ** 9 }}{{ -7 % 3 }}": "a35122",
    "{{ 'a\nb' | trim | replace('a', 'c') | title }}{{ ' x ' | trim }}{{ 'abc'[1:] }}{{ 'a' in 'b' }}": "C\nBxbcFalse",
}

LAYOUT = """
    {% for n in range(9) %}
        {% if n == 1 %}
            {% continue %}
        {% endif %}
        {% if n == 3 %}{% break %}{% endif %}
{{ n }}
    {%- endfor %}

text  {# comment #}
   {{- messages[0].content -}}
 x
"""
"""White space around blocks, `break` and `continue`."""


@pytest.mark.parametrize("source", USUAL)
def test_what_templates_use_works(source):
    assert render(source) == USUAL[source]


@pytest.mark.parametrize("source", [*USUAL, LAYOUT, SMOLLM2])
def test_guards_change_nothing_that_plain_jinja_renders(source):
    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(**options)
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    messages = [turn("user", "hi")]
    expected = environment.from_string(source).render(messages=messages, add_generation_prompt=True)
    assert render(source, messages) == expected


def test_tojson_takes_the_keywords_of_hugging_face():
    value = {"b": "中<&'", "a": [1, None, True, 1.5]}
    for options, keywords in [
        ("", {"ensure_ascii": False}),
        ("(ensure_ascii=True)", {"ensure_ascii": True}),
        ("(indent=2)", {"ensure_ascii": False, "indent": 2}),
        (
            "(separators=(',', ':'), sort_keys=true)",
            {"ensure_ascii": False, "separators": (",", ":"), "sort_keys": True},
        ),
    ]:
        assert render("{{ x | tojson" + options + " }}", x=value) == json.dumps(value, **keywords)


def test_the_variables_of_a_template():
    source = (
        "{{ bos_token }}|{{ eos_token }}|{{ enable_thinking is defined }}|{{ enable_thinking }}|{{ tools }}|{{ x }}"
    )
    messages = [turn("user", "hi")]
    assert compiled(source, eos_token="</s>").render(messages) == "|</s>|False||None|"
    template = compiled(source, bos_token="<s>")
    assert template.render(messages, thinking=False, tools=[{"a": 1}], x=2) == "<s>||True|False|[{'a': 1}]|2"
    assert template.render(messages, thinking=True, tools=[]) == "<s>||True|True|None|"
    with pytest.raises(ParameterError, match=r"^thinking: "):
        template.render(messages, thinking=True, enable_thinking=False)
    with pytest.raises(ParameterError, match=r"^tools: "):
        template.render(messages, tools={"a": 1})
    with pytest.raises(ParameterError, match=r"^x: must be made of JSON values"):
        template.render(messages, x=print)


def test_strftime_now_is_today():
    before = datetime.datetime.now().strftime("%d %b %Y")
    shown = render("{{ strftime_now('%d %b %Y') }}")
    assert shown in {before, datetime.datetime.now().strftime("%d %b %Y")}


def test_a_refusal_has_the_templates_words():
    with pytest.raises(TemplateError, match=r"^test: chat template: Roles must alternate$"):
        render("{{ raise_exception('Roles must\nalternate') }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{{ x | nosuchfilter }}", "{% include 'x' %}"])
def test_a_template_that_cannot_be_compiled_is_refused_at_once(source):
    with pytest.raises(TemplateError, match=r"^test: chat template"):
        compiled(source)


@pytest.mark.parametrize("messages", [[turn("user", "a"), {"role": "x"}], [], None])
def test_conversations_are_checked_first(messages):
    with pytest.raises(ParameterError, match=r"^messages"):
        render("{{ messages[5].a.b }}", messages)


def test_errors_inside_a_template_are_one_line():
    for source in [
        "{{ messages[5].a.b }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ none() }}",
        "{{ [] | first | first | tojson }}",
    ]:
        with pytest.raises(TemplateError, match=r"^test: chat template: [^\n]+$"):
            render(source)


def growing(step, start="'ab'"):
    body = "{% for i in range(99) %}{% set ns.a = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(a=" + start + ") %}" + body + "{{ ns.a }}{{ ns.a == 1 }}"


def endless(condition, prepare=""):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}"
    return prepare + loops + "{% if " + condition + " %}{% endif %}{% endfor %}{% endfor %}"


LONG = "{% set a = 'a' * 2000000 %}{% set b = 'a' * 1000000 ~ 'b' %}"
LIST = "{% set a = range(9999) | list %}{% set b = range(9999) | list %}"
HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": endless("0"),
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "loop printing": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "loop of text": "{% for i in range(99999) %}" + "x" * 50_000 + "{% endfor %}",
    "captured text": "{% for i in range(99999) %}{% set x %}" + "x" * 50_000 + "{% endset %}{% endfor %}",
    "recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(64) }}",
    "recursive block": "{% block a %}{{ self.a() }}{% endblock %}",
    "times": "{{ 'a' * 10**10 }}",
    "times reversed": "{{ 10**9 * messages }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "number growth": growing("ns.a * ns.a", "999"),
    "number by text": "{{ ('f' * 100000) | int(0, 16) // 3 }}",
    "plus": growing("ns.a + ns.a"),
    "tilde": growing("ns.a ~ ns.a"),
    "list in list": growing("[ns.a, ns.a]"),
    "tuple as key": growing("(ns.a, ns.a)") + "{{ {ns.a: 1} }}",
    "dict in dict": growing("dict(a=ns.a, b=ns.a)"),
    "dict literal": growing("{'a': ns.a, 'b': ns.a}"),
    "list nesting": "{% for i in range(999) %}" + growing("[ns.a]", "[]") + "{% endfor %}",
    "deep list": growing("[[[[[[[[[[[[[[[ns.a]]]]]]]]]]]]]]]", "[]").replace("99", "9999"),
    "replace filter": growing("ns.a | replace('a', 'aaab')"),
    "replace by keywords": "{% set a = 'a' * 3000000 %}{{ a | replace(new=a, old='a') }}",
    "replace method": growing("ns.a.replace('', 'aaab')"),
    "join method": growing("ns.a.join([ns.a, ns.a, ns.a])"),
    "join filter": growing("[ns.a, ns.a, ns.a] | join(ns.a)"),
    "map join": growing("[ns.a, ns.a] | map('upper') | join"),
    "indent": growing("ns.a | indent(ns.a, true)"),
    "arguments compared": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}"
    "{% elif varargs == [varargs] | list | first %}{% endif %}{% endmacro %}{{ f(99) }}",
    "arguments as key": "{% macro f(n) %}"
    "{{ f(n - 1, varargs, varargs) if n else {varargs: 1} }}{% endmacro %}{{ f(99) }}",
    "macro output": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + growing("f(ns.a)"),
    "center filter": "{{ 'a' | center(9999999999) }}",
    "center method": "{{ 'a'.center(9999999999) }}",
    "ljust": "{{ 'a'.ljust(width=9999999999) }}{{ 'a'.ljust(9999999999) }}",
    "zfill": "{{ '1'.zfill(9999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "percent many": "{{ ('%s' * 100000) % ((('a' * 1000),) * 100000) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format item": "{{ ''['format'] }}{{ '{:999999999}'['format'](1) }}",
    "format attribute": "{{ '{0.__class__.__mro__}'.format('') }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "split": "{{ ('a ' * 1900000).split() }}",
    "splitlines": "{{ ('a\n' * 1900000).splitlines() }}",
    "list of text": "{{ ('a' * 3000000) | list }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 10] * 1000) | sum(start=[]) }}",
    "tojson indent": "{{ dict(a=1) | tojson(indent=10**9) }}",
    "tojson separators": "{{ [1, 2] | tojson(separators=('a' * 1000000, ':')) }}",
    "tojson nesting": "{% set ns = namespace(a=[1] * 9999) %}"
    "{% for i in range(99) %}{% set ns.a = [ns.a] %}{% endfor %}"
    "{{ ns.a | tojson(indent=16) }}",
    "map center": "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "slow in": endless(" or ".join(["b in a"] * 200), LONG),
    "slow slices": endless(" or ".join(["a[::-1] is none"] * 200), LONG),
    "many slices": "{% set a = 'a' * 3000000 %}{{ [" + "a[1:], " * 9000 + "1] | length }}",
    "slow compare": endless(" or ".join(["a != b"] * 200), LIST),
    "slow test": endless(" or ".join(["b is in a"] * 200), LONG),
    "slow select": LONG
    + "{% for i in range(999) %}{{ range(30000) | map('string') | select('in', a) | list }}{% endfor %}",
    "slow count": endless(" or ".join(["a.count(b)"] * 200), LONG),
    "slow changed": endless(" or ".join(["not loop.changed(a)"] * 200), LIST),
    "slow index": endless(" or ".join(["a.count(b)"] * 200), LIST),
    "slow upper": endless(" or ".join(["a | upper == b"] * 200), LONG),
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "globals": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__mro__') }}{{ (''|attr('__class__')).x }}",
    "map attribute": "{{ [''] | map(attribute='__class__') | map(attribute='x') | list }}",
    "self": "{{ self.__init__.__globals__ }}",
    "append": "{{ messages.append(1) }}",
    "encode": "{{ 'a'.encode().hex() }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "print a namespace": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "join a namespace": "{% set ns = namespace() %}{{ [ns] | join }}",
    "namespace attribute": "{% set ns = namespace(__class__=1) %}",
    "print a function": "{{ range }}",
    "call a class": "{{ ''.join.__self__.__class__('x') }}",
    "deep parentheses": "{{" + "(" * 9000 + "1" + ")" * 9000 + "}}",
    "deep not": "{{ " + "not " * 9000 + "1 }}",
    "long sum": "{{ 1" + "+1" * 30_000 + "}}",
    "deep if": "{% if a %}" * 5000,
    "many braces": "{{" * 30_000,
    "long source": "x" * 70_000,
    "autoescape": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "import": "{% import 'x' as x %}",
    "extends": "{% extends 'x' %}",
}
"""Each must end in a TemplateError, soon, in little memory."""

CHILD = """
import json, resource, sys
from qkv.errors import TemplateError
from qkv.text.prompt import budget
from qkv.text.prompt.template import ChatTemplate
budget.CPU_SECONDS = 0.2
limit = 1 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name, source in json.load(sys.stdin).items():
    try:
        template = ChatTemplate(source, bos_token=None, eos_token=None, name="evil")
        result = template.render([{"role": "user", "content": "hi"}])
    except TemplateError as error:
        verdict = "refused" if "MemoryError" not in str(error) and "\\n" not in str(error) else str(error)
    else:
        verdict = "rendered " + result[:50]
    print(json.dumps([name, verdict]), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits memory with setrlimit")
def test_hostile_templates_end_in_an_error():
    """In a child with 1 GiB of address space: a guard that fails shows as MemoryError, a kill or the time limit."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    verdicts = dict(json.loads(line) for line in done.stdout.splitlines())
    assert verdicts == dict.fromkeys(HOSTILE, "refused"), done.stderr[-2000:]
    assert done.returncode == 0


def test_long_conversations_render():
    messages = [turn("user" if n % 2 == 0 else "assistant", "text " * 2000) for n in range(400)]
    assert len(render(SMOLLM2, messages)) > 400 * 10_000
    inner = "{% for n in messages[:loop.index] %}{% if n.role == m.role %}{% endif %}{% endfor %}"
    quadratic = "{% for m in messages %}" + inner + "{% endfor %}x"
    assert render(quadratic, messages) == "x"
