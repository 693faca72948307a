"""`explain cost`: what is timed computes attention, and what is shown is what was counted and measured."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.errors import ModelFileError
from qkv.explain import attention_cost
from qkv.explain.attention_cost import AttentionCost, Phase
from qkv.kernels.sizes import BLOCK, STEP_TOKENS
from qkv.measure import attention_timing
from qkv.measure.attention_timing import attention_steps, measure, new_pool
from qkv.model.attention import attention
from qkv.model.config import PRESETS
from qkv.model.cost import Limits
from qkv.runtime.team import team
from tiny import tiny_config

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]
LIMITS = Limits(20e9, 100e9, 400e9)


def config_of(heads, kv_heads, d):
    return tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=d)


def pool_of(config, k, v):
    """A cache that holds k and v [S, H_kv, d]; the rest of the last block is NaN."""
    S, kv_heads, d = k.shape
    blocks = -(-S // BLOCK)
    pool = new_pool(config, S)
    numbers = pool.bytes.view(np.float16).reshape(blocks, kv_heads, 2, BLOCK * d)
    numbers[:] = np.nan
    keys = numbers[:, :, 0].reshape(blocks, kv_heads, d, BLOCK)
    values = numbers[:, :, 1].reshape(blocks, kv_heads, BLOCK, d)
    for t in range(S):
        keys[t // BLOCK, :, :, t % BLOCK] = k[t]
        values[t // BLOCK, :, t % BLOCK] = v[t]
    numbers[:, :, 0], numbers[:, :, 1] = keys.reshape(blocks, kv_heads, -1), values.reshape(blocks, kv_heads, -1)
    return pool


def run(*arguments):
    """The outputs of all steps, one after the other."""
    steps = attention_steps(*arguments)
    for program, _ in steps:
        team().run(program)
    return np.concatenate([out for _, out in steps])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "d"), [(1, 2, 1, 32), (77, 4, 2, 32), (600, 6, 2, 64), (STEP_TOKENS + 1, 3, 1, 16)]
)
def test_what_is_timed_is_attention(T, heads, kv_heads, d, threads):
    rng, config = np.random.default_rng(T), config_of(heads, kv_heads, d)
    q = rng.standard_normal((T, heads, d)).astype(np.float32)
    k, v = rng.standard_normal((2, T, kv_heads, d)).astype(np.float16)
    expected, pool = attention(q.astype(float), k.astype(float), v.astype(float)), pool_of(config, k, v)
    np.testing.assert_allclose(run(config, q, 0, pool, threads), expected, atol=1e-5)
    np.testing.assert_allclose(run(config, q[-1:], T - 1, pool, threads), expected[-1:], atol=1e-5)


def test_every_layer_reads_its_own_part_of_the_cache():
    """Two layers take turns in the blocks; the outputs are the second's."""
    rng, config = np.random.default_rng(0), config_of(4, 2, 32)
    q = rng.standard_normal((1, 4, 32)).astype(np.float32)
    k, v = rng.standard_normal((2, 192, 2, 32)).astype(np.float16)
    found = run(config, q, 95, pool_of(config, k, v)._replace(layers=2), 2)
    k, v = (x.reshape(3, 2, BLOCK, 2, 32)[:, 1].reshape(96, 2, 32).astype(float) for x in (k, v))
    np.testing.assert_allclose(found, attention(q.astype(float), k, v), atol=1e-5)


def test_every_length_is_measured(monkeypatch):
    monkeypatch.setattr(attention_timing, "ROUNDS", 1)
    monkeypatch.setattr(attention_timing, "ROUND_SECONDS", 1e-9)
    monkeypatch.setattr(attention_timing, "POSITIONS", 256)
    heard = []
    prefill, decode = measure(
        tiny_config(), [32, 64], [32, 64, 300], 2, lambda what, done, total, unit="bytes": heard.append((done, total))
    )
    assert len(prefill) == 2
    assert len(decode) == 3
    assert min(prefill + decode) > 0
    assert heard[-1] == (1, 1)


def test_heads_that_the_kernels_do_not_have_are_refused():
    with pytest.raises(ModelFileError, match="head_dim 24 is not a multiple of 16"):
        measure(tiny_config(head_dim=24), [32], [32], 1)


@pytest.fixture
def result(monkeypatch) -> AttentionCost:
    """Times made up as c·T² and c·T."""
    monkeypatch.setattr(attention_cost, "measure_limits", lambda *_: LIMITS)
    monkeypatch.setattr(
        attention_cost, "measure", lambda config, a, b, *_: ([1e-7 * T**2 for T in a], [1e-6 * T for T in b])
    )
    return attention_cost.compute(QWEN3, 2)


def test_counts_are_those_of_one_layer(result):
    for T, textbook, executed in zip(
        result.prefill.lengths, result.prefill.textbook, result.prefill.executed, strict=True
    ):
        assert textbook == 8192 * T**2
        scores = sum(BLOCK * (i // BLOCK + 1) for i in range(T))
        assert executed == 2 * 16 * 128 * (scores + T * (T + 1) // 2)
        assert 0.5 < executed / textbook < 0.6
    for T, textbook, executed, size in zip(
        result.decode.lengths, result.decode.textbook, result.decode.executed, result.decode.bytes, strict=True
    ):
        assert textbook == executed == 8192 * T  # T is a multiple of 32
        assert size == 114_688 // 28 * T


def test_exponents(result):
    assert result.prefill.exponent == pytest.approx(2)
    assert result.decode.exponent == pytest.approx(1)
    assert Phase("", [1, 10, 100], [], [], [], [3.0, 30 * 10**0.5, 3000.0]).exponent == pytest.approx(1.5)


@pytest.mark.parametrize("width", [80, 120])
def test_report(result, width):
    text = attention_cost.report(result, "Qwen3-0.6B", width)
    assert max(map(len, text.splitlines())) <= width
    assert "measured time ~ T^2.00" in text
    assert "measured time ~ T^1.00" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("T = 1024"))
    executed = result.prefill.executed[3]
    assert row[3:5] == ["8.59", "G"]
    assert row[5:7] == [f"{executed / 1e9:.2f}", "G"]
    seconds = 1e-7 * 1024**2
    assert row[9:11] == [f"{seconds * 1e3:.0f}", "ms"]
    assert row[11:13] == [f"{executed / seconds / 1e9:.1f}", "G"]
    assert row[13:15] == [f"{100 * executed / seconds / 100e9:.0f}", "%"]
    assert "20.0 GB/s from memory" in " ".join(text.split())
    assert "8,192·T² a layer" in text
