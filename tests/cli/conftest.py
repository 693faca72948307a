"""Every command-line test starts from the same surroundings: nothing piped in, no settings, no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from screen import pipe_in


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe_in(monkeypatch, b"")
    for name in ("QKV_MODEL", "QKV_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("QKV_OFFLINE", "1")
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
