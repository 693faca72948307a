"""Random damage to tokenizers, templates and conversations: nothing but a `QkvError`, in bounded time and memory.

`QKV_FUZZ_COUNT` sets how many inputs each test tries; the light run is short. Every case is reproducible from its seed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzz_weights import COUNT, ODD_VALUES, no_hang, peak_memory_mb

from qkv.errors import QkvError
from qkv.text.prompt.template import ChatTemplate, encode_chat
from qkv.text.tokens.detokenizer import Detokenizer
from qkv.text.tokens.sentencepiece import merges_from_scores
from qkv.text.tokens.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))

from vocabularies import (
    gguf_metadata,
    llama3_tokenizer_json,
    scored_pieces,
    sentencepiece_json,
    sentencepiece_metadata,
    tiny_tokenizer_json,
)

CPU_SECONDS = 2.0
MEMORY_LIMIT_MB = 600
ODD_TEXTS = [
    "\x00",
    "▁",
    "<s>",
    "<0x41>",
    "Ġ",
    "(a+)+$",
    "(?",
    "\\p{L}*",
    "\ud800",
    "😀",
    "x" * 5000,
    "Sequence",
    "BPE",
]
SPLICES = [*ODD_TEXTS[:7], "{{", "}}", "{%", "%}", "|", "(", ")", "'", "*", "~", "**", "[", "9"]
PROMPT = "then <|im_end|>\n 12 <s> 中😀\x00▁ " + "a" * 50
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief <|im_end|>"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]},
    {
        "role": "assistant",
        "content": "<think>\nx\n</think>\n\ny",
        "reasoning_content": "r",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}],
    },
    {"role": "tool", "content": "20", "tool_call_id": "1"},
]
TEMPLATES = [
    """{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '
' + (m.content | trim) + '<|im_end|>' }}{% if m.tool_calls %}{% for c in m.tool_calls %}
{{ c.function | tojson(indent=2) }}{% endfor %}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    """{% set ns = namespace(n=0, last='') %}
{% macro part(m, deep=false) %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{% if deep %}{{ part(m) }}{% endif %}{% endmacro %}
{% for m in messages[::-1] %}{% if m.role == 'x' %}{{ raise_exception('no') }}{% elif loop.first %}{% continue %}
{% endif %}{% set ns.n = ns.n + loop.index0 * 2 %}{{ part(m, true) ~ strftime_now('%d %b %Y') }}
{% if ns.n > 9 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}""",
    """{%- for k, v in messages[0].items() | list %}{{ k | upper }}={{ v[:3] | replace('b', 'bb') | indent(4) }},
{{ '%05d|%s' % (loop.index ** 3, v) }}{{ '{:>9}'.format(k) }}{% endfor %}
{{ messages | map(attribute='role') | join(', ') }}{{ range(3) | sum }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ x is defined }}""",
]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value; long containers are represented by some of their entries."""
    found = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else []
        for key in [*keys[:20], *keys[-5:]] if len(keys) > 25 else keys:
            found.append((item, key))
            waiting.append(item[key])
    return found


def odd(rng: random.Random) -> Any:
    return rng.choice(
        [*ODD_VALUES, *ODD_TEXTS, rng.getrandbits(rng.randint(1, 64)), float("nan"), -1, [[]], {"": None}]
    )


def damaged_json(value: Any, rng: random.Random) -> Any:
    """A copy with one to three entries removed, replaced, renamed, doubled or exchanged."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        places = nodes(value)
        if not places:
            return odd(rng)
        container, key = rng.choice(places)
        other, other_key = rng.choice(places)
        match rng.randrange(7):
            case 0:
                del container[key]
            case 1:
                container[key] = odd(rng)
            case 2:
                container[key] = json.loads(json.dumps(other[other_key]))
            case 3 if isinstance(container, list):
                container.append(container[key])
            case 4 if isinstance(container, dict):
                container[rng.choice(ODD_TEXTS)] = container.pop(key)
            case 5 if isinstance(container[key], bool):
                container[key] = not container[key]
            case 6 if isinstance(container[key], (str, int)):
                container[key] = (
                    damaged_text(container[key], rng) if isinstance(container[key], str) else -container[key]
                )
    return value


def damaged_text(text: str, rng: random.Random) -> str:
    """One to four stretches removed, doubled, moved or replaced."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
        b = min(b, a + rng.choice([1, 3, 12, 200]))
        piece = text[a:b]
        at = rng.randint(0, len(text))
        text = [
            text[:a] + text[b:],
            text[:at] + piece + text[at:],
            text[:a] + rng.choice(SPLICES) + text[b:],
            text[:a] + rng.choice("(){}[]|.,'\"%~*-+: \n0_ax") + text[a + 1 :],
        ][rng.randrange(4)]
    return text


def fuzz(attempt: Callable[[random.Random], None], count: int, first_seed: int = 0) -> int:
    """Make `count` attempts; returns how many were refused with a QkvError of one line."""
    refused = 0
    for seed in range(first_seed, first_seed + count):
        start = time.process_time()
        try:
            with no_hang(seed):
                attempt(random.Random(seed))
        except QkvError as error:
            refused += 1
            assert "\n" not in str(error), f"seed {seed}: more than one line: {error}"
            assert len(str(error)) < 2000, f"seed {seed}: a message of {len(str(error))} characters"
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        spent = time.process_time() - start
        assert spent < CPU_SECONDS, f"seed {seed}: {spent:.1f} s of processor time"
    return refused


def check(attempt: Callable[[random.Random], None], count: int = COUNT) -> None:
    before = peak_memory_mb()
    refused = fuzz(attempt, count)
    assert count // 10 < refused, "hardly any damage was noticed: the mutations miss what is read"
    assert peak_memory_mb() - before < MEMORY_LIMIT_MB


def use(tokenizer: Tokenizer) -> None:
    """What an engine does with a tokenizer: all of it must work, or be refused, once it has been made."""
    for text in (PROMPT, ""):
        for ids in (tokenizer.encode(text), tokenizer.encode(text, markers=True), tokenizer.prompt(text)):
            detokenizer = Detokenizer(tokenizer)
            streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
            assert streamed == tokenizer.decode(ids, inner=True)
        assert not set(tokenizer.encode(text)) & tokenizer._never_plain
        for piece in tokenizer.segments(text):
            assert isinstance(piece, int) or tokenizer.encode(piece, inner=True) is not None
    assert tokenizer.bos_token is None or tokenizer.id(tokenizer.bos_token) is not None or tokenizer.bos_id is not None
    for id in (0, tokenizer.vocab_size - 1, tokenizer.vocab_size, 2**40):
        assert isinstance(tokenizer.token_bytes(id), bytes)


@pytest.fixture(scope="module")
def specs() -> list[dict[str, Any]]:
    pieces = scored_pieces()
    merges = merges_from_scores(
        {piece: id for id, (piece, _, kind) in enumerate(pieces) if kind == 1},
        {piece: score for piece, score, kind in pieces if kind == 1},
    )
    spelled = [sentencepiece_json(pieces, merges, scheme) for scheme in ("prepend", "first")]
    return [tiny_tokenizer_json(), llama3_tokenizer_json(), *spelled]


def test_damaged_tokenizer_files(specs, tmp_path):
    path = tmp_path / "tokenizer.json"

    def attempt(rng: random.Random) -> None:
        spec = rng.choice(specs)
        text = json.dumps(spec) if rng.random() < 0.2 else json.dumps(damaged_json(spec, rng))
        if text == json.dumps(spec):
            text = damaged_text(text, rng)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        use(Tokenizer.from_file(path))

    check(attempt)


def test_damaged_tokenizer_configs(specs, tmp_path):
    path = tmp_path / "tokenizer.json"
    entry = {
        "content": "<x>",
        "special": True,
        "normalized": True,
        "lstrip": True,
        "rstrip": False,
        "single_word": False,
    }

    def attempt(rng: random.Random) -> None:
        spec = rng.choice(specs)
        path.write_text(json.dumps(spec))
        size = max(added["id"] for added in spec["added_tokens"]) + 1
        names = [added["content"] for added in spec["added_tokens"]]
        config = {
            "bos_token": rng.choice(names),
            "eos_token": {"content": rng.choice(names)},
            "add_bos_token": True,
            "added_tokens_decoder": {str(max(size, len(spec["model"]["vocab"]))): entry},
        }
        changed = damaged_json(config, rng)
        use(Tokenizer.from_file(path, changed if isinstance(changed, dict) else {}))

    check(attempt)


def test_damaged_gguf_tokenizers(specs):
    keys = [
        gguf_metadata(specs[0], "qwen2", padding=3) | {"tokenizer.ggml.eos_token_id": 300},
        gguf_metadata(specs[1], "llama-bpe"),
        sentencepiece_metadata(scored_pieces()),
    ]

    def attempt(rng: random.Random) -> None:
        changed = damaged_json(rng.choice(keys), rng)
        use(Tokenizer.from_gguf(changed if isinstance(changed, dict) else {}, "damaged.gguf"))

    check(attempt)


def test_damaged_templates(specs, tmp_path):
    tokenizer = _tokenizer(specs[0], tmp_path)

    def attempt(rng: random.Random) -> None:
        source = damaged_text(rng.choice(TEMPLATES), rng)
        template = ChatTemplate(source, bos_token="<|endoftext|>", eos_token="<|im_end|>", name="damaged")
        ids = encode_chat(template, tokenizer, MESSAGES, tools=[{"a": 1}])
        assert all(0 <= id < tokenizer.vocab_size for id in ids)

    check(attempt)


def test_damaged_conversations(specs, tmp_path):
    tokenizer = _tokenizer(specs[0], tmp_path)
    templates = [ChatTemplate(source, bos_token=None, eos_token=None, name="chat") for source in TEMPLATES]

    def attempt(rng: random.Random) -> None:
        messages = damaged_json(MESSAGES, rng)
        tools = damaged_json([{"type": "function", "function": {"name": "f", "parameters": {}}}], rng)
        tools = tools if rng.random() < 0.3 else None
        encode_chat(rng.choice(templates), tokenizer, messages, tools=tools, thinking=rng.choice([None, True, False]))

    check(attempt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ODD_TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "x", ""])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | JSON, "content": JSON},
    optional={
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"name": st.text(), "arguments": JSON})),
        "name": JSON,
    },
)
FRAGMENTS = """
    {{ }} {% %} {{- -}} {%- if for in endfor endif else set macro endmacro f ( ) [ ] { } , : . ' " | ~ + - * **
    % // messages m m.content m['role'] loop.index ns namespace(a=1) range(9999) not and or is defined none true
    0 9999999 'ab' tojson replace join map('upper') list string trim indent(9) center(99) sort raise_exception
    strftime_now split continue break = == < __class__ self caller cycler joiner recursive {# #} {%+ raw endraw
    block endblock
"""
"""What templates are made of."""
MANY = settings(
    max_examples=max(COUNT // 10, 100), suppress_health_check=list(HealthCheck), deadline=None, database=None
)


@MANY
@given(st.lists(MESSAGE, max_size=4) | JSON, JSON)
def test_any_conversation(tiny_pair: tuple[Tokenizer, ChatTemplate], messages: Any, tools: Any) -> None:
    tokenizer, template = tiny_pair
    fuzz(lambda _: encode_chat(template, tokenizer, messages, tools=tools) and None, 1)


@MANY
@given(st.lists(st.sampled_from(FRAGMENTS.split()), max_size=30))
def test_any_template(tiny_pair: tuple[Tokenizer, ChatTemplate], fragments: list[str]) -> None:
    tokenizer, _ = tiny_pair

    def attempt(_: random.Random) -> None:
        template = ChatTemplate(" ".join(fragments), bos_token=None, eos_token=None, name="any")
        encode_chat(template, tokenizer, MESSAGES)

    fuzz(attempt, 1)


@MANY
@given(st.sampled_from(["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"]), JSON)
def test_any_part_of_a_tokenizer_file(specs: list[dict[str, Any]], tmp_path: Path, part: str, value: Any) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(specs[0] | {part: value}), errors="replace")
    fuzz(lambda _: use(Tokenizer.from_file(path)), 1)


@pytest.fixture(scope="module")
def tiny_pair(specs, tmp_path_factory) -> tuple[Tokenizer, ChatTemplate]:
    template = ChatTemplate(TEMPLATES[0], bos_token=None, eos_token=None, name="any")
    return _tokenizer(specs[0], tmp_path_factory.mktemp("any")), template


def _tokenizer(spec: dict[str, Any], folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spec))
    return Tokenizer.from_file(path)
