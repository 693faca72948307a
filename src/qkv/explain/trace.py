"""The reference decoder, keeping what each layer's attention is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkv.model.attention import Array
from qkv.model.reference import Decoder, KVCache
from qkv.model.rope import rotate


@dataclass(frozen=True)
class Heads:
    """q [T, H, d] and k, v [T, H_kv, d] of one layer, at each step from the projections to attention."""

    q_projected: Array  # q_proj's output (and bias)
    k_projected: Array
    q_normed: Array  # after the norm of each head; the projections themselves where the family has no such norm
    k_normed: Array
    q: Array  # after RoPE: what attention gets
    k: Array
    v: Array


class Traced(Decoder):
    """A reference decoder that can say what q, k and v are, layer by layer. Made like a `Decoder`."""

    def trace(self, ids: Sequence[int]) -> list[Heads]:
        """Compute a sequence, with no history before it, and return every layer's heads."""
        self._heads: list[Heads] = []
        self.forward(ids, self.new_cache())
        return self._heads

    def _attention(self, layer: int, x: Array, rotation: tuple[Array, Array], cache: KVCache) -> Array:
        self._seen: dict[str, Array] = {}
        result = super()._attention(layer, x, rotation, cache)
        d = self.config.head_dim
        q, k, v = (self._seen[name].reshape(len(x), -1, d) for name in ("q_proj", "k_proj", "v_proj"))
        q_normed, k_normed = self._seen.get("q_norm", q), self._seen.get("k_norm", k)
        rotated = rotate(q_normed, *rotation), rotate(k_normed, *rotation)
        self._heads.append(Heads(q, k, q_normed, k_normed, *rotated, v))
        return result

    def _linear(self, x: Array, name: str) -> Array:
        return self._keep(name, super()._linear(x, name))

    def _norm(self, x: Array, name: str) -> Array:
        return self._keep(name, super()._norm(x, name))

    def _keep(self, name: str, value: Array) -> Array:
        """Remember an output by the last part of its weight's name, until the next layer."""
        if ".self_attn." in name:
            self._seen[name.rpartition(".")[2]] = value
        return value
