"""Vocabularies and texts the tests of `qkv.text` share."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

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


CORPUS = {
    "code": "def f(x):\n\treturn {'a': x**2 != 0x1F}  # ½\n#include <stdio.h>\nfor(int i=0;i<10;++i){a[i]&=~1;}\n" * 3,
    "digits": "0 12 123 1234567890 3.14159e-10 1,000,000 ٠١٢٣ १२३ ½ Ⅷ ²³",
    "spaces": "a b  c   d    e\u00a0f\u2003g\u3000h \t i \u2028 j\u200bk   ",
    "newlines": "\n\n\na\nb\r\nc\r\r\n \n  \n\td\n",
    "chinese": "中文没有空格，所以分词很难。「引号」123個字元ＡＢＣ",
    "arabic": "اللُّغَةُ العَرَبِيَّةُ، جَمِيلَةٌ جِدًّا؛ ١٢٣ ـــــ",
    "emoji": "😀\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308🇩🇪👍🏽❤️☎\ufe0e text😀text",
    "marks": "e\u0301e\u0323\u0301 q\u0308\u0323 हिन्दी ไทย Z\u0351\u036bA\u0334 \u0301x \uac00\u1100\u1161\u11a8",
    "words": "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft " + "abcXYZ" * 300,
    "others": "Ελληνικά кириллица עברית ﬁ ǅ ſ K İı ß ẞ \ufeff\u00ad\u0000\u0007 don't I'LL x̂'s",
    "spm": "▁a ▁ ▁▁b <0x41> <s>x</s> <unk> [INST] \u2581",
}
"""What the issue asks ids to be compared on. Each text differs somewhere between splitting rules or normalizers."""

LLAMA_MARKERS = {"<|begin_of_text|>": True, "<|eot_id|>": True, "<|start_header_id|>": True, "<|end_header_id|>": True}


def _training_text() -> list[str]:
    return [*CORPUS.values(), *NASTY, "the cat thinks that then the hat is there, and then some"] * 2


def llama3_tokenizer_json() -> dict[str, Any]:
    """In the style of Llama 3: digits by three, whole words before merges, a post-processor that writes BOS."""
    contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(f"{contractions}|{rest}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in LLAMA_MARKERS])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return json.loads(tokenizer.to_str())


def scored_pieces() -> list[tuple[str, float, int]]:
    """(piece, score, GGUF type) of a vocabulary like Llama 2's: <unk>, <s>, </s>, 256 bytes, merged, characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(_training_text(), trainers.BpeTrainer(vocab_size=700, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model["merges"]]
    merged = list(dict.fromkeys(merged))
    characters = [token for token in model["vocab"] if token not in set(merged)]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(token, float(-n), 1) for n, token in enumerate([*merged, *characters])]
    return [*pieces, ("<tool>", 0.0, 4)]


def sentencepiece_metadata(pieces: list[tuple[str, float, int]], **keys: object) -> dict[str, object]:
    """The `tokenizer.ggml.*` keys a converter writes for a SentencePiece model."""
    metadata: dict[str, object] = {
        "model": "llama",
        "tokens": [piece for piece, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def sentencepiece_json(
    pieces: list[tuple[str, float, int]], merges: list[tuple[str, str]], scheme: str = "prepend"
) -> dict[str, Any]:
    """The tokenizer.json of such a vocabulary. `scheme`: how the space before a text comes about.

    "prepend": a normalizer, as Llama 2's own file; "first", "always" or "never": Metaspace, as newer files.
    """
    vocabulary = {piece: id for id, (piece, _, _) in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if scheme != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(p, normalized=False) for p, _, kind in pieces if kind in (2, 3)])
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p, _, kind in pieces if kind == 4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return json.loads(tokenizer.to_str())
