"""What every test may ask for, and what a skip means."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SWITCHES += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP page.test 127.0.0.1"]


def pytest_configure() -> None:
    """Take Ctrl-C, also where a script or a job runner started the suite in the background, with SIGINT ignored.

    Children inherit an ignored signal, and then no test of Ctrl-C could end.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of optional material beside the repository (the real Qwen3 tokenizer); skips where it is missing."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the optional folder ../shared (Qwen3's real tokenizer files)")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """With QKV_REQUIRE_ALL=1 nothing may be skipped but what needs the model hub: all the rest can be had anywhere."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("hub") is not None
    if report.skipped and os.environ.get("QKV_REQUIRE_ALL") == "1" and not expected:
        report.outcome = "failed"
        report.longrepr = f"skipped, but QKV_REQUIRE_ALL=1: {call.excinfo.value if call.excinfo else item.nodeid}"
    return report


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's GGUF file: `QKV_TEST_SMOLLM2`, else the cache, else fetched; skips where it cannot be fetched."""
    from qkv.errors import ModelNotFoundError
    from qkv.weights.names import resolve

    given = os.environ.get("QKV_TEST_SMOLLM2")
    try:
        return Path(given) if given else resolve("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(f"needs SmolLM2: {error}")


@pytest.fixture(scope="module")  # while it is open, its event loop runs, and no other test could run one
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    chromium = os.environ.get("QKV_TEST_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs the chromium of the system (apt-get install chromium), or QKV_TEST_CHROMIUM")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=SWITCHES)
        yield launched
        launched.close()
