"""The decoder in NumPy, in the order a reader learns it: the executable textbook and the oracle of the fast path.

    ids → embedding → L × [ x + attention(norm(x)) , x + mlp(norm(x)) ] → norm → logits

In float32 it computes what the compiled step computes; in float64 it is what both are measured against.
Attention itself is in `attention.py`, RoPE in `rope.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike

from qkv.model.attention import Array, attention
from qkv.model.config import ModelConfig
from qkv.model.rope import rotate


class KVCache:
    """The keys and values of all positions so far, per layer: [S, H_kv, d] each.

    History is computed once; a later step computes only its new tokens and reads the rest from here.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike = np.float32) -> None:
        self.length = 0  # positions whose keys and values are complete in every layer
        empty = np.empty((0, config.num_key_value_heads, config.head_dim), dtype)
        self._keys = [empty] * config.num_hidden_layers
        self._values = [empty] * config.num_hidden_layers

    def extend(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Write k and v [T, H_kv, d] behind the `length` positions of a layer; return all S = length + T of both."""
        self._keys[layer] = _write(self._keys[layer], self.length, k)
        self._values[layer] = _write(self._values[layer], self.length, v)
        S = self.length + len(k)
        return self._keys[layer][:S], self._values[layer][:S]


class Decoder:
    """A decoder of the Qwen3, Qwen2 or Llama family.

    `tensors` maps every name of `config.parameter_shapes()` to its values; they are kept in `dtype`
    (float32 or float64), which is also the type everything is computed in.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Array], dtype: DTypeLike = np.float32) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.tensors = {name: np.asarray(tensors[name], self.dtype) for name in config.parameter_shapes()}
        self.rope = config.rope()

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.config, self.dtype)

    def forward(self, ids: Sequence[int], cache: KVCache) -> Array:
        """Compute the next T tokens of a sequence: ids [T] → hidden states [T, hidden], after the last norm.

        The cache holds the positions before them, and these too when it returns.
        """
        positions = np.arange(cache.length, cache.length + len(ids))
        rotation = self.rope.rotation(positions, self.dtype)
        x = self.tensors["model.embed_tokens.weight"][np.asarray(ids, np.int64)]
        for layer in range(self.config.num_hidden_layers):
            x = x + self._attention(layer, self._norm(x, f"model.layers.{layer}.input_layernorm"), rotation, cache)
            x = x + self._mlp(layer, self._norm(x, f"model.layers.{layer}.post_attention_layernorm"))
        cache.length += len(ids)
        return self._norm(x, "model.norm")

    def logits(self, hidden: Array) -> Array:
        """Hidden states [T, hidden] → logits [T, vocab]. A tied model uses the embedding table here too."""
        tied = self.config.tie_word_embeddings
        return hidden @ self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def __call__(self, ids: Sequence[int]) -> Array:
        """Logits [T, vocab] of a whole sequence, with no history."""
        return self.logits(self.forward(ids, self.new_cache()))

    def _attention(self, layer: int, x: Array, rotation: tuple[Array, Array], cache: KVCache) -> Array:
        """x [T, hidden] → q [T, H, d], k and v [T, H_kv, d] → attention → [T, H·d] → o_proj → [T, hidden]."""
        config, name = self.config, f"model.layers.{layer}.self_attn."
        q = self._linear(x, name + "q_proj").reshape(len(x), config.num_attention_heads, config.head_dim)
        k = self._linear(x, name + "k_proj").reshape(len(x), config.num_key_value_heads, config.head_dim)
        v = self._linear(x, name + "v_proj").reshape(len(x), config.num_key_value_heads, config.head_dim)
        if config.qk_norm:  # over each head's d values, before RoPE
            q = self._norm(q, name + "q_norm")
            k = self._norm(k, name + "k_norm")
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        k, v = cache.extend(layer, k, v)
        return self._linear(attention(q, k, v), name + "o_proj")

    def _mlp(self, layer: int, x: Array) -> Array:
        """SwiGLU: down(silu(gate(x)) · up(x)), [T, hidden] → [T, hidden]."""
        name = f"model.layers.{layer}.mlp."
        gate, up = self._linear(x, name + "gate_proj"), self._linear(x, name + "up_proj")
        return self._linear(silu(gate) * up, name + "down_proj")

    def _linear(self, x: Array, name: str) -> Array:
        """x [T, inputs] → x Wᵀ (+ bias, where the family has one) [T, outputs]."""
        y = x @ self.tensors[name + ".weight"].T
        bias = self.tensors.get(name + ".bias")
        return y if bias is None else y + bias

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.tensors[name + ".weight"], self.config.rms_norm_eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / √(mean(x²) + ε) · weight, along the last axis."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + x.dtype.type(eps)) * weight


def silu(x: Array) -> Array:
    """x · sigmoid(x). A large negative x overflows e^-x to inf and the quotient to -0, which is the limit."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _write(buffer: Array, start: int, rows: Array) -> Array:
    """`buffer` with `rows` written at `start`, in a larger copy (doubled) when they do not fit."""
    end = start + len(rows)
    if end > len(buffer):
        grown = np.empty((max(end, 2 * len(buffer)), *buffer.shape[1:]), buffer.dtype)
        grown[:start] = buffer[:start]
        buffer = grown
    buffer[start:end] = rows
    return buffer
