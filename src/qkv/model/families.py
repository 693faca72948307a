"""The families of decoders that qkv runs, and all that sets one apart from another.

A new family of dense decoders is one record here, if nothing about it is new. Everything else asks the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """One family. What is not said here is the same in all of them."""

    model_type: str
    """Its name in a Hugging Face config.json."""
    architecture: str
    """Its name in GGUF metadata. Families with the same one are computed alike."""
    qk_norm: bool = False
    """Whether every q and k head is RMS-normalized before RoPE."""
    qkv_bias: bool = False
    """Whether q, k and v have a bias. No key of a config says so."""
    head_dim: int | None = None
    """The head size of a config that gives none; None: hidden_size / num_attention_heads."""
    window_is_opt_in: bool = False
    """Whether `sliding_window` counts only beside `use_sliding_window`."""
    window: int | None = None
    """The sliding window of a config without the key."""
    gguf_pairs_neighbours: bool = False
    """Whether GGUF files have the rows of the q and k matrices reordered, for a RoPE that rotates neighbours."""
    sampling: Mapping[str, Any] | None = None
    """What its makers recommend, by `SamplingParams` field; None: nothing, so greedy."""
    sampling_when_thinking: Mapping[str, Any] | None = None


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "qwen3",
            "qwen3",
            qk_norm=True,
            head_dim=128,
            window_is_opt_in=True,
            sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            sampling_when_thinking={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        Family("qwen2", "qwen2", qkv_bias=True, window_is_opt_in=True),
        Family("llama", "llama", gguf_pairs_neighbours=True),
        Family("mistral", "llama", gguf_pairs_neighbours=True, window=4096),
    )
}
"""By `model_type`."""

ARCHITECTURES = {family.architecture: family for family in reversed(list(FAMILIES.values()))}
"""By GGUF's name. Of families that share it, the first stands for all."""
