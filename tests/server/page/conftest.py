"""A real browser for the page. Whatever a test does: no console error, no request elsewhere, no script let in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from page_server import PageServer

STATED = "Failed to load resource: the server responded with a status of"  # the browser's own line about a refusal


@pytest.fixture
def server() -> Iterator[PageServer]:
    started = PageServer()
    yield started
    started.close()


@pytest.fixture
def script(server):
    return server.script


@pytest.fixture
def opened(browser, server) -> Iterator[Any]:
    """Opens the page in a fresh browser profile, with options such as `viewport`, and watches over it."""
    faults: list[str] = []
    contexts = []
    own: tuple[str, ...] = ("blob:",)

    def watch_request(request: Any) -> None:
        if not request.url.startswith(own):
            faults.append(f"request to {request.url}")

    def open_page(url: str = "", before: str = "", *, model_known: bool = True, **options: Any) -> Any:
        nonlocal own
        own += (url or server.url,)
        context = browser.new_context(**({"viewport": {"width": 1200, "height": 900}} | options))
        contexts.append(context)
        context.set_default_timeout(60_000)
        context.on("request", watch_request)
        page = context.new_page()
        page.on("console", lambda line: line.type == "error" and note(line.text))
        page.on("pageerror", lambda error: faults.append(f"uncaught {error}"))
        page.on("dialog", lambda dialog: (faults.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        if before:
            page.add_init_script(before)
        page.goto(url or server.url)
        if model_known:
            page.locator("#model:not(:empty)").wait_for(state="attached")
        return page

    def note(line: str) -> None:
        if not line.startswith(STATED) and "ERR_CONNECTION_REFUSED" not in line:
            faults.append(f"console: {line}")

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(opened):
    return opened()


@pytest.fixture
def say():
    """Writes a message, sends it, and waits for the whole answer unless told not to."""

    def write(page: Any, text: str, *, wait: bool = True) -> None:
        answers = page.locator(".message.assistant").count()
        page.fill("#message", text)
        page.press("#message", "Enter")
        page.locator(".message.assistant").nth(answers).wait_for()
        if wait:
            page.locator(".message.assistant[aria-busy=false]").nth(answers).wait_for()

    return write
