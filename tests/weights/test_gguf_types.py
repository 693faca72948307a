"""A model whose matrices are of every type GGUF files have, from the file to the logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from decoders import compiled, logits_of
from ggufblocks import SCALES, dequantized, random_blocks
from qkv.model.reference import Decoder
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import load_weights
from qkv.weights.tensor import BLOCKS
from tiny import random_tensors, tiny_config
from tinyfiles import write_gguf

CONFIG = tiny_config(
    hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=96
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """A file whose token table is Q6_K and whose other matrices take turns, and what the `gguf` package makes of it."""
    tensors = random_tensors(CONFIG)
    matrices = [name for name, values in tensors.items() if values.ndim == 2]
    kinds = ["Q6_K", *(kind for kind in SCALES if kind != "Q6_K")]
    blocks = {}
    for i, name in enumerate(matrices):
        kind = kinds[i % len(kinds)]
        blocks[name] = (kind, random_blocks(kind, *tensors[name].shape, seed=i))
        tensors[name] = dequantized(*blocks[name])
    assert matrices[0] == "model.embed_tokens.weight"
    assert {kind for kind, _ in blocks.values()} == set(SCALES)
    path = tmp_path_factory.mktemp("types") / "types.gguf"
    return write_gguf(path, CONFIG, tensors, blocks=blocks), tensors


def test_the_table_above_is_complete():
    assert set(SCALES) == set(BLOCKS) - {"F32", "F16", "BF16"}


def test_every_number_is_the_gguf_packages(model):
    path, tensors = model
    for name, tensor in open_checkpoint(path).tensors.items():
        assert np.array_equal(tensor.to_float32(), tensors[name]), name


@pytest.mark.parametrize(("weights", "bound"), [("f32", 1e-4), ("int8", 0.3), (None, 0.3)])
def test_logits_are_those_of_the_dequantized_model(model, weights, bound):
    """int8 rounds the weights of all other types, and activations to 8 bits."""
    path, tensors = model
    checkpoint = open_checkpoint(path)
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 48).tolist()
    expected = Decoder(CONFIG, tensors, np.float64)(ids)
    decoder = compiled(checkpoint.config, load_weights(checkpoint.config, checkpoint.tensors, wanted=weights))
    logits = logits_of(decoder, ids)
    decoder.close()
    assert np.abs(logits - expected).max() < bound
    assert expected.std() > 1
    assert len(set(expected.argmax(axis=-1).tolist())) > 10
