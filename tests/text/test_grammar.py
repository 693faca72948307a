"""Grammars over tokens: masks are what brute force finds, what comes through is valid, and nothing hostile hurts."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
import threading

import jsonschema
import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import qkv.text.constrain.grammar
from qkv.errors import ParameterError, QkvError
from qkv.text.constrain.grammar import GrammarVocabulary
from qkv.text.constrain.masks import ids_of, mask_of
from qkv.text.constrain.schema import choices_grammar, lark_grammar, regex_grammar, schema_grammar
from qkv.text.tokens.tokenizer import Tokenizer

parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
PADDING = 37  # rows that the model's matrix has beyond the tokenizer's ids


def vocabulary(tokenizer):
    return GrammarVocabulary(
        tokenizer,
        vocab_size=tokenizer.vocab_size + PADDING,
        end_ids={tokenizer.eos_id, tokenizer.vocab_size + PADDING - 1},
        hidden=[id for id in (tokenizer.id("<think>"), tokenizer.id("</think>")) if id is not None],
    )


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A vocabulary with the bytes and a few longer tokens over a, b and 中."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("b", "a"), ("a", "a"), ("ab", "a"), ("aa", "b"), ("ä", "¸"), ("ä¸", "Ń"), ("ä¸Ń", "a")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<think>"), AddedToken("aba!")])
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    made = Tokenizer.from_file(path, {"eos_token": "<end>"})
    assert made.token_bytes(made.id("ä¸Ń")) == "中".encode()
    return made


@pytest.fixture(scope="module")
def known(letters):
    return vocabulary(letters)


@pytest.fixture(scope="module")
def known_spm(spm):
    return vocabulary(spm)


# ------------------------------------------------------------------------------------- the mask


ATOMS = st.sampled_from(["a", "b", "中", "[ab]", "[^b中]", "ab", "a?", "(?:)"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{2}", "{0,2}", "{1,2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=5,
)
LONGEST = 6
TEXTS = ["".join(chars) for n in range(LONGEST + 1) for chars in itertools.product("ab中", repeat=n)]


def check_masks(tokenizer, known, regex, language, seed):
    """Walk through the language at random; every mask is what trying all tokens gives."""
    texts = {text.encode() for text in language}
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}
    plain = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.marker_ids.values()]
    follower, text, draw = known.prepare("regex", regex_grammar(regex)).start(), b"", random.Random(seed)
    for _ in range(4 * LONGEST):
        allowed = set(ids_of(follower.allowed()))
        ends = allowed & known.end_ids
        assert ends == (known.end_ids if text in texts else set())
        possible = {id for id in plain if tokenizer.token_bytes(id) and text + tokenizer.token_bytes(id) in beginnings}
        assert allowed - ends == possible
        if not allowed - ends:
            return
        id = draw.choice(sorted(allowed - ends))
        follower.push(id)
        text += tokenizer.token_bytes(id)
    raise AssertionError("the language is finite")


def language_of(regex):
    """All texts over a, b and 中 of the regular expression, by Python's own."""
    pattern = re.compile(regex)
    assume(parser.parse(regex).getwidth()[1] <= LONGEST)
    language = [text for text in TEXTS if pattern.fullmatch(text)]
    assume(language and any(language))
    return language


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None)
@given(REGEXES.filter(lambda regex: "^" not in regex), st.integers(0, 2**32))
def test_the_mask_is_what_brute_force_finds(letters, known, regex, seed):
    check_masks(letters, known, regex, language_of(regex), seed)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None, max_examples=30)
@given(REGEXES.filter(lambda regex: "^" not in regex and "中" not in regex), st.integers(0, 2**32))
def test_also_in_a_vocabulary_of_pieces_and_bytes(spm, known_spm, regex, seed):
    """Where `a` and `<0x61>` are the same byte."""
    check_masks(spm, known_spm, regex, language_of(regex), seed)


@given(st.sets(st.integers(-3, 200)), st.integers(1, 150))
def test_masks_are_bits_by_id(ids, size):
    mask = mask_of(ids, size)
    assert len(mask) == -(-size // 32)
    assert [id for id in range(32 * len(mask)) if mask[id // 32] >> (id % 32) & 1] == ids_of(mask)
    assert ids_of(mask) == sorted(id for id in ids if 0 <= id < size)


# ------------------------------------------------------------------------------------- what comes through


def sample(tokenizer, known, source, draw, patience=60):
    """A text that a random sampler makes; when its patience ends it takes whatever closes things."""
    follower, ids = known.prepare("x", source).start(), []
    closers = [tokenizer.id(text) for text in ('"', "]", "}")]
    for step in range(600):
        allowed = set(ids_of(follower.allowed()))
        if allowed & known.end_ids and (step > patience or draw.random() < 0.5 or not allowed - known.end_ids):
            return tokenizer.decode(ids, skip_special=False)
        allowed -= known.end_ids
        closing = [id for id in closers if id in allowed]
        if closing and (step > patience or draw.random() < 0.3):
            ids.append(draw.choice(closing))
        else:
            ids.append(draw.choice(sorted(allowed)))
        follower.push(ids[-1])
    raise AssertionError(f"no end: {tokenizer.decode(ids)[:200]!r}")


def bounds(low, high):
    return st.tuples(st.integers(low, high), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


SIMPLE = st.one_of(
    bounds(0, 4).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}),
    bounds(-1000, 1000).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
    bounds(-20, 20).map(lambda b: {"type": "number", "exclusiveMinimum": b[0], "maximum": b[1] + 0.5}),
    st.sampled_from([2, 7, 10, 0.5, 0.01]).map(lambda n: {"type": "number", "multipleOf": n}),
    st.lists(st.none() | st.booleans() | st.integers() | st.text(max_size=5), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["^[a-c]{2,4}$", "^x+$", "^\\d{3}-\\d{4}$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["date", "uuid", "ipv4", "time"]).map(lambda f: {"type": "string", "format": f}),
    st.sampled_from([{"type": ["string", "null"]}, {"type": "boolean"}, {"const": {"a": [1, "é"]}}, True, {}]),
)


def objects(inner):
    names = st.text('ab"\\é中', min_size=1, max_size=3)
    return st.tuples(st.dictionaries(names, inner, max_size=3), st.data(), st.booleans()).map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "required": [name for at, name in enumerate(made[0]) if at % 2 == made[2]],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, bounds(0, 2)).map(
            lambda made: {"type": "array", "items": made[0], "minItems": made[1][0], "maxItems": made[1][1]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas}),
        inner.map(lambda schema: {"$defs": {"x": schema}, "type": "array", "items": {"$ref": "#/$defs/x"}}),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def known_tiny(tiny):
    return vocabulary(tiny)


def nested(schema):
    """A definition inside another schema is not where "#/$defs" looks for it."""
    return json.dumps(schema).count("$defs") > 2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_a_schema_lets_through_is_valid(tiny, known_tiny, schema, seed):
    assume("$defs" not in json.dumps(schema) or (isinstance(schema, dict) and "$defs" in schema and not nested(schema)))
    try:
        text = sample(tiny, known_tiny, schema_grammar(schema), random.Random(seed))
    except ParameterError as error:  # the interval holds no multiple, for one
        assert re.search("nsatisfiable|not supported|Unable|Failed|less than 1|round|control character", str(error)), (
            error
        )
        assume(False)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=5), st.integers(0, 99)
)
def test_a_choice_is_one_of_the_choices(tiny, known_tiny, choices, seed):
    assert sample(tiny, known_tiny, choices_grammar(choices), random.Random(seed)) in choices


@pytest.mark.parametrize("choice", ["<think>", "<|im_end|>", "<tool_call>", 'a"b\\', "\n\x00", "é中😀", "/x/", "{}"])
def test_marker_text_in_a_choice_is_text(tiny, known_tiny, choice):
    follower, text = known_tiny.prepare("choices", choices_grammar([choice, "x"])).start(), b""
    while ids := [id for id in ids_of(follower.allowed()) if tiny.token_bytes(id) != b"x" or text]:
        if set(ids) == known_tiny.end_ids:
            break
        assert ids[0] not in tiny.marker_ids.values()
        follower.push(ids[0])
        text += tiny.token_bytes(ids[0])
    assert text.decode() == choice


@pytest.mark.parametrize("regex", ["a/b", r"a\/b", "a\nb", "a\\\nb", "/", r"\\/", "[/]"])
def test_slashes_and_line_ends_in_a_regular_expression(tiny, known_tiny, regex):
    text = sample(tiny, known_tiny, regex_grammar(regex), random.Random(0))
    assert re.fullmatch(regex, text)


def test_lark(tiny, known_tiny):
    source = lark_grammar('start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"')
    for seed in range(20):
        text = sample(tiny, known_tiny, source, random.Random(seed), patience=5)
        assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)  # digits, +, parentheses


def test_markers_are_in_no_string(tiny, known_tiny):
    follower = known_tiny.prepare("x", schema_grammar({"type": "string"})).start()
    follower.push(tiny.id('"'))
    allowed = ids_of(follower.allowed())
    assert len(allowed) > 150
    assert not set(allowed) & {*tiny.marker_ids.values(), *known_tiny.end_ids}
    assert max(allowed) < tiny.vocab_size


def test_a_grammar_may_ask_for_a_marker_but_not_for_control_or_thinking(tiny, known_tiny):
    follower = known_tiny.prepare("grammar", lark_grammar('start: <tool_call> "x"')).start()
    assert ids_of(follower.allowed()) == [tiny.id("<tool_call>")]
    for marker in ("<think>", "<|im_start|>", "<|im_end|>"):
        with pytest.raises(ParameterError, match=r"^grammar: no token"):
            known_tiny.prepare("grammar", lark_grammar(f'start: {marker} "x"'))


def test_texts_that_begin_alike_are_independent(tiny, known_tiny):
    grammar = known_tiny.prepare("x", choices_grammar(["aa", "ab"]))
    one, other = grammar.start(), grammar.start()
    one.push(tiny.id("a"))
    before = ids_of(other.allowed())
    one.push(tiny.id("b"))
    assert ids_of(one.allowed()) == sorted(known_tiny.end_ids)
    assert ids_of(other.allowed()) == before


def test_an_end_token_that_is_ignored_ends_the_text_all_the_same(tiny, known_tiny):
    follower = known_tiny.prepare("x", choices_grammar(["a"])).start()
    follower.push(tiny.id("a"))
    follower.push(tiny.eos_id)
    assert ids_of(follower.allowed()) == sorted(known_tiny.end_ids)


def test_what_is_not_allowed_is_an_error(tiny, known_tiny):
    follower = known_tiny.prepare("regex", regex_grammar("a+")).start()
    with pytest.raises(QkvError, match=r"^regex: "):
        follower.push(tiny.id("b"))


# ------------------------------------------------------------------------------------- refused


def refused(known, source, match, field="x"):
    with pytest.raises(ParameterError, match=f"^{field}: {match}") as caught:
        known.prepare(field, source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "xml"}, "Invalid type: xml"),
        ({"type": "string", "format": "xml"}, "Unknown format"),
        ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "http://example.com/x.json"}, "Resource"),
        ({"$ref": "file:///etc/passwd"}, "Resource"),
        ({"$ref": "#/$defs/missing"}, "Pointer"),
        ({"$ref": "#"}, "nothing satisfies it"),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, ""),
        (False, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex parse error: error: look-around"),
        ({"type": "string", "minLength": -1}, "Expected positive integer"),
        ({"properties": [1]}, "properties must be an object"),
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(known_tiny, schema, match):
    if schema == {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}:
        known_tiny.prepare("x", schema_grammar(schema))  # endless, which only max_tokens can end
        return
    refused(known_tiny, schema_grammar(schema), match)


@pytest.mark.parametrize(
    "source",
    [
        lark_grammar('start: %json {"uniqueItems": true}'),
        lark_grammar('start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'),
        lark_grammar("start: missing"),
        lark_grammar('start: start "a"'),
        lark_grammar("not a grammar"),
        lark_grammar("start: <no_such_token>"),
        lark_grammar('{"grammars": [{"json_schema": {"multipleOf": 999983}}]}'),
        regex_grammar("("),
        regex_grammar(r"(a)\1"),
        regex_grammar("(?!a)b"),
        regex_grammar("a\\"),
    ],
)
def test_grammars_that_mean_nothing_are_refused(known_tiny, source):
    refused(known_tiny, source, "")


def array_of(inner, depth):
    return '{"type": "array", "items":' * depth + inner + "}" * depth


def chain(n, link):
    return {"$defs": {**{f"d{i}": link(i) for i in range(n)}, f"d{n}": {"type": "null"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "deep": lambda: schema_grammar(array_of('{"type": "null"}', 110)),
    "chain of references": lambda: schema_grammar(chain(1900, lambda i: {"$ref": f"#/$defs/d{i + 1}"})),
    "doubling references": lambda: schema_grammar(
        chain(40, lambda i: {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2})
    ),
    "product of alternatives": lambda: schema_grammar(
        {"allOf": [{"anyOf": [{"required": [f"p{i}"]}, {"required": [f"q{i}"]}]} for i in range(24)]}
    ),
    "many properties": lambda: schema_grammar({"properties": {f"p{i}": {"type": "string"} for i in range(3500)}}),
    "many values": lambda: schema_grammar({"enum": [f"v{i}" for i in range(20_000)]}),
    "chain of rules": lambda: lark_grammar(
        "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1} | "b"' for i in range(3900)), 'r3900: "c"'])
    ),
    "nested repetition": lambda: regex_grammar("((a{1000}){1000}){1000}"),
    "one long repetition": lambda: regex_grammar("a{1000000}"),
    "many states": lambda: regex_grammar("(.*a.{25})"),
    "nested brackets": lambda: regex_grammar("(" * 5000 + "a" + ")" * 5000),
    "optional letters": lambda: regex_grammar("a?" * 3000 + "a" * 3000),
    "long minimum": lambda: schema_grammar({"type": "string", "minLength": 10**9}),
    "many items": lambda: schema_grammar({"type": "array", "items": {}, "minItems": 10**9}),
    "intersections": lambda: schema_grammar({"allOf": [{"pattern": f"^.*{c}.{{9}}$"} for c in "abcdefgh"]}),
    "powers": lambda: lark_grammar(
        "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "c"'])
    ),
    "ambiguity": lambda: lark_grammar('start: start start | "a" | ""'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_followed_and_end_nothing_else(tiny, known_tiny, name):
    """Each of them takes long, or much memory, or ends the process, where nothing is bounded."""
    source = HOSTILE[name]()
    draw = random.Random(0)

    def follow():
        follower = known_tiny.prepare("x", source).start()
        for _ in range(40):
            choices = [id for id in ids_of(follower.allowed()) if id not in known_tiny.end_ids]
            if not choices:
                break
            follower.push(draw.choice(choices))

    try:
        follow()
    except QkvError as error:
        assert str(error).startswith("x: ")
    assert sample(tiny, known_tiny, choices_grammar(["a"]), draw) == "a"


def test_a_message_is_whole_where_it_names_a_marker(known_tiny):
    refused(known_tiny, lark_grammar('start: <nosuch> "x"'), 'unknown special token: "<nosuch>"')


def test_a_grammar_that_takes_too_long_is_given_up(known_tiny, monkeypatch):
    """And while it goes on, no other one is begun."""
    release = threading.Event()
    monkeypatch.setattr(qkv.text.constrain.grammar, "MAX_SECONDS", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(GrammarVocabulary, "_compiled", lambda *_: release.wait(30))
        refused(known_tiny, "", "takes more than")
    refused(known_tiny, choices_grammar(["a"]), "another grammar")
    release.set()
    monkeypatch.undo()
    assert ids_of(known_tiny.prepare("x", choices_grammar(["a"])).start().allowed())


def test_threads_started_meanwhile_have_the_usual_stack(known_tiny):
    before = threading.stack_size()
    known_tiny.prepare("x", choices_grammar(["a"]))
    assert threading.stack_size() == before


def test_qwen3(qwen3):
    """Of 151,936 rows, those beyond the tokenizer's 151,669 ids and all added tokens are never allowed."""
    known = GrammarVocabulary(qwen3, vocab_size=151_936, end_ids={151645, 151643}, hidden={151667, 151668})
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    follower = known.prepare("json_schema", schema_grammar(schema)).start()
    for id in qwen3.encode('{"city": "'):
        assert id in ids_of(follower.allowed())
        follower.push(id)
    mask = follower.allowed()
    assert mask.shape == (151_936 // 32,)
    allowed = ids_of(mask)
    assert len(allowed) > 140_000
    assert max(allowed) < 151_643
    for id in qwen3.encode('東京"}'):
        follower.push(id)
    assert ids_of(follower.allowed()) == [151643, 151645]
