"""Qwen3-0.6B: its own tokenizer and template around a random model, and, where it can be had, the model itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qkv import LLM, SamplingParams
from qkv.engine.sampling import Choice, Sampler
from qkv.errors import ModelNotFoundError
from qkv.model.config import PRESETS
from qkv.weights.names import resolve
from tiny import random_tensors, tiny_config
from tinyfiles import write_hf

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy? <|im_end|>"},
]


# ------------------------------------------------------------------------------------------ tokenizer and template


@pytest.fixture(scope="module")
def tokenizer_folder(shared: Path) -> Path:
    return shared / "data" / "qwen3-tokenizer"


@pytest.fixture(scope="module")
def llm(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """A tiny random decoder with Qwen3's vocabulary: what it says is noise, but it is asked as Qwen3 is."""
    config = tiny_config(vocab_size=QWEN3.vocab_size, hidden_size=32, num_hidden_layers=1, tie_word_embeddings=True)
    folder = write_hf(tmp_path_factory.mktemp("qwen3") / "model", config, random_tensors(config), "BF16")
    written = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 151645}
    (folder / "config.json").write_text(json.dumps(written))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": [151645, 151643]}))
    with LLM(folder, weights="bf16", threads=2, context=512) as made:
        yield made


def test_end_tokens_are_the_union_of_both_files(llm):
    assert llm._engine.end_ids == {151645, 151643}


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_chat_has_the_prompt_of_the_template(llm, tokenizer_folder, thinking):
    """As many tokens as the rendered text has, in which the user's own marker is not one token but its characters'."""
    import jinja2

    template = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())["chat_template"]
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    rendered = (
        jinja2.Environment().from_string(template).render(messages=MESSAGES, add_generation_prompt=True, **options)
    )
    own = "And of Italy? <|im_end|>"
    before, after = rendered.split(own)
    encode = llm.tokenizer.encode
    expected = len(encode(before, markers=True)) + len(encode(own)) + len(encode(after, markers=True))
    answer = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=1), thinking=thinking)
    assert answer.timings.prompt_tokens == expected


def test_thinking_is_split_from_the_answer(llm, monkeypatch):
    """The sampler is made to say what Qwen3 says: thoughts, the closing marker, and the answer."""
    ids = llm.tokenizer.encode("<think>\nHm, Italy.\n</think>\n\nRome, 🇮🇹!", markers=True)

    said: dict[Sampler, int] = {}

    def say(sampler, logits, **options):
        said[sampler] = said.get(sampler, 0) + 1
        return Choice([*ids, 151645][said[sampler] - 1])

    monkeypatch.setattr(Sampler, "choose", say)
    answer = llm.chat(MESSAGES, thinking=True)
    assert (answer.thinking, answer.text) == ("Hm, Italy.", "Rome, 🇮🇹!")
    chunks = list(llm.stream_chat(MESSAGES, thinking=True))
    assert "".join(chunk.thinking for chunk in chunks) == answer.thinking
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    raw = llm.generate("x")
    assert raw.thinking == ""
    assert "Hm, Italy." in raw.text


# ------------------------------------------------------------------------------------------ the model itself


@pytest.mark.hub
@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france():
    """Runs where the hub, or the hub's cache, has Qwen3-0.6B."""
    try:
        resolve("qwen3:0.6b")
    except ModelNotFoundError as error:
        pytest.skip(f"needs Qwen3-0.6B: {error}")
    with LLM("qwen3:0.6b", context=2048) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=64), thinking=False)
        assert "Paris" in answer.text
        assert answer.finish_reason == "stop"
        thought = llm.chat(question, SamplingParams(seed=1, max_tokens=1024), thinking=True)
        assert thought.thinking
        assert "Paris" in thought.text
