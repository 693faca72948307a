"""The NumPy decoder: against itself in float64, with and without a cache, and against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.model.config import ModelConfig
from qkv.model.reference import Decoder, rms_norm, silu
from tiny import random_tensors, tiny_config

FAMILIES = {
    "qwen3": tiny_config(),
    "qwen3-tied": tiny_config(tie_word_embeddings=True),
    "qwen3-large-epsilon": tiny_config(rms_norm_eps=1e-2),
    "qwen2": tiny_config(architecture="qwen2"),
    "llama": tiny_config(
        architecture="llama", hidden_size=96, head_dim=32, num_attention_heads=6, num_key_value_heads=3
    ),
}


def prompt(config: ModelConfig, T: int = 48) -> list[int]:
    return np.random.default_rng(1).integers(0, config.vocab_size, T).tolist()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("chunks", [[5, 43], [1] * 48, [31, 1, 16], [3, 40, 5]])
def test_a_cache_changes_nothing(config, chunks):
    decoder = Decoder(config, random_tensors(config), np.float64)
    ids = prompt(config)
    cache, parts, start = decoder.new_cache(), [], 0
    for size in chunks:
        parts.append(decoder.logits(decoder.forward(ids[start : start + size], cache)))
        start += size
    assert cache.length == len(ids)
    np.testing.assert_allclose(np.concatenate(parts), decoder(ids), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_float32_stays_close_to_float64(config):
    tensors, ids = random_tensors(config), prompt(config)
    difference = Decoder(config, tensors)(ids) - Decoder(config, tensors, np.float64)(ids)
    assert np.abs(difference).max() < 1e-4


@pytest.mark.parametrize("t", [1, 17, 47])
def test_a_changed_token_leaves_earlier_logits_the_same_bits(t):
    config = tiny_config()
    decoder, ids = Decoder(config, random_tensors(config)), prompt(config)
    before = decoder(ids)
    ids[t] = (ids[t] + 1) % config.vocab_size
    after = decoder(ids)
    assert np.array_equal(before[:t], after[:t])
    assert not np.array_equal(before[t], after[t])


def test_the_first_and_last_positions_choose_differently():
    """Guards the tests above against a decoder that looks at one position only."""
    config = tiny_config()
    logits = Decoder(config, random_tensors(config))(prompt(config))
    assert len(set(logits.argmax(axis=-1).tolist())) > 10


def test_rms_norm_gives_unit_mean_square():
    x = np.random.default_rng(0).standard_normal((5, 64)) * 100
    y = rms_norm(x, np.ones(64), 1e-6)
    np.testing.assert_allclose((y * y).mean(axis=-1), 1, rtol=1e-9)


def test_silu_has_no_overflow():
    x = np.array([-1e4, -100, 0, 1, 1e4], np.float32)
    np.testing.assert_allclose(silu(x), [0, 0, 0, 1 / (1 + np.exp(-1.0)), 1e4], rtol=1e-6, atol=1e-40)


@pytest.mark.oracle
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_logits_equal_transformers(config, seed):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tensors, ids = random_tensors(config, seed), prompt(config)
    with torch.no_grad():
        expected = hf_model(config, tensors)(torch.tensor([ids])).logits[0].numpy()
    logits = Decoder(config, tensors)(ids)
    assert np.abs(logits - expected).max() < 1e-4
    assert np.abs(expected).max() > 1  # the bound means something


def hf_model(config: ModelConfig, tensors, family: str | None = None, **rope: object):
    """The same weights in transformers' own implementation, float32, plain (eager) attention.

    `family` is the model type, where it is not the architecture's name; `rope` the keys of a scaled RoPE.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model(
        family or config.architecture,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **rope},
        tie_word_embeddings=config.tie_word_embeddings,
        attn_implementation="eager",
        **({"sliding_window": None} if family == "mistral" else {}),
    )
    model = AutoModelForCausalLM.from_config(hf_config).float().eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in tensors.items()}, strict=False)
    assert not unexpected
    assert all(config.tie_word_embeddings and name == "lm_head.weight" for name in missing)
    model.tie_weights()
    return model
