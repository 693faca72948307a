"""Sizes that planning needs as well as kernels: nothing here, nor what it imports, loads Numba."""

from __future__ import annotations

from qkv.errors import ParameterError

BLOCK = 32
"""Positions in a block of the KV cache."""

STEP_TOKENS = 512
"""The most tokens of one step; longer prompts take several."""

CACHE_KINDS = ("f32", "f16", "int8")
"""How a cache can keep its numbers. The place of a kind here is what kernels know it by."""

GROUP = 32
"""Neighbouring numbers that share a scale, in weights, in activations and in an int8 cache."""

_NUMBER_BYTES = {"f32": 4, "f16": 2, "int8": 1}


def half_block_bytes(kind: str, head_dim: int) -> int:
    """Bytes of the keys, or of the values, of one head in one block. Raises ParameterError for an unknown kind."""
    if kind not in CACHE_KINDS:
        raise ParameterError(f"cache: unknown kind {kind!r}; choose one of {', '.join(CACHE_KINDS)}")
    if kind == "int8" and head_dim % GROUP:
        raise ParameterError(
            f"cache: int8 needs heads of a multiple of {GROUP} dimensions, this model's have {head_dim}; "
            'use cache="f16"'
        )
    scales = 4 * BLOCK * (head_dim // GROUP) if kind == "int8" else 0
    return BLOCK * head_dim * _NUMBER_BYTES[kind] + scales
