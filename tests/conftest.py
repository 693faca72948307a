"""What every test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of optional material beside the repository (the real Qwen3 tokenizer); skips where it is missing."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the optional folder ../shared (Qwen3's real tokenizer files)")
    return folder
