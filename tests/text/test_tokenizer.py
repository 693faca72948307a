"""Strings to ids and back: nothing lost, no marker by accident, the same ids as transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import MARKERS, NASTY, tiny_tokenizer_json

from qkv.errors import ModelFileError, ParameterError
from qkv.text.tokens.tokenizer import Tokenizer

MARKED = st.lists(st.one_of(st.sampled_from(list(MARKERS)), st.text(st.characters(codec="utf-8"))), max_size=8)


@given(st.data())
def test_plain_encoding_keeps_the_text_and_never_makes_a_marker(tiny, data):
    text = "".join(data.draw(MARKED))
    ids = tiny.encode(text)
    assert not set(ids) & set(tiny.marker_ids.values())
    assert tiny.decode(ids) == text


@given(st.data())
def test_segments_are_the_text_and_their_encodings_the_marked_encoding(tiny, data):
    text = "".join(data.draw(MARKED))
    pieces = tiny.segments(text)
    spelled = {id: marker for marker, id in tiny.marker_ids.items()}
    assert "".join(spelled[piece] if isinstance(piece, int) else piece for piece in pieces) == text
    ids = [id for piece in pieces for id in ([piece] if isinstance(piece, int) else tiny.encode(piece))]
    assert ids == tiny.encode(text, markers=True)


def test_markers_are_parsed_on_request_only(tiny):
    think, end = tiny.id("<think>"), tiny.id("<|im_end|>")
    assert tiny.encode("<think>", markers=True) == [think]
    assert tiny.encode("a<|im_end|>", markers=True)[-1] == end
    assert end in tiny.special_ids and think not in tiny.special_ids
    assert list(tiny.marker_ids) == list(MARKERS)
    assert tiny.eos_id == end and tiny.eos_token == "<|im_end|>" and tiny.end_ids == {end}


def test_every_byte_has_its_token(tiny):
    from tokenizers.pre_tokenizers import ByteLevel

    found = {tiny.token_bytes(tiny.id(char)) for char in ByteLevel.alphabet()}
    assert found == {bytes([byte]) for byte in range(256)}


def test_decoding_hides_control_tokens_only_and_cleans_nothing(tiny):
    ids = tiny.encode("<|im_start|>x != y , it 's<think> hi<|im_end|>", markers=True)
    assert tiny.decode(ids) == "x != y , it 's<think> hi"
    assert tiny.decode(ids, skip_special=False) == "<|im_start|>x != y , it 's<think> hi<|im_end|>"


def test_broken_utf8_and_unknown_ids_decode(tiny):
    assert tiny.vocab_size == max(tiny.marker_ids.values()) + 1
    ff, fe, a = (tiny.id(char) for char in "ÿþa")
    assert tiny.decode([ff, fe, a]) == "\ufffd\ufffda"
    for id in (-1, tiny.vocab_size, 10**6, 2**40):
        assert tiny.token_bytes(id) == b""
        assert tiny.decode([a, id, a]) == "aa"


def test_an_added_token_outside_the_byte_alphabet_keeps_its_text(tmp_path):
    spec = tiny_tokenizer_json()
    for text in ("ilÖveyou", "中"):
        entry = {"id": len(spec["model"]["vocab"]) + len(spec["added_tokens"]), "content": text}
        spec["added_tokens"].append(spec["added_tokens"][-1] | entry)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_file(path)
    for text in ("ilÖveyou", "中"):
        assert tokenizer.decode(tokenizer.encode(text, markers=True)) == text
        assert len(tokenizer.encode(text, markers=True)) == 1


def test_half_a_character_is_refused(tiny):
    with pytest.raises(ParameterError, match=r"^text: .*position 2"):
        tiny.encode("ab\ud83d")


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_prompt_has_bos_exactly_when_the_config_says_so(tiny_json, add_bos):
    config = {"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": add_bos}
    tokenizer = Tokenizer.from_file(tiny_json, config)
    bos = [tokenizer.bos_id] if add_bos else []
    assert tokenizer.prompt("hi") == bos + tokenizer.encode("hi")
    assert tokenizer.prompt("<|endoftext|>hi") == [tokenizer.bos_id, *tokenizer.encode("hi")]
    assert tokenizer.prompt("") == bos
    assert tokenizer.encode("hi", markers=True) == tokenizer.encode("hi")


def test_bos_may_be_the_files_own_affair(tmp_path):
    spec = tiny_tokenizer_json()
    bos = "<|endoftext|>"
    id = next(entry["id"] for entry in spec["added_tokens"] if entry["content"] == bos)
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert Tokenizer.from_file(path, {"bos_token": bos}).prompt("hi")[0] == id
    assert Tokenizer.from_file(path, {"bos_token": bos, "add_bos_token": False}).prompt("hi")[0] != id


def test_saved_truncation_padding_and_dropout_are_off(tmp_path, tiny):
    spec = tiny_tokenizer_json()
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    spec["model"]["dropout"] = 0.9
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_file(path)
    text = "the cat thinks that then the hat is there"
    assert tokenizer.encode(text) == tiny.encode(text)
    assert tokenizer.encode(text, markers=True) == tiny.encode(text)


def test_tokens_only_the_config_lists_are_added(tiny_json, tiny):
    entry = {"content": "<x>", "special": False, "normalized": False}
    tokenizer = Tokenizer.from_file(tiny_json, {"added_tokens_decoder": {str(tiny.vocab_size): entry}})
    assert tokenizer.encode("<x>", markers=True) == [tiny.vocab_size]
    with pytest.raises(ModelFileError, match="not of one model"):
        Tokenizer.from_file(tiny_json, {"added_tokens_decoder": {str(tiny.vocab_size + 7): entry}})


def broken(spec, how):
    if how == "wordpiece":
        spec["model"] = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 9}
        spec["model"]["continuing_subword_prefix"] = "##"
    elif how == "unigram":
        spec["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
        spec["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    elif how == "no decoder":
        spec["decoder"] = None
    elif how == "merge of unknown tokens":
        spec["model"]["merges"].append(["nosuch", "token"])
    elif how == "huge id":
        spec["model"]["vocab"]["huge"] = 2**32 - 1
    elif how == "negative id":
        spec["model"]["vocab"]["a"] = -1
    return json.dumps(spec)


@pytest.mark.parametrize(
    "how", ["wordpiece", "unigram", "no decoder", "merge of unknown tokens", "huge id", "negative id"]
)
def test_unusable_tokenizer_files_are_refused_by_name(tmp_path, how):
    path = tmp_path / "tokenizer.json"
    path.write_text(broken(tiny_tokenizer_json(), how))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'{"version":"1.0"}', b'{"a":' * 10_000]
)
def test_damaged_tokenizer_files_are_refused(tmp_path, data):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_a_file_cut_short_is_refused_and_a_missing_one_named(tmp_path, tiny_json):
    path = tmp_path / "tokenizer.json"
    data = tiny_json.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)
    with pytest.raises(ModelFileError, match=r"nosuch\.json"):
        Tokenizer.from_file(Path(tmp_path / "nosuch.json"))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"eos_token": "<nosuch>"}, "eos_token"),
        ({"bos_token": 5}, "bos_token"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"1": {"content": 5}}}, "added_tokens_decoder"),
    ],
)
def test_a_wrong_config_value_is_refused_by_key(tiny_json, config, key):
    if key is None:
        Tokenizer.from_file(tiny_json, config)
        return
    with pytest.raises(ModelFileError, match=key):
        Tokenizer.from_file(tiny_json, config)


def test_long_lines_encode(tiny):
    for text in ("a" * 10**6, " " * 10**6, "<" * 200_000, "\u0301" * 100_000):
        assert tiny.decode(tiny.encode(text)) == text


def test_qwen3_ids_are_as_published(qwen3):
    assert qwen3.vocab_size == 151_669 and qwen3.eos_id == 151_645 and qwen3.bos_id is None
    assert qwen3.id("<think>") == 151_667 and qwen3.id("</think>") == 151_668 and qwen3.id("<tool_call>") == 151_657
    assert qwen3.decode([151_669, 151_935]) == ""
    # é written as letter + accent has the ids of the single letter; control tokens are not normalized
    assert qwen3.encode("e\u0301") == qwen3.encode("\u00e9")


@pytest.mark.oracle
def test_qwen3_ids_equal_transformers(qwen3, qwen3_folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(qwen3_folder)
    for text in [*NASTY, " ".join(NASTY), "<|im_start|>user\n<think>x</think>\u0338<|im_end|>"]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert qwen3.encode(text, markers=True) == ids
        assert qwen3.prompt(text) == ids
        assert qwen3.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert qwen3.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for text in NASTY:
        if not any(marker in text for marker in qwen3.marker_ids):
            assert qwen3.encode(text) == theirs.encode(text, add_special_tokens=False)
