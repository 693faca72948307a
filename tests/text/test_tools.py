"""Tool calls in an answer: each is whole or it is text, at any step size, and nothing is lost."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv import SamplingParams
from qkv.text.answer.output import Delta, OutputPipeline
from qkv.text.answer.thinking import ThinkingSplit
from qkv.text.answer.tools import CLOSE, OPEN, ToolCallParser

ARGUMENTS = '{"a":"x","b":[1,{}]}'
CALL = f'{OPEN}\n{{"name":"f","arguments":{ARGUMENTS}}}\n{CLOSE}'


class Pieces:
    """An answer cut into pieces of so many characters, markers found in the text or said to come as tokens."""

    def __init__(self, text: str, step: int, *, by_id: bool, cut: bool = False) -> None:
        parser = ToolCallParser(by_id=by_id)
        parsed = []
        for part in split_markers(text) if by_id else [text]:
            if by_id and part in (OPEN, CLOSE):
                parsed.append(parser.marker(part))
                continue
            parsed += [parser.push(part[at : at + step]) for at in range(0, len(part), step)]
        parsed.append(parser.finish(cut=cut))
        self.content = "".join(one.content for one in parsed)
        self.deltas = [delta for one in parsed for delta in one.calls]
        self.calls = [(call.name, call.arguments) for call in self.deltas]
        assert parser.count == len(self.calls)


def split_markers(text):
    return [part for part in re.split(f"({OPEN}|{CLOSE})", text) if part]


def read(text, step=1, *, by_id=True, cut=False):
    pieces = Pieces(text, step, by_id=by_id, cut=cut)
    return pieces.content, pieces.calls


STEPS = [1, 2, 3, 7, 10_000]
EVERY_WAY = pytest.mark.parametrize(("step", "by_id"), [(step, by_id) for step in STEPS for by_id in (True, False)])


def call(body):
    return f"{OPEN}\n{body}\n{CLOSE}"


@EVERY_WAY
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("f", ARGUMENTS)]),
        (f"I look.\n{CALL}", "I look.\n", [("f", ARGUMENTS)]),
        (f"{CALL}\n{CALL}", "", [("f", ARGUMENTS)] * 2),
        (f"{CALL} then\n {CALL}\n end", " then\n \n end", [("f", ARGUMENTS)] * 2),
        (f"{OPEN}{CALL[len(OPEN) + 1 :]}\n", "", [("f", ARGUMENTS)]),
        (call('{"arguments": {"k": [1, 2]}, "name": "g"}'), "", [("g", '{"k": [1, 2]}')]),
        (call('{"name": "g"}'), "", [("g", "{}")]),
        (call('{"name": "g", "arguments": null}'), "", [("g", "{}")]),
        (call('{"name": "g", "arguments": ""}'), "", [("g", "{}")]),
        (call('{"name": "g", "arguments": "  "}'), "", [("g", "{}")]),
        (call('{"name": "g", "arguments": "{\\"a\\":1}"}'), "", [("g", '{"a":1}')]),
        (call('{"arguments": "{\\"a\\":\\"\\\\n\\\\u00e9\\"}", "name": "g"}'), "", [("g", '{"a":"\\n\\u00e9"}')]),
        (call('{"name": "g", "arguments": {"城市": "東京", "e": "😀"}}'), "", [("g", '{"城市": "東京", "e": "😀"}')]),
        (call('{"name": "g", "arguments": "{\\"a\\": \\"1\\n2\\"}"}'), "", [("g", '{"a": "1\\n2"}')]),
        (call('{"name": "g", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'), "", [("g", '{"a": "\\ud83d"}')]),
        (call('{"name": "g", "parameters": {"a": 1}}'), "", [("g", '{"a": 1}')]),
        (call('{"parameters": "{\\"a\\":1}", "name": "g"}'), "", [("g", '{"a":1}')]),
        (call('{"name": "g", "parameters": {"a": 1}, "arguments": {"b": 2}}'), "", [("g", '{"b": 2}')]),
        (
            call('{"name": "g", "id": {"x": ["}"]}, "arguments": {"n": 1.50e400, "m": 10000000000000000000001}}'),
            "",
            [("g", '{"n": 1.50e400, "m": 10000000000000000000001}')],
        ),
        (call('{"name": "g", "arguments": { "a" : [ 1 , 2 ] } }'), "", [("g", '{ "a" : [ 1 , 2 ] }')]),
        (call('{"\\u006eame": "g\\u00e9", "arguments": {}}'), "", [("gé", "{}")]),
        (call('{"name":"a","arguments":{}}\n{"name":"b","arguments":{"c":1}}'), "", [("a", "{}"), ("b", '{"c":1}')]),
        (call('{"name": "g", "arguments": {"code": "a\n\tb"}}'), "", [("g", '{"code": "a\\n\\tb"}')]),
    ],
)
def test_calls_and_content(text, content, calls, step, by_id):
    assert read(text, step, by_id=by_id) == (content, calls)


@EVERY_WAY
@pytest.mark.parametrize(
    "text",
    [
        OPEN,
        f"{OPEN}\n",
        f"{OPEN}{CLOSE}",
        f"a{CLOSE}b",
        call("hello"),
        call("[1]"),
        call("{}"),
        call('{"name": 5, "arguments": {}}'),
        call('{"name": "", "arguments": {}}'),
        call('{"arguments": {"a": 1}}'),
        call('{"name": "f", oops'),
        call('{"name": "f", "arguments": 5x}')[:30],
        call('{name: "f"}'),
        call('{"name": "f" "arguments": {}}'),
        call("{'name': 'f', 'arguments': {}}"),
        call('{"name": "f", "arguments": {"a": NaN}}'),
        call('{"name": "f", "arguments": {"a": -Infinity}}'),
        call('{"name": "f", "arguments": "{\\"a\\": Infinity}"}'),
        call('{"name": "f", "arguments": [1, 2]}'),
        call('{"name": "f", "arguments": 5}'),
        call('{"name": "f", "arguments": 0}'),
        call('{"name": "f", "arguments": []}'),
        call('{"name": "f", "arguments": false}'),
        call('{"name": "f", "arguments": "[1]"}'),
        call('{"name": "f", "arguments": "five"}'),
        call('{"name": "f", "arguments": "{\\"a\\": 1"}'),
        call('{"name": "f", "parameters": [1]}'),
        call('{"name": "f", "arguments": {"a": 1, "a": 2}}'),
        call('{"name": "f", "arguments": {}, "name": "g"}'),
        call('{"name": "\\ud83d", "arguments": {}}'),
        call('{"name": "f", "arguments": {"a": tru, "b": 1}}'),
        call('{"name": "f", "arguments": {"a": 1,}}'),
        call('{"name": "f", "arguments": {"a": 01}}'),
        call('{"name": "f", "arguments": {"a": "x}}'),
        call('{"name": "f", "arguments": {"a": [1}}'),
        call('{"name": "f", "arguments": {}}}'),
        call('{"name": "f", "arguments": {}}{}'),
        call('{"name": "f", "arguments": {}} and so on'),
        call('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}"),
        OPEN + '\n{"name": "f", "argu',
        OPEN + '\n{"arguments": {"a": 1}',
        call("no") + "\nafter " + call("no"),
        f'{call("no")}{CLOSE}{OPEN}{{"a',
    ],
)
def test_what_is_no_call_stays_text(text, step, by_id):
    assert read(text, step, by_id=by_id) == (text, [])
    assert read(text, step, by_id=by_id, cut=True) == (text, [])


@EVERY_WAY
@pytest.mark.parametrize("end", [CLOSE, f"\n{CLOSE}", "", "\n", f"\n{CALL}"])
def test_a_call_that_lacks_its_last_braces_or_its_closing_marker_is_one(end, step, by_id):
    arguments = '{"a": {"b": "}"}}'
    body = f'{OPEN}\n{{"name": "f", "arguments": {arguments}}}'
    more = [("f", ARGUMENTS)] if end.endswith(CALL) else []
    for missing in range(4):
        text = body[: len(body) - missing] + end
        assert read(text, step, by_id=by_id) == ("", [("f", arguments), *more])


@EVERY_WAY
def test_an_answer_that_is_cut_off_in_a_call_is_text(step, by_id):
    """Also where the call could be completed: what was to come may have been more arguments."""
    for length in range(len(OPEN), len(CALL)):
        part = CALL[:length]
        assert read(part, step, by_id=by_id, cut=True) == (part, [])
        assert read(f"{CALL}\n{part}", step, by_id=by_id, cut=True) == (f"\n{part}", [("f", ARGUMENTS)])


@EVERY_WAY
def test_a_missing_quote_costs_one_call_and_not_the_next(step, by_id):
    broken = call('{"name": "f", "arguments": {"a": "x}}')
    for text, content in [(f"{broken}\n{CALL}", f"{broken}\n"), (f"{broken} {CALL} {broken}", f"{broken}  {broken}")]:
        for cut in (False, True):
            assert read(text, step, by_id=by_id, cut=cut) == (content, [("f", ARGUMENTS)])


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("markers", [OPEN, CLOSE, CLOSE + OPEN, f"{CLOSE}\\n{OPEN}\\\\", f'\\"{CLOSE}\\"{{'])
@pytest.mark.parametrize("where", ["value", "key", "name", "string of arguments"])
def test_a_marker_inside_a_string_of_a_call_is_part_of_it(markers, where, by_id):
    """Whether it comes as a token or as letters."""
    name, arguments = (
        f"f{markers if where == 'name' else ''}",
        {
            "value": f'{{"a": "{markers}"}}',
            "key": f'{{"{markers}": [1, "{markers}"]}}',
            "name": "{}",
            "string of arguments": f'{{"a": "{markers}"}}',
        }[where],
    )
    inner = json.dumps(arguments) if where == "string of arguments" else arguments
    text = "a " + call(f'{{"name": "{name}", "arguments": {inner}}}')
    for step in STEPS:
        assert read(text, step, by_id=by_id) == ("a ", [(json.loads(f'"{name}"'), arguments)])


@EVERY_WAY
def test_each_call_has_its_index_and_one_id(step, by_id):
    pieces = Pieces(f"{CALL}\n{CALL}\n{CALL}", step, by_id=by_id)
    named = [delta for delta in pieces.deltas if delta.name is not None]
    assert [delta.index for delta in named] == [0, 1, 2]
    assert named == [delta for delta in pieces.deltas if delta.id is not None]
    assert len({delta.id for delta in named}) == 3
    assert [delta.index for delta in pieces.deltas] == sorted(delta.index for delta in pieces.deltas)


def test_without_marker_tokens_only_a_true_start_of_a_marker_is_held():
    parser = ToolCallParser(by_id=False)
    assert parser.push("a < b <tool").content == "a < b "
    assert parser.push("box>").content == "<toolbox>"
    assert parser.push("<tool_cal").content == ""
    assert parser.finish(cut=False).content == "<tool_cal"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)


def cut(text, cuts):
    edges = sorted({0, len(text), *(at for at in cuts if at < len(text))})
    return [text[a:b] for a, b in pairwise(edges)]


@given(OBJECTS, st.booleans(), st.booleans(), st.booleans(), st.lists(st.integers(0, 200)))
def test_any_object_comes_out_as_the_same_object_however_it_is_cut(value, ascii_only, name_first, as_string, cuts):
    arguments = json.dumps(value, ensure_ascii=ascii_only)
    given = {"name": "f", "arguments": arguments if as_string else value}
    body = given if name_first else dict(reversed(given.items()))
    text = f"A {call(json.dumps(body, ensure_ascii=ascii_only))}"
    parser = ToolCallParser(by_id=False)
    parsed = [*map(parser.push, cut(text, cuts)), parser.finish(cut=False)]
    (found,) = (call for one in parsed for call in one.calls)
    assert "".join(one.content for one in parsed) == "A "
    assert (found.name, found.arguments) == ("f", arguments)
    assert json.loads(found.arguments) == value


MARKER_LIKE = st.lists(
    st.sampled_from([OPEN, CLOSE, "<tool", "{", "}", '"name"', '"arguments"', ":", ",", '"f"', "\n", "x", "null", "😀"])
).map("".join)


@given(MARKER_LIKE, st.booleans(), st.booleans())
def test_the_result_does_not_depend_on_the_pieces(text, by_id, cut):
    whole = read(text, 10_000, by_id=by_id, cut=cut)
    assert read(text, 1, by_id=by_id, cut=cut) == whole
    content, calls = whole
    if not calls:
        assert content == text


@given(MARKER_LIKE, st.booleans())
def test_every_call_is_the_json_of_an_object(text, by_id):
    _, calls = read(text, 3, by_id=by_id)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("by_id", [True, False])
def test_hostile_calls_are_read_in_pieces_of_one_character(by_id):
    """Many seconds if any of it took quadratic time."""
    for text in (
        call('{"name": "f", "arguments": ' + '{"a":' * 5_000),
        OPEN + '{"x": "' + "a" * 20_000,
        OPEN + '{"arguments": [' + "[]," * 7_000,
        OPEN + '{"name": "f", ' + " " * 20_000,
        f'{OPEN}{{"' + (CLOSE + OPEN + '{\\"') * 3_000,
        f'{OPEN}{{"' + CLOSE * 5_000,
        OPEN * 5_000,
    ):
        assert read(text, by_id=by_id) == (text, [])


# ------------------------------------------------------------------------------------- the whole output path


def answer(tokenizer, output, *, tools=True, stops=None, prompt="", cut=False):
    ids = tokenizer.encode(prompt, markers=True)
    split = ThinkingSplit(tokenizer.id("<think>"), tokenizer.id("</think>"), ids, tokenizer.special_ids)
    path = OutputPipeline(tokenizer, SamplingParams(stop=stops or ()).stop, split, tools=tools)
    output = tokenizer.encode(output, markers=True) if isinstance(output, str) else output
    deltas = [path.push(id) for id in output]
    deltas.append(path.finish(cut=cut))
    total = Delta(
        "".join(d.content for d in deltas),
        "".join(d.thinking for d in deltas),
        deltas[-1].stopped,
        tuple(call for d in deltas for call in d.tool_calls),
    )
    return total, path


def test_through_the_pipeline(tiny):
    total, path = answer(tiny, f"<think>\nhm {ARGUMENTS}\n</think>\n\nSo:\n{CALL}\n{CALL}<|im_end|>")
    assert (total.thinking, total.content) == (f"hm {ARGUMENTS}", "So:\n")
    assert [(c.name, c.arguments) for c in total.tool_calls] == [("f", ARGUMENTS)] * 2
    assert path.finish_reason("stop") == "tool_calls"
    assert path.finish_reason("length") == "length"


def test_after_thinking_a_call_alone_leaves_no_content(tiny):
    total, _ = answer(tiny, f"</think>\n\n{CALL}\n", prompt="<think>\n")
    assert (total.content, len(total.tool_calls)) == ("", 1)


def test_finish_reason_is_what_came(tiny):
    for text in ("no call", call("broken"), CALL[:30], f"{OPEN}\n"):
        _, path = answer(tiny, text)
        assert path.finish_reason("stop") == "stop"
        assert path.finish_reason("length") == "length"


def test_without_tools_everything_is_content(tiny):
    for text in (CALL, f"prose containing {OPEN}", f"{CLOSE}{OPEN}"):
        total, path = answer(tiny, text, tools=False)
        assert (total.content, total.tool_calls) == (text, ())
        assert path.finish_reason("stop") == "stop"


def test_a_vocabulary_with_the_markers_counts_only_the_tokens(tiny):
    """The same letters in ordinary tokens are prose."""
    total, _ = answer(tiny, tiny.encode(CALL))
    assert (total.content, total.tool_calls) == (CALL, ())


def test_a_vocabulary_without_them_is_searched(spm):
    total, path = answer(spm, spm.encode(f"So {CALL}", inner=True))
    assert total.content == " So "  # the vocabulary writes a space before a text
    assert total.tool_calls[0].arguments == ARGUMENTS
    assert path.finish_reason("stop") == "tool_calls"


def test_stop_strings_are_not_looked_for_in_arguments(tiny):
    total, _ = answer(tiny, f"a{CALL}b=c", stops=["x", "="])
    assert (total.content, total.stopped) == ("ab", True)
    assert total.tool_calls[0].arguments == ARGUMENTS
    total, path = answer(tiny, f"a=b{CALL}", stops="=")
    assert (total.content, total.tool_calls, path.finish_reason("stop")) == ("a", (), "stop")


def test_characters_over_several_tokens_inside_arguments(tiny):
    arguments = '{"城市": "東京 😀 中"}'
    total, _ = answer(tiny, call(f'{{"name": "f", "arguments": {arguments}}}'))
    assert total.tool_calls[0].arguments == arguments
    start = f'{OPEN}{{"name": "f", "arguments": {{"a": "'
    cut_off = tiny.encode(start, markers=True) + tiny.encode("😀")[:-1]
    total, path = answer(tiny, cut_off, cut=True)
    assert (total.content, total.tool_calls, path.finish_reason("length")) == (start + "\ufffd", (), "length")


ALL_MARKERS = [OPEN, CLOSE, "<think>", "</think>"]


@pytest.mark.parametrize("marker", ALL_MARKERS)
@pytest.mark.parametrize("prompt", ["", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_a_marker_as_a_token_inside_a_calls_string_is_its_text(tiny, marker, prompt, thought):
    """Whether the model has thought before or not; a stop string that it spells is no reason to stop."""
    arguments = f'{{"a": "{marker}x", "{marker}": ["{marker}"]}}'
    said = ("" if prompt else thought) + "Look: " + call(f'{{"name": "f", "arguments": {arguments}}}')
    total, path = answer(tiny, said, prompt=prompt, stops=[marker])
    assert (total.content, total.thinking) == ("Look: ", "hm" if thought and not prompt else "")
    assert [(c.name, c.arguments) for c in total.tool_calls] == [("f", arguments)]
    assert path.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("marker", ALL_MARKERS)
@pytest.mark.parametrize("before", ["", "a ", "\n\na"])
@pytest.mark.parametrize("after", ["", " b", " b</think> c <think> d"])
def test_a_marker_as_a_token_inside_the_answer_is_its_text(tiny, marker, before, after, tools):
    said = f"{before}{marker}{after}"
    total, path = answer(tiny, f"<think>hm</think>{said}", tools=tools)
    assert (total.content, total.thinking) == (said.lstrip("\n"), "hm")
    total, _ = answer(tiny, said, tools=tools, prompt="<think>\n\n</think>\n\n")
    assert (total.content, total.thinking) == (said.lstrip("\n"), "")
    assert path.finish_reason("stop") == "stop"


@pytest.mark.parametrize("marker", ALL_MARKERS[:3])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_a_marker_as_a_token_inside_the_thinking_is_its_text(tiny, marker, prompt):
    total, _ = answer(tiny, f"{'' if prompt else '<think>'}a{marker}b</think>c", prompt=prompt)
    assert (total.thinking, total.content, total.tool_calls) == (f"a{marker}b", "c", ())


@given(text=MARKER_LIKE, tools=st.booleans(), stop=st.sampled_from([None, "nul", "}"]))
def test_letters_are_content(tiny, text, tools, stop):
    total, _ = answer(tiny, tiny.encode(text), tools=tools, stops=stop)
    assert total.content == (text if stop is None else text.split(stop)[0])
    assert total.tool_calls == ()


@given(text=MARKER_LIKE)
def test_markers_are_content_where_no_tools_are(tiny, text):
    total, _ = answer(tiny, text, tools=False)
    assert (total.content, total.tool_calls) == (text, ())


def test_qwen3_writes_its_calls_with_these_markers(qwen3):
    assert (qwen3.id(OPEN), qwen3.id(CLOSE)) == (151657, 151658)
    total, path = answer(qwen3, f"<think>\nok\n</think>\n\n{CALL}<|im_end|>")
    assert (total.content, total.thinking) == ("", "ok")
    assert total.tool_calls[0].arguments == ARGUMENTS
    assert path.finish_reason("stop") == "tool_calls"
