"""What a model had inside while it computed a text: attention of any head, the residual stream, what they lead to.

T is the number of positions, H of query heads, H_kv of key/value heads, d the size of a head. Where a method takes a
head, None is all that were kept, in the order of `heads`. Layers and heads may count from the end: -1 is the last.
What the engine computed is kept (q, k, v, z, the streams); all else is computed when it is asked for, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qkv.checks import shown
from qkv.errors import ParameterError
from qkv.look import names, view
from qkv.look.readout import Readout
from qkv.look.recorder import Recorder
from qkv.look.statistics import Statistics, measure
from qkv.model.attention import attention_scores, attention_weights

Array = NDArray[Any]

ROWS = 256
"""Rows of a head's weights that are computed at a time."""


class Look:
    """Made by `LLM.look`. Its arrays and the model's weights stay in memory for as long as it does."""

    def __init__(
        self,
        recorder: Recorder,
        readout: Readout,
        ids: Sequence[int],
        tokens: Sequence[str],
        *,
        prompt_tokens: int,
    ) -> None:
        self.ids: NDArray[np.int64] = np.array(ids, np.int64)
        """[T]"""
        self.tokens = list(tokens)
        """The text of each; bytes that are no whole character are spelled \\\\xe4."""
        self.prompt_tokens = prompt_tokens
        """How many of the T positions the prompt has; the others were generated."""
        self.layers, self.heads = tuple(recorder.layers), recorder.heads
        self._recorder, self._readout = recorder, readout

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Look at {len(self)} tokens, {len(self.layers)} layers, {len(self.heads)} heads>"

    def _repr_html_(self) -> str:
        """The overview of heads, for notebooks."""
        return view.overview(self)

    def __getitem__(self, name: str) -> Array:
        """An array by TransformerLens's name, such as look["blocks.3.attn.hook_pattern"]: see `qkv.look.names`."""
        layer, hook = names.parse(name, self._readout.config.num_hidden_layers, names.ATTENTION + names.STREAM)
        at = {
            "hook_rot_q": self.q, "hook_rot_k": self.k, "hook_v": self.v, "hook_z": self.z,
            "hook_pattern": self.pattern, "hook_result": self.head_contribution,
            "hook_resid_pre": self.resid_pre, "hook_resid_post": self.resid_post,
        }  # fmt: skip
        return at[hook](layer)

    # -------------------------------------------------------------------------------------- what the engine had

    def q(self, layer: int, head: int | None = None) -> Array:
        """Queries, normed and rotated: [T, H, d] or [T, d]."""
        return self._of(self._part("q", layer), head)

    def k(self, layer: int, head: int | None = None) -> Array:
        """Keys as the cache holds them: [T, H_kv, d], or [T, d], those that a query head reads."""
        return self._shared(self._part("k", layer), head)

    def v(self, layer: int, head: int | None = None) -> Array:
        """Values as the cache holds them: [T, H_kv, d], or [T, d], those that a query head reads."""
        return self._shared(self._part("v", layer), head)

    def z(self, layer: int, head: int | None = None) -> Array:
        """What attention gave, Σ_j A_ij v_j, with edits made: [T, H, d] or [T, d]."""
        return self._of(self._part("z", layer), head)

    def resid_pre(self, layer: int) -> Array:
        """The residual stream before a layer: [T, hidden]."""
        return self._recorder.stream(self._number(layer))

    def resid_post(self, layer: int) -> Array:
        """The residual stream after a layer: [T, hidden]."""
        return self._recorder.stream(self._number(layer) + 1)

    # -------------------------------------------------------------------------------------- attention

    def scores(self, layer: int, head: int | None = None) -> Array:
        """<q_i, k_j> / √d, before the mask: [H, T, T] or [T, T], [query, key]."""
        if head is None:
            return np.stack([self.scores(layer, h) for h in self.heads])
        return attention_scores(self.q(layer, head), self.k(layer, head).astype(np.float32))

    def pattern(self, layer: int, head: int | None = None, dtype: DTypeLike = np.float32) -> Array:
        """Attention's weights A: [H, T, T] or [T, T], [query, key]. Rows sum to 1; the future is exactly 0.

        For long texts take one head at a time, or dtype np.float16.
        """
        if head is None:
            return np.stack([self.pattern(layer, h, dtype) for h in self.heads])
        q, k, T = self.q(layer, head), self.k(layer, head).astype(np.float32), len(self)
        weights = np.zeros((T, T), dtype)
        for first in range(0, T, ROWS):
            end = min(T, first + ROWS)
            weights[first:end, :end] = attention_weights(q[first:end], k[:end])
        return weights

    def row(self, layer: int, head: int, position: int) -> Array:
        """What one position takes from those up to it: [position + 1], sums to 1."""
        i = names.in_range("position", position, len(self))
        q, k = self.q(layer, head)[i : i + 1], self.k(layer, head)[: i + 1].astype(np.float32)
        return attention_weights(q, k)[0]

    def top_keys(self, position: int, layer: int, head: int, count: int = 10) -> list[tuple[int, str, float]]:
        """The positions that one takes most from, the most first: (position, token, weight)."""
        weights = self.row(layer, head, position)
        best = np.argsort(-weights, kind="stable")[:count]
        return [(int(j), self.tokens[j], float(weights[j])) for j in best]

    def entropy(self, layer: int, head: int | None = None) -> Array:
        """Of each row of weights, in nats: [H, T] or [T]. 0: one position gets all; log(i + 1): all get the same."""
        if head is None:
            return np.stack([self.entropy(layer, h) for h in self.heads])
        weights = self.pattern(layer, head)
        return -np.einsum("ij,ij->i", weights, np.log(np.maximum(weights, np.finfo(np.float32).tiny)))

    def value_weighted(self, layer: int, head: int) -> Array:
        """A_ij · ‖v_j‖, [T, T]: how much of what i takes comes from j. A sink's values are often next to nothing."""
        return self.pattern(layer, head) * np.linalg.norm(self.v(layer, head).astype(np.float32), axis=1)

    @cached_property
    def statistics(self) -> Statistics:
        """What every kept head does on this text, in a few numbers."""

        def numbers(layer: int) -> tuple[Array, list[Array]]:
            keys = self.k(layer).astype(np.float32)
            return self.q(layer), [self._shared(keys, head) for head in self.heads]

        return measure(self.ids, map(numbers, self.layers))

    # -------------------------------------------------------------------------------------- what it leads to

    def head_contribution(self, layer: int, head: int | None = None) -> Array:
        """What a head adds to the residual stream, z through its slice of o_proj: [T, H, hidden] or [T, hidden]."""
        weights = self._readout.output_weights(self._number(layer))
        if head is None:
            return np.stack([self.z(layer, h) @ weights[h] for h in self.heads], axis=1)
        return self.z(layer, head) @ weights[self._head(head)]

    def logit_lens(self, layer: int, position: int = -1) -> Array:
        """Logits [vocab] as if the model ended after a layer, about the token that follows a position."""
        i = names.in_range("position", position, len(self))
        return self._readout.logits(self.resid_post(layer)[i : i + 1])[0]

    def logit_contribution(self, layer: int, head: int, token: int, position: int = -1) -> float:
        """A head's direct share of the logit that a position gives a token, the last norm's divisor kept as it is."""
        i = names.in_range("position", position, len(self))
        config = self._readout.config
        chosen = names.in_range("token", token, config.vocab_size)
        direction = self._readout.direction(chosen, self._recorder.stream(config.num_hidden_layers)[i])
        return float(self.head_contribution(layer, head)[i] @ direction)

    # -------------------------------------------------------------------------------------- which

    def _number(self, layer: int) -> int:
        number = names.in_range("layer", layer, self._readout.config.num_hidden_layers)
        if number not in self.layers:
            raise ParameterError(f"layer {number} was not looked at; these were: {shown(list(self.layers))}")
        return number

    def _part(self, name: str, layer: int) -> Array:
        return self._recorder.attention(name, self._number(layer))

    def _head(self, head: int) -> int:
        number = names.in_range("head", head, self._readout.config.num_attention_heads)
        if number not in self.heads:
            raise ParameterError(f"head {number} was not looked at; these were: {shown(list(self.heads))}")
        return number

    def _of(self, array: Array, head: int | None) -> Array:
        return array if head is None else array[:, self.heads.index(self._head(head))]

    def _shared(self, array: Array, head: int | None) -> Array:
        return array if head is None else array[:, self._head(head) // self._readout.config.heads_per_kv_head]
