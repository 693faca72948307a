"""Variants of tokenizer.json: the same ids as the library's, whatever the file's age; nothing harmful passes."""

from __future__ import annotations

import copy
import json

import pytest
import tokenizers
from vocabularies import CORPUS, NASTY, llama3_tokenizer_json, tiny_tokenizer_json

from qkv.errors import ModelFileError
from qkv.text.prompt.template import ChatTemplate, encode_chat
from qkv.text.tokens import tokenizer_json
from qkv.text.tokens.tokenizer import Tokenizer


@pytest.fixture
def load(tmp_path):
    def from_spec(spec, config=None):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(spec))
        return Tokenizer.from_file(path, config), tokenizers.Tokenizer.from_file(str(path))

    return from_spec


def with_marker(text, **flags):
    spec = tiny_tokenizer_json()
    id = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
    spec["added_tokens"].append(spec["added_tokens"][-1] | {"id": id, "content": text, **flags})
    return spec, id


@pytest.mark.parametrize("make", [tiny_tokenizer_json, llama3_tokenizer_json])
def test_merges_as_pairs_or_as_strings_give_the_same_ids(load, make):
    spec = make()
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in spec["model"]["merges"]]
    forms = [pairs, [" ".join(pair) for pair in pairs]]
    both = []
    for form in forms:
        changed = copy.deepcopy(spec)
        changed["model"]["merges"] = form
        both.append(load(changed)[0])
    assert len(pairs) > 20
    for text in [*NASTY, *CORPUS.values()]:
        assert both[0].encode(text) == both[1].encode(text)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized", "special"])
@pytest.mark.parametrize("value", [True, False])
def test_the_flags_of_added_tokens_are_honoured(load, flag, value):
    spec, id = with_marker("<x>", **{flag: value})
    spec["normalizer"] = {"type": "Lowercase"}
    ours, theirs = load(spec)
    for text in ("a <x> b", "a<x>b", " <x>", "<x>  ", "<X>", "\n<x>\n<x>", "a<x>", "<x"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, markers=True) == ids
        assert id not in ours.encode(text)
        # Its stretches, encoded one by one, are the whole.
        parts = ours.segments(text)
        assert [i for part in parts for i in ([part] if isinstance(part, int) else ours.encode(part))] == ids
    assert (id in ours.special_ids) == (value if flag == "special" else spec["added_tokens"][-1]["special"])


def test_a_marker_found_in_normalized_text_cannot_be_forged(load):
    spec, id = with_marker("<x>", normalized=True, special=True)
    spec["normalizer"] = {"type": "NFKC"}
    tokenizer, _ = load(spec)
    template = ChatTemplate("{{ messages[0].content }}<x>", bos_token=None, eos_token=None, name="t")
    for text in ("hi<x>", "hi\uff1cx\uff1e", "hi \uff1cx>", "\uff1cx\uff1e\uff1cx\uff1e<x>"):
        assert id in tokenizer.encode(text, markers=True)
        ids = encode_chat(template, tokenizer, [{"role": "user", "content": text}])
        assert ids.count(id) == 1 and ids[-1] == id


def test_an_added_token_that_is_letters_only_is_plain_text_to_llama_3(load):
    spec = llama3_tokenizer_json()
    id = max(added["id"] for added in spec["added_tokens"]) + 1
    spec["added_tokens"].append(spec["added_tokens"][-1] | {"id": id, "content": "STOP"})
    spec["model"]["vocab"]["STOP"] = id  # as files have it; `ignore_merges` would take the word whole
    tokenizer, theirs = load(spec)
    assert id in theirs.encode("STOP", add_special_tokens=False).ids
    for text in ("STOP", "a STOP", "x\nSTOP"):
        assert id not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
        assert id in tokenizer.encode(text, markers=True)


def test_bos_is_what_the_config_says_else_what_the_file_does(load):
    bos = "<|begin_of_text|>"
    for config, expected in [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, 0)]:
        tokenizer, theirs = load(llama3_tokenizer_json(), {"bos_token": bos} | config)
        id = theirs.token_to_id(bos)
        assert tokenizer.prompt("hi").count(id) == expected
        assert tokenizer.prompt(bos + "hi").count(id) == 1
        if expected:
            assert tokenizer.prompt("hi") == theirs.encode("hi").ids
    tokenizer, theirs = load(llama3_tokenizer_json())
    assert tokenizer.prompt("hi") == theirs.encode("hi").ids and tokenizer.bos_token == bos


def test_a_post_processor_that_writes_more_than_bos(load):
    def writing(single):
        spec = llama3_tokenizer_json()
        full = tokenizers.Tokenizer.from_str(json.dumps(spec))
        names = [(name, full.token_to_id(name)) for name in ("<|begin_of_text|>", "<|eot_id|>")]
        full.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, pair="$A $B", special_tokens=names
        )
        return json.loads(full.to_str())

    tokenizer, _ = load(writing("$A <|eot_id|>"), {"add_eos_token": True})
    assert tokenizer.prompt("hi") == tokenizer.encode("hi") and not tokenizer.add_bos
    assert len(tokenizer.assumed) == 1 and "EOS" in tokenizer.assumed[0]
    tokenizer, theirs = load(writing("<|begin_of_text|> $A <|eot_id|>"))
    assert tokenizer.prompt("hi") == theirs.encode("hi").ids[:-1]
    with pytest.raises(ModelFileError, match="post_processor writes 2 tokens before a text"):
        load(writing("<|begin_of_text|> <|eot_id|> $A"))


def test_normalizers_that_blow_text_up_are_refused(load):
    spec = tiny_tokenizer_json()
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [step] * 9}
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: normalizer makes texts up to 1000000000 times"):
        load(spec)
    spec["normalizer"] = {"type": "Prepend", "prepend": "x" * 100}
    with pytest.raises(ModelFileError, match="up to 101 times"):
        load(spec)


def test_a_pattern_that_the_library_gives_up_on_is_an_error(load, capfd):
    spec = tiny_tokenizer_json()
    spec["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    tokenizer, _ = load(spec)
    assert tokenizer.encode("ab") == tokenizer.encode("a") + tokenizer.encode("b")
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: the tokenizer cannot encode a text \(.*retry-limit"):
        tokenizer.encode("a" * 50 + "b")
    with pytest.raises(ModelFileError, match="retry-limit"):
        tokenizer.encode("a" * 50 + "b", markers=True)


def test_a_huge_file_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tiny_tokenizer_json()))
    with pytest.raises(ModelFileError, match="at most 1,000 are read"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": []},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
    ],
)
def test_decoders_that_are_not_known_are_refused(load, decoder):
    with pytest.raises(ModelFileError, match="qkv reads BPE, byte-level or in SentencePiece's manner"):
        load(tiny_tokenizer_json() | {"decoder": decoder})


@pytest.mark.parametrize("field", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_word_marks_of_other_vocabularies_are_refused(load, field):
    spec = tiny_tokenizer_json()
    spec["model"]["merges"] = []
    spec["model"][field] = "@@"
    with pytest.raises(ModelFileError, match="qkv reads BPE"):
        load(spec)


@pytest.mark.oracle
@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}, {}])
def test_tokens_of_the_config_equal_transformers(tmp_path, flags):
    transformers = pytest.importorskip("transformers")
    spec = tiny_tokenizer_json()
    size = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
    entry = {"content": "<x>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    known = {str(added["id"]): {k: v for k, v in added.items() if k != "id"} for added in spec["added_tokens"]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": known | {str(size): entry | flags | {"special": True}},
        "eos_token": "<|im_end|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", config)
    for text in ("a <x> b", "a<x>b", " <x> ", "x<|im_end|> <think>"):
        assert ours.encode(text, markers=True) == theirs.encode(text, add_special_tokens=False)
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
