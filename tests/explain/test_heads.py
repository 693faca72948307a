"""What `explain heads` shows, against the tensors' own shapes and the reference decoder."""

from __future__ import annotations

import re

import numpy as np
import pytest

from qkv.explain import heads
from qkv.explain.trace import Traced
from qkv.model.attention import attention
from qkv.model.config import PRESETS
from tiny import random_tensors, tiny_config

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]


def test_qwen3_by_hand():
    found = heads.compute(QWEN3)
    shapes = {step.name: step.shape for step in found.steps}
    assert shapes["x"] == shapes["o_proj"] == ("T", "1024")
    assert shapes["q_proj"] == shapes["concatenated"] == ("T", "2048")
    assert shapes["k_proj, v_proj"] == ("T", "1024")
    assert (shapes["q"], shapes["k, v"]) == (("T", "16", "128"), ("T", "8", "128"))
    assert found.groups == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert found.right.parameters == 28 * (1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024)
    assert found.right.cache_bytes == 114_688
    assert (found.wrong.head_dim, found.wrong.q_size, found.wrong.kv_size) == (64, 1024, 512)
    assert found.wrong.cache_bytes == 57_344
    assert found.wrong.scale / found.right.scale == pytest.approx(2**0.5)


@pytest.mark.parametrize("config", [*PRESETS.values(), tiny_config(), tiny_config(head_dim=16)])
def test_sizes_are_those_of_the_tensors(config):
    found, shapes = heads.compute(config), config.parameter_shapes()
    attention = [shape for name, shape in shapes.items() if re.search(r"self_attn\.[qkvo]_proj\.weight", name)]
    assert found.right.parameters == sum(rows * columns for rows, columns in attention)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (config.hidden_size, found.right.q_size)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (found.right.kv_size, config.hidden_size)
    assert (found.wrong is None) == (config.hidden_size == config.num_attention_heads * config.head_dim)


def test_shapes_are_those_of_a_run():
    config = tiny_config()
    run = Traced(config, random_tensors(config)).trace(range(5))[0]
    shapes = {step.name: step.shape for step in heads.compute(config).steps}
    assert shapes["q"] == ("T", *map(str, run.q.shape[1:]))
    assert shapes["k, v"] == ("T", *map(str, run.k.shape[1:]))
    assert shapes["concatenated"] == ("T", str(attention(run.q, run.k, run.v).shape[1]))


def test_a_group_shares_its_keys():
    """Changing a key/value head changes the outputs of its group, and of no other head."""
    config = tiny_config(num_attention_heads=6, num_key_value_heads=3)
    run = Traced(config, random_tensors(config)).trace(range(5))[0]
    before = attention(run.q, run.k, run.v).reshape(5, 6, -1)
    for g, group in enumerate(heads.compute(config).groups):
        v = run.v.copy()
        v[:, g] += 1
        after = attention(run.q, run.k, v).reshape(5, 6, -1)
        assert [h for h in range(6) if not np.array_equal(before[:, h], after[:, h])] == group


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PRESETS)
def test_report(name, width):
    config = PRESETS[name]
    text = heads.report(heads.compute(config), name, width)
    assert max(map(len, text.splitlines())) <= width
    drawn = re.findall(r"q(\d+)\b", " ".join(line for line in text.splitlines() if re.match(r" *q\d+ ", line)))
    assert list(map(int, drawn)) == list(range(config.num_attention_heads))
    keys = re.findall(r"k(\d+) v(\d+)", text)
    assert keys == [(f"{g}", f"{g}") for g in range(config.num_key_value_heads)]
    assert f"[T, {config.num_attention_heads}, {config.head_dim}]" in text


def test_a_model_whose_heads_are_hidden_over_h():
    config = tiny_config(head_dim=16)
    assert "hidden/H = 64/4 = 16: the size of its heads here." in heads.report(heads.compute(config), "a", 80)
