"""Ids equal to Hugging Face's on texts of every kind, for every kind of tokenizer, on lines of any length."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from vocabularies import (
    CORPUS,
    llama3_tokenizer_json,
    scored_pieces,
    sentencepiece_json,
    sentencepiece_metadata,
)

from qkv.text.tokens.sentencepiece import merges_from_scores
from qkv.text.tokens.tokenizer import LONG_TEXT, Tokenizer

LONG_LINES = {name: text.replace("\n", " ").replace("\r", " ") for name, text in CORPUS.items()}
LONG_LINES |= {text: text for text in ("a", " ", "1", "<", "中", "😀", "\u0301", "ـ", "▁")}
KINDS = ["qwen3", "smollm2", "llama3", "sentencepiece"]


def _files(folder, name, spec):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(spec))
    return path


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """Functions kind → (qkv's tokenizer, the library's tokenizer of the published file)."""
    folder = tmp_path_factory.mktemp("corpus")

    def make(kind):
        if kind == "qwen3":
            path = request.getfixturevalue("qwen3_folder") / "tokenizer.json"
            return Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(str(path))
        if kind == "smollm2":
            keys = request.getfixturevalue("smollm2_keys")
            vocabulary = {token: id for id, token in enumerate(keys["tokenizer.ggml.tokens"])}
            merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
            theirs = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
            digits, words = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
            theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
            return Tokenizer.from_gguf(keys, "smollm2.gguf"), theirs
        if kind == "llama3":
            path = _files(folder, kind, llama3_tokenizer_json())
            return Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(str(path))
        pieces = scored_pieces()
        normal = {piece: id for id, (piece, _, group) in enumerate(pieces) if group == 1}
        merges = merges_from_scores(normal, {piece: pieces[id][1] for piece, id in normal.items()})
        path = _files(folder, kind, sentencepiece_json(pieces, merges))
        return Tokenizer.from_gguf(sentencepiece_metadata(pieces), "llama.gguf"), tokenizers.Tokenizer.from_file(
            str(path)
        )

    return make


def same(ours, theirs, text):
    """Ids are equal. Text is encoded as plain text wherever it holds no marker."""
    ids = theirs.encode(text, add_special_tokens=False).ids
    if not any(marker in text for marker in ours.marker_ids):
        assert ours.encode(text) == ids
    if theirs.get_added_tokens_decoder():
        assert ours.encode(text, markers=True) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_corpus(pair, kind):
    ours, theirs = pair(kind)
    for text in [*CORPUS.values(), *LONG_LINES.values(), " ".join(CORPUS.values())]:
        same(ours, theirs, text)


@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
def test_ids_of_texts_on_both_sides_of_long(pair, kind):
    ours, theirs = pair(kind)
    for unit in CORPUS.values():
        text = unit * (LONG_TEXT // len(unit) + 1)
        same(ours, theirs, text[: LONG_TEXT - 1])
        same(ours, theirs, text[:LONG_TEXT])


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_lines_of_a_million_characters_equal_transformers(pair, kind):
    transformers = pytest.importorskip("transformers")
    ours, backend = pair(kind)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    for unit in LONG_LINES.values():
        text = (unit * (10**6 // len(unit) + 1))[: 10**6]
        markers = bool(backend.get_added_tokens_decoder())
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, markers=markers) == ids
        if kind == "qwen3" or kind == "llama3":
            assert ours.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)
