"""Mapped files: what is let go of leaves memory, and nothing else changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from qkv.weights.mapped import let_go, map_file


def file_megabytes() -> int:
    """How much of this process's memory is pages of files."""
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) >> 10


@pytest.fixture
def values(tmp_path):
    expected = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    (tmp_path / "file").write_bytes(expected.tobytes())
    return np.frombuffer(map_file(tmp_path / "file"), np.uint8), expected


def test_bytes_that_were_let_go_are_read_again(values):
    mapped, expected = values
    assert np.array_equal(mapped, expected)
    for part in (mapped[5:], mapped[3 : 3 + (1 << 20)].reshape(1024, 1024), mapped[7:9], mapped[:0], mapped[::3]):
        let_go(part)
        let_go(part)
    assert np.array_equal(mapped, expected)
    let_go(expected)  # not of a file
    assert np.array_equal(mapped, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_what_was_let_go_takes_no_memory(values):
    mapped, _ = values
    before = file_megabytes()
    int(mapped.sum())
    assert file_megabytes() - before > 60
    let_go(mapped[: 32 << 20])
    assert 28 < file_megabytes() - before < 36
