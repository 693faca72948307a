"""The counts of `cost` against loops over positions, heads and layers, and against what the decoder allocates."""

from __future__ import annotations

import pytest

from decoders import compiled, packed
from qkv.errors import ParameterError
from qkv.model.compiled import kv_block_bytes
from qkv.model.config import PRESETS
from qkv.model.cost import cache_bytes_per_position, decode_bytes
from tiny import random_tensors, tiny_config

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]


def test_a_position_of_qwen3_takes_112_kilobytes_in_half_precision():
    assert cache_bytes_per_position(QWEN3, "f16") == 114_688
    assert cache_bytes_per_position(QWEN3, "f32") == 2 * 114_688
    # a byte for each number, and a float32 scale for each 32 of them
    assert cache_bytes_per_position(QWEN3, "int8") == 114_688 / 2 * (1 + 4 / 32)


@pytest.mark.parametrize("kind", ["f16", "f32", "int8"])
@pytest.mark.parametrize("config", [QWEN3, tiny_config(head_dim=64)], ids=["qwen3", "tiny"])
def test_bytes_of_a_position_are_those_of_its_numbers(config, kind):
    total = 0.0
    for _layer in range(config.num_hidden_layers):
        for _head in range(config.num_key_value_heads):
            for _key_or_value in range(2):
                for _group in range(config.head_dim // 32):
                    total += {"f32": 32 * 4, "f16": 32 * 2, "int8": 32 + 4}[kind]
    assert cache_bytes_per_position(config, kind) == total
    assert kv_block_bytes(config, kind) == 32 * total


@pytest.mark.parametrize(("first", "steps"), [(0, 1), (0, 5), (17, 1), (128, 64), (5, 0)])
def test_decoding_reads_the_weights_and_all_positions_so_far(first, steps):
    total = 0.0
    for position in range(first, first + steps):
        total += 1_000_003
        for _seen in range(position + 1):
            total += cache_bytes_per_position(QWEN3, "f16")
    assert decode_bytes(QWEN3, "f16", 1_000_003, first, steps) == total


def test_an_unknown_cache_is_named():
    with pytest.raises(ParameterError, match=r"cache: .*'fp8'.*f16"):
        cache_bytes_per_position(QWEN3, "fp8")


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_of_a_step_are_all_that_it_reads(tied):
    """A tied table is read as the head; of another one a row is read, which does not count."""
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    read = sum(v.size for name, v in tensors.items() if v.ndim == 2 and (tied or "embed_tokens" not in name))
    assert packed(config, tensors, "f32").bytes_per_token == 4 * read
    assert packed(config, tensors, "int8").bytes_per_token == read + read // 32 * 2


@pytest.mark.parametrize("kind", ["f16", "f32", "int8"])
def test_the_pool_has_the_blocks_it_says(kind):
    config = tiny_config()
    decoder = compiled(config, packed(config, random_tensors(config)), cache=kind, context=100)
    assert decoder.blocks >= 4  # of 32 positions
    assert decoder._buffers.pool.bytes.nbytes == decoder.blocks * 32 * cache_bytes_per_position(config, kind)
