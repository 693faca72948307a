"""The load report says what the files hold, what became of it, and what had to be assumed."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from ggufblocks import random_blocks
from qkv.kernels.sizes import packed_bytes
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import load_weights
from qkv.weights.report import Amount, LoadReport, report
from tiny import random_tensors, tiny_config
from tinyfiles import write_gguf, write_hf

CONFIG = tiny_config(tie_word_embeddings=True)


def loaded(path, wanted: str | None = None) -> LoadReport:
    checkpoint = open_checkpoint(path)
    return report(checkpoint, load_weights(checkpoint.config, checkpoint.tensors, wanted=wanted), 1.5)


def sizes(tensors, ndim: int) -> list[int]:
    return [values.size for values in tensors.values() if values.ndim == ndim]


def test_formats_and_bytes_add_up(tmp_path):
    tensors = random_tensors(CONFIG)
    kinds = {name: "BF16" if values.ndim == 2 else "F32" for name, values in tensors.items()}
    made = loaded(write_hf(tmp_path, CONFIG, tensors, kinds))
    matrices, vectors = sizes(tensors, 2), sizes(tensors, 1)
    assert made.path == str(tmp_path)
    assert made.stored == (
        Amount("BF16", len(matrices), 2 * sum(matrices)),
        Amount("F32", len(vectors), 4 * sum(vectors)),
    )
    total = sum(packed_bytes("int8", *values.shape) for values in tensors.values() if values.ndim == 2)
    assert made.packed == (Amount("int8", len(matrices), total),)
    assert made.requantized == (f"{len(matrices)} matrices from BF16 to int8",)
    assert made.seconds == 1.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seconds = 0.0


@pytest.mark.parametrize(
    ("kind", "wanted", "fmt"),
    [("Q8_0", None, "int8"), ("Q4_0", None, "int4"), ("Q4_1", "int4", "int4m"), ("BF16", "bf16", "bf16")]
    + [(kind, "f32", "f32") for kind in ("F32", "F16", "BF16")],
)
def test_what_keeps_its_numbers_is_not_called_requantized(tmp_path, kind, wanted, fmt):
    made = loaded(write_gguf(tmp_path / "x.gguf", CONFIG, random_tensors(CONFIG), kind), wanted)
    assert [amount.format for amount in made.packed] == [fmt]
    assert made.requantized == ()


@pytest.mark.parametrize(
    ("kind", "wanted", "fmt"), [("Q5_0", None, "int8"), ("Q8_0", "int4", "int4"), ("F32", "bf16", "bf16")]
)
def test_what_is_rounded_is_called_requantized(tmp_path, kind, wanted, fmt):
    made = loaded(write_gguf(tmp_path / "x.gguf", CONFIG, random_tensors(CONFIG), kind), wanted)
    assert made.requantized == (f"{made.packed[0].count} matrices from {kind} to {fmt}",)


@pytest.mark.parametrize(
    ("d", "wanted", "change", "notes"),
    [
        (0.001, None, "int4m: kept at 4 bits, scales rounded to half precision", 0),
        (0.001, "int8", "int8", 0),
        (2000.0, None, "int8", 1),
    ],
)
def test_q4_k_keeps_its_four_bits_or_says_why_not(tmp_path, d, wanted, change, notes):
    config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=256, head_dim=128, num_attention_heads=4)
    tensors = random_tensors(config)
    matrices = [(name, values.shape) for name, values in tensors.items() if values.ndim == 2]
    blocks = {name: ("Q4_K", random_blocks("Q4_K", *shape, seed=i)) for i, (name, shape) in enumerate(matrices)}
    for _, raw in blocks.values():
        raw[0, :2] = np.float16([d]).view(np.uint8)
        raw[0, 4:8] = 63
    made = loaded(write_gguf(tmp_path / "x.gguf", config, tensors, blocks=blocks), wanted)
    assert made.requantized == (f"{len(matrices)} matrices from Q4_K to {change}",)
    said = [note for note in made.notes if "too large for half precision" in note]
    assert len(said) == notes
    assert all(name in note for name in blocks for note in said)


def test_defaults_and_unused_tensors_are_in_it(tmp_path):
    write_hf(tmp_path, CONFIG, {**random_tensors(CONFIG), "model.visual": np.zeros(4, np.float32)})
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rms_norm_eps"], values["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    notes = loaded(tmp_path).notes
    for words in (
        "rms_norm_eps is missing; using 1e-06",
        "rope_theta is missing; using 10000.0",
        "not used: model.visual",
    ):
        assert any(words in note for note in notes), words
