"""Streaming gives the same text as decoding at once, and only whole characters on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.text.tokens.detokenizer import Detokenizer


def stream(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.push(id) for id in ids] + [detokenizer.finish()]


@given(st.data())
def test_the_pieces_of_any_ids_are_their_text(tiny, data):
    ids = data.draw(st.lists(st.integers(-2, tiny.vocab_size + 5), max_size=30))
    assert "".join(stream(tiny, ids)) == tiny.decode(ids)
    assert "".join(stream(tiny, ids, hidden=())) == tiny.decode(ids, skip_special=False)


@given(st.data())
def test_the_pieces_of_any_qwen3_ids_are_their_text(qwen3, data):
    ids = data.draw(st.lists(st.integers(0, 151_935), max_size=30))
    assert "".join(stream(qwen3, ids)) == qwen3.decode(ids)


@given(st.data())
def test_a_piece_is_never_half_a_character(tiny, data):
    text = data.draw(st.text(st.characters(codec="utf-8"), max_size=12))
    pieces = stream(tiny, tiny.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("char", ["😀", "中", "é", "👩‍👩‍👧"])
def test_a_character_of_several_tokens_comes_with_its_last(tiny, char):
    by_byte = {tiny.token_bytes(id): id for id in range(tiny.vocab_size) if len(tiny.token_bytes(id)) == 1}
    ids = [by_byte[bytes([byte])] for byte in char[0].encode()]
    assert stream(tiny, ids) == [""] * (len(ids) - 1) + [char[0], ""]
    assert stream(tiny, ids[:-1])[-1] == "\ufffd" and "".join(stream(tiny, ids[:-1])) == tiny.decode(ids[:-1])


def test_a_leading_space_stays_and_finish_starts_anew(tiny):
    detokenizer = Detokenizer(tiny)
    assert detokenizer.push(tiny.id("Ġ")) == " "
    assert detokenizer.push(tiny.id("ð")) == "" and detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == "" and detokenizer.push(tiny.id("a")) == "a"
