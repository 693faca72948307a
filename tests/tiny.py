"""Random tiny decoders, shaped so that the usual mistakes show.

H·d ≠ hidden, key/value heads are neither 1 nor H, norms are not constant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.model.config import ModelConfig

TINY = ModelConfig(
    architecture="qwen3",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=320,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
)


def tiny_config(**changes: Any) -> ModelConfig:
    """The tiny Qwen3 with some fields changed."""
    return replace(TINY, **changes)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """A float32 tensor for every name the config needs; norms near 1 but different everywhere, biases large."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in config.parameter_shapes().items():
        values = rng.standard_normal(shape)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif not name.endswith("bias"):
            values = values / np.sqrt(shape[-1]) * 1.5
        tensors[name] = values.astype(np.float32)
    return tensors
