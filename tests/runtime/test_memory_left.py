"""How much memory is free: what the system says, what a container allows, and what is said where nobody says."""

from __future__ import annotations

import pytest

from qkv.errors import ParameterError
from qkv.model.compiled import MOST_CONTEXTS, kv_block_bytes, pool_blocks
from qkv.runtime import memory
from qkv.runtime.memory import free_memory
from tiny import tiny_config

CONFIG = tiny_config()
BLOCK = kv_block_bytes(CONFIG, "f16")


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def test_the_smaller_of_the_systems_and_the_containers_figure(system):
    (system / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert free_memory() == 500 * 1024
    (system / "memory.max").write_text("max\n")
    (system / "memory.current").write_text("5\n")
    assert free_memory() == 500 * 1024
    (system / "memory.max").write_text("1005\n")
    assert free_memory() == 1000
    (system / "memory.current").write_text("2000\n")
    assert free_memory() == 0


@pytest.mark.parametrize("text", [None, "", "MemAvailable: much", "MemAvailable:"])
def test_without_a_figure_it_is_half_of_the_memory_or_unknown(system, monkeypatch, text):
    if text is not None:
        (system / "meminfo").write_text(text)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 100}.get, raising=False)
    assert free_memory() == 500
    monkeypatch.delattr(memory.os, "sysconf")
    assert free_memory() is None


@pytest.mark.parametrize(
    ("free", "blocks"),
    [(None, 8), (0, 8), (4 * 8 * BLOCK - 1, 8), (4 * 11 * BLOCK, 11), (10**12, 8 * MOST_CONTEXTS)],
)
def test_the_cache_takes_a_quarter_at_least_one_context_at_most_eight(monkeypatch, free, blocks):
    monkeypatch.setattr("qkv.model.compiled.free_memory", lambda: free)
    assert pool_blocks(CONFIG, "f16", 256) == blocks


@pytest.mark.parametrize("value", [0, -1, 8 * BLOCK - 1, 1e9, "8", True])
def test_a_budget_below_one_context_is_refused(value):
    with pytest.raises(ParameterError, match=rf"^cache_bytes must be .*{8 * BLOCK}.*256 positions"):
        pool_blocks(CONFIG, "f16", 256, value)
    assert pool_blocks(CONFIG, "f16", 256, 9 * BLOCK + 5) == 9
