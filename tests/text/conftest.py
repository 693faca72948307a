"""Tokenizers for the tests of `qkv.text`: a tiny one trained on the spot, and Qwen3's real one where it is present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from vocabularies import scored_pieces, sentencepiece_metadata, tiny_tokenizer_json

from qkv.text.prompt.template import ChatTemplate
from qkv.text.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained byte-level BPE of 300 tokens and the markers of Qwen3, as a tokenizer.json."""
    path = tmp_path_factory.mktemp("tiny") / "tokenizer.json"
    path.write_text(json.dumps(tiny_tokenizer_json()))
    return path


@pytest.fixture(scope="session")
def tiny(tiny_json: Path) -> Tokenizer:
    return Tokenizer.from_file(tiny_json, {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    """A vocabulary in the manner of SentencePiece, from GGUF keys: byte pieces, and no markers of Qwen's."""
    return Tokenizer.from_gguf(sentencepiece_metadata(scored_pieces()), "spm.gguf")


@pytest.fixture(scope="session")
def smollm2_keys(smollm2: Path) -> dict[str, Any]:
    """The tokenizer's metadata in SmolLM2's GGUF file, read by the gguf package."""
    fields = gguf.GGUFReader(smollm2).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def qwen3_folder(shared: Path) -> Path:
    return shared / "data" / "qwen3-tokenizer"


@pytest.fixture(scope="session")
def qwen3_config(qwen3_folder: Path) -> dict[str, Any]:
    return json.loads((qwen3_folder / "tokenizer_config.json").read_text())


@pytest.fixture(scope="session")
def qwen3(qwen3_folder: Path, qwen3_config: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_file(qwen3_folder / "tokenizer.json", qwen3_config)


@pytest.fixture(scope="session")
def qwen3_template(qwen3_config: dict[str, Any]) -> ChatTemplate:
    return ChatTemplate(qwen3_config["chat_template"], bos_token=None, eos_token="<|im_end|>", name="qwen3")
