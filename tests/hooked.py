"""The reference decoder with places to look and to change things: what taps and edits are measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.model.attention import attention, attention_weights
from qkv.model.reference import Decoder
from qkv.model.rope import rotate

Array = NDArray[Any]


class Hooked(Decoder):
    """Runs a whole text and keeps, by TransformerLens's names, what was at each point after `change` had its turn.

    change: takes a point's name and its array, and gives the array to go on with.
    """

    change: Callable[[str, Array], Array] = staticmethod(lambda name, array: array)

    def run(self, ids: Sequence[int]) -> tuple[Array, dict[str, Array]]:
        """Logits [T, vocab], and name → array: streams [T, hidden], q, k, v, z [T, heads, d], patterns [H, T, T]."""
        seen: dict[str, Array] = {}

        def at(name: str, array: Array) -> Array:
            seen[name] = self.change(name, array)
            return seen[name]

        rotation = self.rope.rotation(np.arange(len(ids)), self.dtype)
        x = self.tensors["model.embed_tokens.weight"][np.asarray(ids, np.int64)]
        layers = self.config.num_hidden_layers
        for layer in range(layers):
            block = f"blocks.{layer}"
            x = at(f"{block}.hook_resid_pre", x)
            x = at(f"{block}.hook_resid_mid", x + self._heads(layer, x, rotation, at))
            x = x + self._mlp(layer, self._norm(x, f"model.layers.{layer}.post_attention_layernorm"))
            if layer == layers - 1:
                x = at(f"{block}.hook_resid_post", x)
        return self.logits(self._norm(x, "model.norm")), seen

    def _heads(self, layer: int, x: Array, rotation: tuple[Array, Array], at: Callable[[str, Array], Array]) -> Array:
        config, name, block = self.config, f"model.layers.{layer}.self_attn.", f"blocks.{layer}.attn"
        x = self._norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (self._linear(x, name + f"{part}_proj").reshape(len(x), -1, config.head_dim) for part in "qkv")
        if config.qk_norm:
            q, k = self._norm(q, name + "q_norm"), self._norm(k, name + "k_norm")
        q, k = at(f"{block}.hook_rot_q", rotate(q, *rotation)), at(f"{block}.hook_rot_k", rotate(k, *rotation))
        v = at(f"{block}.hook_v", v)
        group = config.heads_per_kv_head
        at(
            f"{block}.hook_pattern",
            np.stack([attention_weights(q[:, h], k[:, h // group]) for h in range(q.shape[1])]),
        )
        z = at(f"{block}.hook_z", attention(q, k, v).reshape(q.shape))
        return self._linear(z.reshape(len(x), -1), name + "o_proj")
