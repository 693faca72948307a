"""Qwen3-0.6B's own width, with random weights and two layers: what tiny models do not have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_reference import hf_model

from decoders import compiled, dequantized, logits_of, packed
from qkv.model.config import PRESETS
from tiny import random_tensors

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]


def prompt(T: int) -> list[int]:
    return np.random.default_rng(1).integers(0, QWEN3.vocab_size, T).tolist()


@pytest.mark.oracle
@pytest.mark.slow
def test_two_layers_equal_transformers():
    """Weights in bfloat16, a float32 cache; the sums are float32 here and there."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = replace(QWEN3, num_hidden_layers=2)
    tensors = random_tensors(config)
    made = packed(config, tensors, "bf16")
    values = dequantized(config, made, tensors)
    ids = prompt(48)
    with torch.no_grad():
        expected = hf_model(config, {name: values[name] for name in tensors})(torch.tensor([ids])).logits[0].numpy()
    decoder = compiled(config, made, context=64, outputs=48)
    logits = logits_of(decoder, ids)
    assert np.abs(logits - expected).max() < 1e-3
    assert np.abs(expected).max() > 3
    assert np.array_equal(logits_of(decoder, ids, [31, 1, 16]), logits)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_chunks_and_threads_change_no_bit(weights):
    config = replace(QWEN3, num_hidden_layers=2, vocab_size=5000)
    made = packed(config, random_tensors(config), weights)
    ids = np.random.default_rng(1).integers(0, 5000, 140).tolist()
    two, one = (compiled(config, made, cache="f16", context=160, outputs=140, threads=threads) for threads in (2, 1))
    whole = logits_of(two, ids)
    assert np.array_equal(logits_of(two, ids, [1, 7, 64, 1, 67]), whole)
    assert np.array_equal(logits_of(one, ids), whole)
