"""A tiny model in a folder, for the tests of the front door.

It is random, but its head favours printable ASCII, one byte a token: greedy answers are text without end, and any piece
of an answer can be a stop string that spans several tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qkv import LLM, SamplingParams
from qkv.model.config import ModelConfig
from qkv.text.tokens.token_bytes import token_to_bytes
from tiny import random_tensors, tiny_config
from tinyfiles import write_hf

MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
VOCABULARY = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKERS]
CONFIG = tiny_config(vocab_size=len(VOCABULARY), max_position_embeddings=2048)
PRINTABLE = [i for i, text in enumerate(VOCABULARY[:256]) if 32 <= token_to_bytes(text)[0] < 127]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
RANDOM = SamplingParams(temperature=1.0, max_tokens=24)
HELLO = [{"role": "user", "content": "Hello"}]


def tensors(config: ModelConfig = CONFIG) -> dict[str, Any]:
    result = random_tensors(config, seed=2)
    unlikely = np.setdiff1d(np.arange(config.vocab_size), PRINTABLE)
    result["lm_head.weight"][unlikely] = 0
    return result


def write_model(
    folder: Path,
    model: ModelConfig = CONFIG,
    *,
    generation: dict[str, Any] | None = None,
    template: str | None = TEMPLATE,
    tokenizer: bool = True,
    eos: Any = None,
    change: Any = None,
) -> Path:
    """A model folder; `eos` is what config.json says, `change` what happens to the tensors before they are written."""
    made = tensors(model)
    if change is not None:
        change(made)
    write_hf(folder, model, made)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        bpe = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(VOCABULARY[:256])}, []))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.add_tokens([AddedToken(text, special="think" not in text, normalized=False) for text in MARKERS])
        bpe.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"weights": "f32", "threads": 2, "context": 256, **options})


def taken(llm: LLM) -> int:
    return llm.cache_stats.blocks - llm.cache_stats.free_blocks


def come_back(llm: LLM) -> bool:
    """Whether all blocks are free within a moment: a request is cancelled between two steps."""
    deadline = time.monotonic() + 10
    while taken(llm) and time.monotonic() < deadline:
        time.sleep(0.001)
    return not taken(llm)


@contextmanager
def held_up(llm: LLM, after: int) -> Iterator[None]:
    """Let `after` steps pass; the next ones wait for the end of the block."""
    permits, step = threading.Semaphore(after), llm._decoder.step

    def wait(chunks, **options):
        assert permits.acquire(timeout=30)
        return step(chunks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._decoder, "step", wait)
        try:
            yield
        finally:
            permits.release(10_000)
