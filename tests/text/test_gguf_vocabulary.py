"""Tokenizers from GGUF metadata: the ids of the tokenizer.json they came from; anything malformed named and refused."""

from __future__ import annotations

import copy
import json

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from vocabularies import CORPUS, NASTY, gguf_metadata, tiny_tokenizer_json

from qkv.errors import ModelFileError
from qkv.text.tokens.pretokenization import RULES
from qkv.text.tokens.token_bytes import BYTE_OF
from qkv.text.tokens.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."


@pytest.fixture(scope="module")
def metadata():
    return gguf_metadata(tiny_tokenizer_json(), "gpt-2", padding=9)


def test_the_same_vocabulary_from_both_files_gives_the_same_ids(metadata, tiny):
    tokenizer = Tokenizer.from_gguf(metadata, "tiny.gguf")
    for text in NASTY:
        for markers in (False, True):
            ids = tiny.encode(text, markers=markers)
            assert tokenizer.encode(text, markers=markers) == ids
            assert tokenizer.decode(ids) == tiny.decode(ids)
    assert tokenizer.vocab_size == tiny.vocab_size  # padding is not part of it
    assert tokenizer.decode(range(tiny.vocab_size, tiny.vocab_size + 9)) == ""
    assert (tokenizer.marker_ids, tokenizer.special_ids) == (tiny.marker_ids, tiny.special_ids)


def test_merges_may_be_strings_or_pairs(metadata, tiny):
    pairs = {**metadata, PREFIX + "merges": [merge.split(" ") for merge in metadata[PREFIX + "merges"]]}
    text = "the cat thinks that then"
    assert Tokenizer.from_gguf(pairs, "tiny.gguf").encode(text) == tiny.encode(text)


def test_markers_at_the_front_of_the_vocabulary_keep_their_ids(metadata):
    tokens, types = metadata[PREFIX + "tokens"], metadata[PREFIX + "token_type"]
    order = sorted(range(len(tokens)), key=lambda id: types[id] == 1)
    moved = {**metadata, PREFIX + "tokens": [tokens[n] for n in order]}
    moved[PREFIX + "token_type"] = [types[n] for n in order]
    tokenizer = Tokenizer.from_gguf(moved, "tiny.gguf")
    assert tokenizer.encode("<|im_end|>", markers=True) == [moved[PREFIX + "tokens"].index("<|im_end|>")]
    assert tokenizer.decode(tokenizer.encode("<|im_end|> then")) == "<|im_end|> then"


def test_bos_and_end_ids(metadata):
    keys = {PREFIX + "bos_token_id": 65, PREFIX + "eos_token_id": 66, PREFIX + "eot_token_id": 67}
    tokenizer = Tokenizer.from_gguf({**metadata, **keys, PREFIX + "add_bos_token": True}, "tiny.gguf")
    named = {tokenizer.id("<|im_end|>"), tokenizer.id("<|endoftext|>")}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (65, 66, {66, 67} | named)
    assert tokenizer.prompt("x")[0] == 65 and tokenizer.assumed == ()


@pytest.mark.parametrize(
    ("pre", "add_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False), ("gpt-2", False)]
)
def test_a_missing_add_bos_token_takes_the_familys_rule_and_says_so(metadata, pre, add_bos):
    keys = {**metadata, PREFIX + "pre": pre}
    del keys[PREFIX + "add_bos_token"]
    tokenizer = Tokenizer.from_gguf(keys, "tiny.gguf")
    assert tokenizer.add_bos is add_bos
    assert len(tokenizer.assumed) == 1 and "add_bos_token" in tokenizer.assumed[0]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "don't 12345 x", ["don", "'t", "Ġ12345", "Ġx"]),
        ("smollm", "don't 123 x", ["don", "'t", "Ġ", "1", "2", "3", "Ġx"]),
        ("qwen2", "DON'T 123\n(x):\n", ["DON", "'T", "Ġ", "1", "2", "3", "Ċ", "(x", "):Ċ"]),
        ("llama-bpe", "I'LL 12345  x", ["I", "'LL", "Ġ", "123", "45", "Ġ", "Ġx"]),
        ("tekken", "camelCase I'LL 12 a/b//\n", ["camel", "Case", "ĠI", "'LL", "Ġ", "1", "2", "Ġa", "/b", "//Ċ"]),
        ("deepseek-r1-qwen", "DON'T 12", ["DON", "'T", "Ġ", "1", "2"]),
    ],
)
def test_each_family_cuts_text_its_own_way(pre, text, pieces):
    assert [piece for piece, _ in RULES[pre].pre_tokenizer().pre_tokenize_str(text)] == pieces


@pytest.mark.oracle
@pytest.mark.parametrize("pre", sorted(RULES))
def test_each_rule_cuts_text_like_transformers(pre):
    pytest.importorskip("transformers")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        split = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
        theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        assert pre in ("gpt-2", "smollm")
        theirs = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if pre == "smollm":
            theirs = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), theirs])
    for text in [*NASTY, *CORPUS.values(), " ".join(CORPUS.values())]:
        assert RULES[pre].pre_tokenizer().pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_llama_takes_a_whole_word_before_merging(metadata):
    keys = copy.deepcopy(metadata)
    at = keys[PREFIX + "token_type"].index(5)
    keys[PREFIX + "tokens"][at], keys[PREFIX + "token_type"][at] = "zqzq", 1
    assert Tokenizer.from_gguf({**keys, PREFIX + "pre": "llama-bpe"}, "t").encode("zqzq") == [at]
    assert Tokenizer.from_gguf(keys, "t").encode("zqzq") != [at]


WRONG = [
    ("model", None, "is missing"),
    ("model", "t5", "qkv knows gpt2, llama"),
    ("model", 7, "qkv knows gpt2"),
    ("pre", None, f"qkv knows {', '.join(sorted(RULES))}"),
    ("pre", "banana", "'banana'; qkv knows deepseek-r1-qwen, falcon3, gpt-2"),
    ("pre", ["qwen2"], "qkv knows"),
    ("tokens", None, "is missing"),
    ("tokens", [], "has 0 entries"),
    ("tokens", "abc", "must be an array"),
    ("tokens", [1, 2], "must hold strings"),
    ("tokens", ["a", b"b"], "must hold strings"),
    ("token_type", None, "is missing"),
    ("token_type", [1], "has 1 entries"),
    ("merges", None, "is missing"),
    ("merges", 5, "must be an array"),
    ("merges", ["ab"], "must be two tokens"),
    ("merges", ["a b c"], "must be two tokens"),
    ("merges", [" a"], "must be two tokens"),
    ("merges", [["a", "b", "c"]], "must be two tokens"),
    ("merges", [["a", 5]], "must be two tokens"),
    ("merges", [5], "must be two tokens"),
    ("merges", ["a nosuchtoken"], "not in the vocabulary"),
    ("merges", ["! !"], "not in the vocabulary"),
    ("bos_token_id", -1, "must be an id"),
    ("bos_token_id", 10**9, "must be an id"),
    ("eos_token_id", "2", "must be an id"),
    ("eos_token_id", True, "must be an id"),
    ("eot_token_id", 2.0, "must be an id"),
    ("add_bos_token", 1, "must be true or false"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG, ids=[f"{key}={value}" for key, value, _ in WRONG])
def test_malformed_metadata_is_refused_by_its_key(metadata, key, value, words):
    keys = {**metadata, PREFIX + key: value}
    if value is None:
        del keys[PREFIX + key]
    with pytest.raises(ModelFileError, match=words) as caught:
        Tokenizer.from_gguf(keys, "evil.gguf")
    assert str(caught.value).startswith(f"evil.gguf: {PREFIX}{key} ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", [0, 7, -1, True, "1", None, 1.0])
def test_unknown_token_types_are_refused(metadata, kind):
    types = list(metadata[PREFIX + "token_type"])
    types[3] = kind
    with pytest.raises(ModelFileError, match=r"token_type must hold token types from 1 to 6; entry 3"):
        Tokenizer.from_gguf({**metadata, PREFIX + "token_type": types}, "evil.gguf")


def test_duplicates_and_empty_control_tokens_are_refused(metadata):
    tokens, merges = list(metadata[PREFIX + "tokens"]), metadata[PREFIX + "merges"]
    with pytest.raises(ModelFileError, match="repeats an earlier one"):
        Tokenizer.from_gguf({**metadata, PREFIX + "merges": [*merges, merges[0]]}, "evil.gguf")
    tokens[7] = tokens[9]
    with pytest.raises(ModelFileError, match="twice, as 7 and 9"):
        Tokenizer.from_gguf({**metadata, PREFIX + "tokens": tokens}, "evil.gguf")
    tokens = list(metadata[PREFIX + "tokens"])
    tokens[tokens.index("<|im_end|>")] = ""
    with pytest.raises(ModelFileError, match="empty control token"):
        Tokenizer.from_gguf({**metadata, PREFIX + "tokens": tokens}, "evil.gguf")


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_any_value_anywhere_is_read_or_refused(metadata, data):
    keys = dict(metadata)
    key = data.draw(st.sampled_from(sorted(keys)))
    if isinstance(keys[key], list) and data.draw(st.booleans()):
        changed = list(keys[key])
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(VALUES)
        keys[key] = changed
    else:
        keys[key] = data.draw(VALUES)
    try:
        tokenizer = Tokenizer.from_gguf(keys, "evil.gguf")
    except ModelFileError as error:
        assert str(error).startswith("evil.gguf: tokenizer.ggml.")
    else:
        tokenizer.decode(tokenizer.encode("then <|im_end|> 😀"))


@pytest.fixture(scope="module")
def qwen3_spec(qwen3_folder):
    return json.loads((qwen3_folder / "tokenizer.json").read_text())


def test_qwen3_from_gguf_metadata_equals_its_tokenizer_json(qwen3_spec, qwen3):
    keys = gguf_metadata(qwen3_spec, "qwen2", padding=151_936 - 151_669)
    tokenizer = Tokenizer.from_gguf({**keys, PREFIX + "eos_token_id": 151_645}, "qwen3.gguf")
    for text in [*NASTY, " ".join(NASTY)]:
        for markers in (False, True):
            assert tokenizer.encode(text, markers=markers) == qwen3.encode(text, markers=markers)
    assert tokenizer.vocab_size == qwen3.vocab_size == 151_669
    assert tokenizer.end_ids == {151_645, 151_643}  # Qwen's generation_config.json lists both
    assert all(tokenizer.token_bytes(id) == qwen3.token_bytes(id) for id in range(0, 151_936, 7))


@pytest.mark.oracle
def test_qwen3_from_gguf_metadata_equals_transformers(qwen3_spec, qwen3_folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(qwen3_folder)
    ours = Tokenizer.from_gguf(gguf_metadata(qwen3_spec, "qwen2"), "qwen3.gguf")
    for text in NASTY:
        assert ours.encode(text, markers=True) == theirs.encode(text, add_special_tokens=False)


def test_smollm2_from_its_gguf_equals_the_published_pipeline(smollm2_keys):
    keys = smollm2_keys
    ours = Tokenizer.from_gguf(keys, "smollm2.gguf")
    # The original tokenizer.json: Sequence[Digits, ByteLevel] before BPE, no normalizer.
    vocabulary = {token: id for id, token in enumerate(keys[PREFIX + "tokens"])}
    merges = [tuple(merge.split(" ")) for merge in keys[PREFIX + "merges"]]
    theirs = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    missing = {byte for char, byte in BYTE_OF.items() if char not in vocabulary}
    for text in [*NASTY, " ".join(NASTY)]:
        assert ours.encode(text) == theirs.encode(text).ids
        # This vocabulary was trained without the full alphabet: 21 bytes have no token and are dropped, here as there.
        kept = bytes(byte for byte in text.encode() if byte not in missing)
        assert ours.decode(ours.encode(text)) == kept.decode("utf-8", "replace")
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.add_bos) == (49_152, 1, 2, False)
    assert ours.end_ids == {0, 2} and ours.encode("<|im_end|>", markers=True) == [2]
