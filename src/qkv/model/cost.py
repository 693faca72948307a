"""What a step costs, counted from the shape of the model alone: bytes read and positions held.

Decoding one token reads every weight once and the whole cache of its sequence once; how fast memory delivers those
bytes is the limit of its speed.
"""

from __future__ import annotations

from qkv.kernels.kvcache import BLOCK, half_block_bytes
from qkv.model.config import ModelConfig


def cache_bytes_per_position(config: ModelConfig, cache: str) -> float:
    """Bytes of the keys and values of one position in all layers, for a cache of kind "f16", "int8" or "f32"."""
    per_head = 2 * half_block_bytes(cache, config.head_dim) / BLOCK
    return per_head * config.num_key_value_heads * config.num_hidden_layers


def decode_bytes(config: ModelConfig, cache: str, weight_bytes: int, first: int, steps: int) -> float:
    """Bytes read by `steps` decode steps of one sequence, the first of them at position `first` (0-based).

    A step at position p reads all `weight_bytes` and the keys and values of p + 1 positions.
    """
    positions = steps * (first + 1) + steps * (steps - 1) / 2
    return steps * weight_bytes + positions * cache_bytes_per_position(config, cache)
