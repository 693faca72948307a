"""SentencePiece's kind of vocabulary: ids by the definition of its algorithm, and those of Hugging Face."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import CORPUS, NASTY, scored_pieces, sentencepiece_json, sentencepiece_metadata

from qkv.errors import ModelFileError
from qkv.text.prompt.template import ChatTemplate, encode_chat
from qkv.text.tokens.detokenizer import Detokenizer
from qkv.text.tokens.sentencepiece import byte_of, merges_from_scores, piece_to_bytes
from qkv.text.tokens.tokenizer import Tokenizer

TEXTS = [*CORPUS.values(), *NASTY, " ".join(CORPUS.values())]
SCHEMES = ["prepend", "first", "always", "never"]


@pytest.fixture(scope="module")
def pieces():
    return scored_pieces()


@pytest.fixture(scope="module")
def merges(pieces):
    normal = {piece: id for id, (piece, _, kind) in enumerate(pieces) if kind == 1}
    return merges_from_scores(normal, {piece: score for piece, score, kind in pieces if kind == 1})


@pytest.fixture(scope="module")
def from_gguf(pieces):
    return Tokenizer.from_gguf(sentencepiece_metadata(pieces), "llama.gguf")


@pytest.fixture(scope="module")
def files(pieces, merges, tmp_path_factory):
    """scheme → (qkv's tokenizer, the library's) of the same tokenizer.json."""
    found = {}
    for scheme in SCHEMES:
        path = tmp_path_factory.mktemp(scheme) / "tokenizer.json"
        path.write_text(json.dumps(sentencepiece_json(pieces, merges, scheme)))
        ours = Tokenizer.from_file(path, {"bos_token": "<s>", "eos_token": "</s>"})
        found[scheme] = ours, tokenizers.Tokenizer.from_file(str(path))
    return found


def by_definition(text: str, pieces) -> list[int]:
    """Join the neighbours whose concatenation has the highest score, leftmost first; bytes for what has no piece."""
    normal = {piece: (score, id) for id, (piece, score, kind) in enumerate(pieces) if kind == 1}
    ids = {piece: id for id, (piece, _, _) in enumerate(pieces)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(normal[a + b][0], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in normal]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out = []
    for part in parts:
        out += [normal[part][1]] if part in normal else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out


@pytest.mark.parametrize("text", [text[:150] for text in TEXTS])
def test_ids_are_those_of_the_algorithms_definition(from_gguf, pieces, text):
    assert from_gguf.encode(text) == by_definition(text, pieces)


@given(st.text(st.sampled_from("then ca\n▁é中😀1"), max_size=30))
def test_ids_of_any_text_are_those_of_the_definition(from_gguf, pieces, text):
    assert from_gguf.encode(text) == by_definition(text, pieces)
    assert from_gguf.decode(from_gguf.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_of_either_kind_gives_the_librarys_ids_and_text(from_gguf, files, text):
    for scheme, (ours, theirs) in files.items():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, markers=True) == ids, scheme
        assert ours.prompt(text) == [1, *ids]
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), scheme
    prepended = files["prepend"][1].encode(text, add_special_tokens=False).ids
    assert from_gguf.encode(text, markers=True) == prepended
    assert from_gguf.decode(prepended) == files["prepend"][1].decode(prepended)


def test_the_space_before_a_text_is_taken_away_once(from_gguf, files):
    for tokenizer in (from_gguf, files["prepend"][0]):
        for text in (" hi", "hi", "", "  ", "\n hi"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert tokenizer.decode([1, *tokenizer.encode(text)]) == text
    assert files["never"][0].decode(files["never"][0].encode(" hi")) == " hi"


def test_without_a_space_prefix(pieces):
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(pieces, add_space_prefix=False), "llama.gguf")
    plain = sentencepiece_json(pieces, [], "never")
    assert plain["decoder"]["decoders"][-1]["type"] == "Fuse"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    assert tokenizer.id("▁the") not in tokenizer.encode("the")


def test_an_answer_keeps_its_first_space_and_goes_on_where_the_prompt_ended(from_gguf):
    prompt, answer = "then", " the cat 😀"
    ids = from_gguf.encode(prompt + answer)
    at = len(from_gguf.encode(prompt))
    detokenizer = Detokenizer(from_gguf)
    text = "".join(map(detokenizer.push, ids[at:])) + detokenizer.finish()
    assert text == answer == from_gguf.decode(ids[at:], inner=True)
    assert from_gguf.decode(ids) == prompt + answer


@given(st.data())
def test_the_pieces_of_any_ids_are_their_text(from_gguf, data):
    ids = data.draw(st.lists(st.integers(0, from_gguf.vocab_size - 1), max_size=30))
    detokenizer = Detokenizer(from_gguf)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == from_gguf.decode(ids, inner=True)
    assert text.removeprefix(" ") == from_gguf.decode(ids)


def test_broken_bytes_leave_the_characters_around_them(from_gguf):
    bytes_ = [from_gguf.id(f"<0x{byte:02X}>") for byte in (0xE4, 0xB8, 0xAD, 0xFF, 0x41)]
    assert from_gguf.decode(bytes_) == "中\ufffdA"  # Hugging Face gives one U+FFFD for each of the five bytes
    assert from_gguf.decode(bytes_[:2]) == "\ufffd"


def test_spellings_of_pieces():
    assert [byte_of(text) for text in ("<0x0A>", "<0xff>", "<0x0A> ", "<0xGG>", "a")] == [10, 255, None, None, None]
    assert piece_to_bytes("▁a▁") == b" a " and piece_to_bytes("<0x80>") == b"\x80"


def test_markers_are_parsed_on_request_only(from_gguf, files):
    for tokenizer in (from_gguf, *(ours for ours, _ in files.values())):
        for text in ("<s>", "</s>", "<tool>", "<unk>", "a<s>b"):
            assert not set(tokenizer.encode(text)) & set(tokenizer.marker_ids.values())
            assert set(tokenizer.encode(text, markers=True)) & set(tokenizer.marker_ids.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_conversation_with_marker_text_splits_like_one_without(files, scheme):
    tokenizer, _ = files[scheme]
    source = "{% for m in messages %}<s>[INST] {{ m.content }} [/INST]</s>{% endfor %}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="t")
    clean = encode_chat(template, tokenizer, [{"role": "user", "content": "then the cat"}])
    assert clean == tokenizer.encode("<s>[INST] then the cat [/INST]</s>", markers=True)
    both = encode_chat(template, tokenizer, [{"role": "user", "content": c} for c in ("then the cat", "</s>x")])
    assert both[: len(clean)] == clean
    assert tokenizer.decode(both, skip_special=False).count("</s>") == 3
    assert both.count(2) == 2 and both.count(1) == 2


def test_merges_that_spell_a_marker_are_not_used_for_text(pieces, tmp_path):
    changed = [*pieces, ("<s", 1.0, 1)]
    mergeable = {piece: id for id, (piece, _, kind) in enumerate(changed) if kind == 1} | {"<s>": 1}
    merges = merges_from_scores(mergeable, {piece: changed[id][1] for piece, id in mergeable.items()})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(sentencepiece_json(changed, merges)))
    tokenizer = Tokenizer.from_file(path, {"bos_token": "<s>"})
    assert 1 in tokenizer._plain.encode("<s>", add_special_tokens=False).ids
    for text in ("<s>", "x<s>y", "then"):
        assert 1 not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text, markers=True).count(1) == text.count("<s>")
    # In GGUF metadata a control token is never the result of a merge.
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(changed), "llama.gguf")
    assert 1 not in tokenizer.encode("<s>") and tokenizer.decode(tokenizer.encode("<s>")) == "<s>"


def test_what_a_file_leaves_out_is_assumed_and_said(pieces):
    metadata = sentencepiece_metadata(pieces)
    for key in ("bos_token_id", "eos_token_id", "add_bos_token", "add_space_prefix"):
        del metadata[f"tokenizer.ggml.{key}"]
    tokenizer = Tokenizer.from_gguf(metadata, "llama.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.encode("then") == Tokenizer.from_gguf(sentencepiece_metadata(pieces), "x").encode("then")
    assert len(tokenizer.assumed) == 4 and all("is missing" in note for note in tokenizer.assumed)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scores", None, "is missing"),
        ("scores", [1.0], "has 1 entries"),
        ("scores", "x", "must be an array"),
        ("scores", [float("nan")], "must hold finite numbers; entry 0 is nan"),
        ("scores", ["1"], "must hold finite numbers"),
        ("add_space_prefix", 1, "must be true or false"),
        ("remove_extra_whitespaces", True, "is true, which qkv does not do"),
        ("tokens", ["<0xZZ>"], "has the byte token '<0xZZ>', id 3"),
        ("tokens", ["x" * 20_000], "has longer tokens than any model"),
    ],
)
def test_malformed_scored_vocabularies_are_refused_by_key(pieces, key, value, words):
    metadata = sentencepiece_metadata(pieces)
    name = f"tokenizer.ggml.{key}"
    if value is None:
        del metadata[name]
    elif key == "tokens":
        tokens = list(metadata[name])
        tokens[3 if "Z" in value[0] else 300] = value[0]
        metadata[name] = tokens
    else:
        metadata[name] = value + [0.0] * (len(pieces) - 1) if isinstance(value, list) and words[0] == "m" else value
    with pytest.raises(ModelFileError, match=words) as caught:
        Tokenizer.from_gguf(metadata, "evil.gguf")
    assert str(caught.value).startswith(f"evil.gguf: {name} ") and "\n" not in str(caught.value)


@pytest.mark.oracle
def test_ids_equal_transformers_gguf_and_json_loaders(pieces, files, tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = {piece: id for id, (piece, _, _) in enumerate(pieces)}
    others = [piece for piece, _, kind in pieces if kind != 1]
    theirs = generate_merges(vocabulary, {piece: score for piece, score, _ in pieces}, skip_tokens=others)
    normal = {piece: id for id, (piece, _, kind) in enumerate(pieces) if kind == 1}
    assert merges_from_scores(normal, {piece: pieces[id][1] for piece, id in normal.items()}) == theirs
    metadata = sentencepiece_metadata(pieces)
    keys = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    # Of transformers' builders this one puts the space where SentencePiece and llama.cpp put it.
    loaded, _ = convert_gguf_tokenizer("phi3", keys | {"tokenizer_type": "llama", "add_prefix_space": True})
    ours = Tokenizer.from_gguf(metadata, "llama.gguf")
    for text in TEXTS:
        assert ours.encode(text, markers=True) == loaded.encode(text, add_special_tokens=False).ids
    # The general builder differs for a text that starts with ▁ or follows a marker, and only there.
    loaded, _ = convert_gguf_tokenizer("llama", keys | {"tokenizer_type": "llama"})
    for text in TEXTS:
        if text[:1] not in (" ", "▁") and not any(marker in text for marker in ours.marker_ids):
            assert ours.encode(text) == loaded.encode(text, add_special_tokens=False).ids
    for scheme, (ours, backend) in files.items():
        path = tmp_path / f"{scheme}.json"
        path.write_text(backend.to_str())
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>")
        for text in TEXTS:
            ids = fast(text)["input_ids"]
            assert ours.prompt(text) == ids
            assert ours.decode(ids) == fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", ["prepend", "first"])
def test_ids_equal_transformers_own_llama_class_but_for_the_first_space(files, scheme, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, backend = files[scheme]
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    compared = 0
    for text in TEXTS:
        # That class ignores the file's rules: no space before a space, and none after a marker.
        if scheme == "first" or not (text[:1] in (" ", "▁") or any(marker in text for marker in ours.marker_ids)):
            assert ours.encode(text, markers=True) == theirs.encode(text, add_special_tokens=False)
            compared += 1
    assert compared > len(TEXTS) // 2
