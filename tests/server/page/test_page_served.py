"""The page on the real server: a tiny model says what it is told, and the browser sees it arrive."""

from __future__ import annotations

import httpx
import pytest
from page_server import FILES, PAGE

from server.serving import running

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

ANSWER = "# Yes\n\n- **東京** 😀\n- <img src=x onerror=alert(1)>\n"


@pytest.fixture
def served(llm, opened):
    """The real server's page, opened with options of the browser."""
    with running(llm) as server:
        yield server, lambda **options: opened(server.url, **options)


def test_every_file_is_served_with_its_type_and_a_strict_policy(served):
    server, _ = served
    types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path, file in {"/": PAGE / "index.html", **{f"/{name}": PAGE / name for name in FILES}}.items():
        reply = server.get(path)
        assert reply.status_code == 200 and reply.content == file.read_bytes()
        assert reply.headers["content-type"].startswith(types[file.suffix])
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    for path in ("/../app.py", "/%2e%2e/app.py", "/missing.js", "/__init__.py"):
        assert httpx.get(server.url + path).status_code == 404


def test_an_answer_with_thinking_arrives_with_its_figures(served, says, say):
    _, open_page = served
    page = open_page()
    assert "2,000" in page.inner_text("#model")
    with says("<think>", "Let me see.", "</think>", ANSWER):
        say(page, "Is it? " * 30)  # the next turn finds it in the cache
        say(page, "Really?")
    last = page.locator(".message.assistant").last
    assert last.locator("h3").inner_text() == "Yes"
    assert last.locator("li").all_inner_texts() == ["東京 😀", "<img src=x onerror=alert(1)>"]
    assert last.locator("details .written").evaluate("node => node.textContent").strip() == "Let me see."
    figures = last.locator(".figures").inner_text()
    assert (
        "tokens/s" in figures and "cached" in figures and " 0% cached" not in figures
    )  # the first turn is in the cache


def test_stop_frees_the_slot(served, says, say):
    server, open_page = served
    page = open_page()
    with says("word " * 1500):
        say(page, "Go on.", wait=False)
        page.locator(".message.assistant p", has_text="word word").wait_for()
        page.click("#stop")
        page.get_by_text("Stopped.", exact=True).first.wait_for()
        assert server.idle()
    kept = page.locator(".message.assistant p").inner_text()
    assert 0 < len(kept) < len("word " * 1500)


def test_the_promise_holds_from_the_browser(served):
    _, open_page = served
    page = open_page()
    page.click("#verify-button")
    page.click("#verify-run")
    page.locator("#verify-result", has_text="Equal").wait_for()
    assert len(set(page.locator("#verify-rows code").all_inner_texts())) == 1
    cached = [int(text.replace(",", "")) for text in page.locator("#verify-rows td.end").all_inner_texts()]
    assert cached[0] < cached[2] and cached[2] == cached[3]


def test_a_refused_parameter_is_told_in_the_servers_words(served, say):
    _, open_page = served
    page = open_page()
    page.click("#settings-button")
    page.fill("[name=max_tokens]", "9007199254740993")
    page.fill("[name=temperature]", "1e300")
    say(page, "word " * 3000)
    told = page.inner_text("[role=alert] >> visible=true")
    assert "400" in told and "context" in told


def test_the_key_of_the_server_is_asked_for(llm, opened, says, say):
    with running(llm, api_key="sesame") as server:
        page = opened(server.url, model_known=False)
        page.fill("#question input", "sesame")
        page.keyboard.press("Enter")
        page.locator("#model:not(:empty)").wait_for()
        with says("Open."):
            say(page, "Hi")
        assert page.inner_text(".message.assistant .text") == "Open."
