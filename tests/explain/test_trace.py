"""The traced decoder computes what the reference computes, and what it keeps is what attention got."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.explain.trace import Traced
from qkv.model import reference
from qkv.model.reference import Decoder
from tiny import random_tensors, tiny_config

CONFIGS = [tiny_config(), tiny_config(architecture="qwen2"), tiny_config(architecture="llama", num_key_value_heads=1)]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_heads_are_those_of_the_reference(config, monkeypatch):
    seen, definition = [], reference.attention
    monkeypatch.setattr(reference, "attention", lambda *qkv: seen.append(qkv) or definition(*qkv))
    tensors = random_tensors(config)
    Decoder(config, tensors)(IDS)
    wanted, seen[:] = list(seen), []
    layers = Traced(config, tensors).trace(IDS)
    assert len(layers) == len(wanted) == config.num_hidden_layers
    for heads, qkv in zip(layers, wanted, strict=True):
        assert all(np.array_equal(got, given) for got, given in zip((heads.q, heads.k, heads.v), qkv, strict=True))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_first_layer_by_hand(config):
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn."
    x = tensors["model.embed_tokens.weight"][IDS].astype(np.float64)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * tensors["model.layers.0.input_layernorm.weight"]
    heads = Traced(config, tensors).trace(IDS)[0]
    for letter, projected, normed in (
        ("q", heads.q_projected, heads.q_normed),
        ("k", heads.k_projected, heads.k_normed),
    ):
        by_hand = x @ tensors[f"{name}{letter}_proj.weight"].T
        if config.qkv_bias:
            by_hand = by_hand + tensors[f"{name}{letter}_proj.bias"]
        by_hand = by_hand.reshape(len(IDS), -1, config.head_dim)
        np.testing.assert_allclose(projected, by_hand, rtol=1e-4, atol=1e-5)
        if config.qk_norm:
            by_hand = by_hand / np.sqrt((by_hand**2).mean(axis=2, keepdims=True) + 1e-6)
            by_hand = by_hand * tensors[f"{name}{letter}_norm.weight"]
        np.testing.assert_allclose(normed, by_hand, rtol=1e-4, atol=1e-5)


def test_a_decoder_traces_twice():
    decoder = Traced(tiny_config(), random_tensors(tiny_config()))
    first, second = decoder.trace(IDS), decoder.trace(IDS)
    assert len(first) == len(second) == 2
    assert np.array_equal(first[1].q, second[1].q)
