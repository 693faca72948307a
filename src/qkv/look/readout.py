"""From inside to outside: what a head writes into the residual stream, and what the stream says about the next token.

The weights are those the model computes with, dequantized exactly. The model's own products also round their inputs
to 8 bits where weights have 4 or 8; nothing here does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.kernels.formats import unpack
from qkv.model.config import ModelConfig
from qkv.model.forward import Weights
from qkv.model.reference import rms_norm

Array = NDArray[np.float32]

ROWS = 8192
"""Rows of the head that are in memory as float32 at a time."""


@dataclass(frozen=True)
class Readout:
    """The last weights of a model, and those of attention's outputs. It keeps all weights in memory."""

    config: ModelConfig
    weights: Weights

    def output_weights(self, layer: int) -> Array:
        """W_O [H, d, hidden]: o_proj of a layer, cut into heads and turned so that z_h @ W_O[h] is what h adds."""
        matrix = self.weights.matrices[int(self.weights.layers[layer]["o_proj"])]
        return unpack(self.weights.arena, matrix).T.reshape(-1, self.config.head_dim, self.config.hidden_size)

    def norm_weight(self) -> Array:
        """The last norm's weight [hidden]."""
        size = -(-self.config.hidden_size // 32) * 32
        return self.weights.vectors[-size:][: self.config.hidden_size]

    def logits(self, stream: Array) -> Array:
        """The residual stream [n, hidden], normed as after the last layer, times the head → logits [n, vocab]."""
        normed = rms_norm(stream, self.norm_weight(), self.config.rms_norm_eps)
        head: Any = self.weights.matrices[-1]
        starts = range(0, self.config.vocab_size, ROWS)
        parts = [
            normed @ unpack(self.weights.arena, head, at, min(ROWS, self.config.vocab_size - at)).T for at in starts
        ]
        return np.concatenate(parts, axis=1)

    def direction(self, token: int, stream: Array) -> Array:
        """The vector [hidden] whose product with a part of `stream` [hidden] is that part's share of a token's logit.

        The norm divides by one number for the whole stream, which is kept as it is (direct logit attribution).
        """
        scale = np.sqrt(np.mean(stream * stream) + np.float32(self.config.rms_norm_eps))
        return self.norm_weight() / scale * unpack(self.weights.arena, self.weights.matrices[-1], token, 1)[0]
