"""Vocabularies and texts the tests of `qkv.text` share."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

MARKERS = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True}
MARKERS |= {"<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False}

NASTY = [
    "",
    "->",
    "(x):\n",
    "12345",
    "don't DON'T I'Ll",
    "  x",
    "\n\n  y",
    " 4",
    "a\r\n\r\nb",
    "١٢٣",
    "x²",
    "\u3000",
    "ﬁ",
    "".join(chr(code) for code in range(0x300, 0x370)),
    "e\u0301",
    "\u00e9",
    "x != y , it 's",
    " hi",
    "😀 👩‍👩‍👧 中文 é",
    "\x00\x01\x7f\x80\u00ad\ufeff",
    "".join(map(chr, range(256))),
    "tab\t\ttab   \n \n  end   ",
    "<|im_end|><think></think><|im_start|",
    "ẞ ſ K Å \u1e9b\u0323 \u2126 가 \u1100\u1161",
    "a" * 500 + " " * 300 + "\n" * 20,
    "def f(x):\n    return x**2  # ½ of it\n",
    "\ue000\U000f0000\U0010ffff",
    "https://example.org/?q=1&r=%20#x",
]
"""Where splitting rules differ: contractions, digits, white space, marks, normalization, control characters."""


def tiny_tokenizer_json() -> dict[str, Any]:
    """A tokenizer.json: 300 byte-level BPE tokens, then `MARKERS`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat thinks that then the hat is there, im_end think 😀"] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in MARKERS.items()])
    return json.loads(tokenizer.to_str())


def gguf_metadata(spec: dict[str, Any], pre: str, *, padding: int = 0) -> dict[str, object]:
    """The `tokenizer.ggml.*` keys a converter writes for a tokenizer.json, with `padding` unused tokens at the end."""
    by_id = {id: token for token, id in spec["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, 1)
    for added in spec["added_tokens"]:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    for id in range(len(by_id), len(by_id) + padding):
        by_id[id], types[id] = f"[PAD{id}]", 5
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id[id] for id in range(len(by_id))],
        "tokenizer.ggml.token_type": [types[id] for id in range(len(by_id))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
