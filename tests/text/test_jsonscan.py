"""JSON in pieces: the end is found, the text is kept, and what json.loads refuses is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.text.answer.jsonscan import MAX_DEPTH, NotJsonError, StringDecoder, ValueScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def scan(text, step):
    """(the value's text, how much was read, whether it ended), reading `step` characters at a time."""
    scanner, kept, read = ValueScanner(), "", 0
    for start in range(0, len(text), step):
        piece = text[start : start + step]
        read += scanner.feed(piece, 0)
        kept += scanner.take()
        if scanner.done:
            break
    return kept, read, scanner.done


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.integers(1, 8))
def test_a_value_is_kept_as_it_is_and_ends_where_it_ends(value, ascii_only, indent, step):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert scan(text + ', "x"', step) == (text, len(text), True)


def loads(text):
    """Whether json.loads takes a text that starts a value; Python's own NaN and Infinity are not JSON."""

    def refuse(name):
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse, strict=False)
    except ValueError:
        return False
    return True


@given(st.text('{}[],:"\\u0aeE+-.truefalsn 1\n', max_size=14), st.integers(1, 20))
@example("[01]", 1)
@example("[1.]", 20)
@example("[-]", 1)
@example('["\\x"]', 1)
@example('{"a" "b"}', 1)
@example("[,]", 1)
@example("[1,]", 1)
@example('{"a":1,}', 1)
def test_accepts_what_python_accepts(text, step):
    text = "[" + text + "]"
    try:
        kept, read, ended = scan(text, step)
        accepted = ended and read == len(text)
    except NotJsonError:
        accepted = False
    assert accepted == loads(text)
    if accepted:
        assert json.loads(kept) == json.loads(text, strict=False)


def test_control_characters_in_strings_come_out_escaped():
    kept, _, ended = scan('{"a\n": "b\tc\x00", "d": [\n1]}', 3)
    assert ended
    assert kept == '{"a\\n": "b\\tc\\u0000", "d": [\n1]}'
    assert json.loads(kept) == {"a\n": "b\tc\x00", "d": [1]}


@pytest.mark.parametrize("step", [1, 1000])
def test_depth_and_size_are_bounded(step):
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scan(text, step) == (text, len(text), True)
    with pytest.raises(NotJsonError, match="deep"):
        scan("[" + text, step)
    with pytest.raises(NotJsonError):
        scan("[" + "1" * 5000 + "]", step)


@given(st.text("ab1}n", max_size=600), st.integers(1, 700))
def test_where_it_breaks_does_not_depend_on_the_pieces(text, step):
    def broke(step):
        scanner, kept = ValueScanner(), ""
        for start in range(0, len(text), step):
            try:
                scanner.feed(text[start : start + step], 0)
            except NotJsonError as error:
                return start + error.at, kept + scanner.take()
            kept += scanner.take()
        return None, kept

    assert broke(step) == broke(1)


@given(st.text() | st.text(st.characters(min_codepoint=0xFF00)), st.booleans(), st.integers(1, 12))
def test_decoding_a_string_in_pieces(text, ascii_only, step):
    raw, decoder = json.dumps(text, ensure_ascii=ascii_only), StringDecoder()
    assert "".join(decoder.push(raw[at : at + step]) for at in range(0, len(raw), step)) == text


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_halves_of_characters_are_replaced(step):
    raw, decoder = r'"\ud83dx\ud83d\ud83d\ude00\ude00"', StringDecoder()
    decoded = "".join(decoder.push(raw[at : at + step]) for at in range(0, len(raw), step))
    assert decoded == "\ufffdx\ufffd😀\ufffd"
