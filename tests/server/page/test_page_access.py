"""The page for everybody: keyboard, screen reader, phone, dark, Chinese. axe-core judges; pictures are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

AXE = "axe-core@4.14.1"
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1200, "height": 900}
RICH = """# The cache

A *short* answer with **bold**, `code` and [a link](https://example.org).

1. First
   - nested
2. Second

```python
def attend(q, k, v):
    return softmax(q @ k.T / sqrt(d)) @ v  # a line that is far too long for its box and must scroll within it
```

| Head | Share |
|:-----|------:|
| 0 | 0.91 |

> A quote.

\\[ y = x_1 \\]
"""
LOOKS = {
    "light": {"viewport": DESKTOP, "color_scheme": "light"},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light"},
    "phone-dark": {"viewport": PHONE, "color_scheme": "dark", "has_touch": True, "is_mobile": True},
    "chinese": {"viewport": DESKTOP, "color_scheme": "light", "locale": "zh-CN"},
    "phone-chinese": {"viewport": PHONE, "color_scheme": "dark", "locale": "zh-CN"},
}


@pytest.fixture(scope="session")
def axe(tmp_path_factory) -> str:
    """The text of axe-core, from `QKV_TEST_AXE` or from npm."""
    given = os.environ.get("QKV_TEST_AXE")
    if given:
        return Path(given).read_text(encoding="utf-8")
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which fetches axe-core; or its file named by QKV_TEST_AXE")
    folder = tmp_path_factory.mktemp("axe")
    fetched = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=120)
    if fetched.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {fetched.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def faults(page, axe: str) -> list[str]:
    page.evaluate(f"() => {{ {axe} }}")
    violations = page.evaluate("async () => (await axe.run()).violations")
    grave = [one for one in violations if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {node['html']} {node['failureSummary']}" for one in grave for node in one["nodes"]]


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_no_serious_fault_in_any_state(opened, script, say, axe, look, tmp_path_factory):
    page = opened(**LOOKS[look])
    pictures = tmp_path_factory.mktemp(f"page-{look}-")
    found = {}

    def judge(state: str) -> None:
        page.wait_for_timeout(50)
        page.screenshot(path=pictures / f"{state}.png")
        if wrong := faults(page, axe):
            found[state] = wrong
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), state

    judge("empty")
    script.pieces, script.thoughts = [RICH], ["The reader wants to know.\nSo I think."]
    page.fill("#message", "什么是 KV 缓存？" if "chinese" in look else "What is a KV cache?")
    page.click("#send")
    page.locator(".figures").wait_for()
    judge("answer")
    page.evaluate("document.querySelector('details').open = true; thread.scrollTop = 0")
    judge("thinking")
    page.locator(".user footer button").click()
    judge("editing")
    page.keyboard.press("Escape")
    page.click("#settings-button")
    judge("settings")
    page.click("#settings-button")
    if page.viewport_size == PHONE:
        page.click("#conversations-button")
        judge("conversations")
        page.click("#conversations-button")
    page.click("#rename-button")
    judge("rename")
    page.keyboard.press("Escape")
    page.click("#verify-button")
    page.click("#verify-run")
    page.locator("#verify-rows tr").nth(3).wait_for()
    judge("verify")
    page.keyboard.press("Escape")
    script.status, script.message = 400, "temperature: 9 is too hot"
    page.fill("#message", "Again")
    page.click("#send")
    page.locator("[role=alert] >> visible=true").wait_for()
    judge("error")
    assert found == {}


def test_everything_can_be_done_with_the_keyboard(page, script):
    """Tab, Enter, Escape and the arrows only; each stop shows its focus."""

    def tab_to(wanted: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("wanted => document.activeElement.matches(wanted)", wanted):
                style = "getComputedStyle(document.activeElement).outlineStyle"
                assert page.evaluate(style) != "none"
                return
        raise AssertionError(f"no way to {wanted}")

    page.evaluate("document.activeElement.blur()")
    tab_to(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    page.locator(".figures").wait_for()
    assert script.asked[0]["messages"][0]["content"] == "One\nmore"
    assert page.evaluate("document.activeElement.id") == "message"
    tab_to(".user footer button")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+a")
    page.keyboard.type("Two")
    tab_to(".editing .main")
    page.keyboard.press("Enter")
    page.locator(".figures").wait_for()
    assert [message["content"] for message in script.asked[1]["messages"]] == ["Two"]
    tab_to(".regenerate")
    page.keyboard.press("Enter")
    page.locator(".figures").wait_for()
    tab_to("#rename-button")
    page.keyboard.press("Enter")
    page.keyboard.type("Mine")
    page.keyboard.press("Enter")
    page.locator("#list button", has_text="Mine").wait_for()
    assert page.evaluate("document.activeElement.id") == "rename-button"
    tab_to("#settings-button")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "system"
    tab_to("#verify-button")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "verify-run"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "verify-button"
    tab_to("#list button")
    page.keyboard.press("Enter")
    tab_to("#remove-button")
    page.keyboard.press("Enter")
    tab_to("#question-yes")
    page.keyboard.press("Enter")
    page.locator("#greeting").wait_for()
    assert page.evaluate("document.activeElement.id") == "message"


def test_a_screen_reader_hears_the_beginning_and_the_end_and_no_word_between(opened, script, say):
    """Every live region's text is noted, each time that it changes."""
    heard = """
    window.heard = [];
    addEventListener("load", () => {
      const note = () => heard.at(-1) === status_().textContent || heard.push(status_().textContent);
      const status_ = () => document.getElementById("status");
      new MutationObserver(note).observe(status_(), { childList: true, characterData: true, subtree: true });
    });
    """
    page = opened(before=heard)
    script.pieces = ["word "] * 200
    say(page, "Hi")
    assert page.evaluate("heard") == ["Answering", "The answer is complete."]
    assert page.locator("[aria-live]").count() == 0
    assert page.locator("[role=log], [role=status] >> visible=true").count() <= 1


def test_chinese_by_the_browsers_language_and_by_the_switch(opened, script, say):
    page = opened(locale="zh-CN")
    assert page.evaluate("document.documentElement.lang") == "zh"
    say(page, "你好")
    assert "词元" in page.inner_text(".figures") and page.inner_text("#send") == "发送"
    page.click("#language-button")
    assert "tokens/s" in page.inner_text(".figures") and page.inner_text("#send") == "Send"
    page.reload()
    page.locator(".figures", has_text="tokens/s").wait_for()
    assert page.evaluate("document.documentElement.lang") == "en"


def test_enter_that_confirms_a_chinese_word_sends_nothing(page, script):
    page.click("#message")
    devtools = page.context.new_cdp_session(page)
    devtools.send("Input.imeSetComposition", {"text": "nihao", "selectionStart": 5, "selectionEnd": 5})
    confirm = "new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true, cancelable: true })"
    assert page.evaluate(f"message.dispatchEvent({confirm})")
    assert script.asked == []
    devtools.send("Input.insertText", {"text": "你好"})
    page.keyboard.press("Enter")
    page.locator(".figures").wait_for()
    assert script.asked[0]["messages"][0]["content"] == "你好"


def test_the_theme_follows_the_system_until_it_is_chosen(opened):
    page = opened(color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    assert page.get_attribute("#theme-button", "aria-pressed") == "true"
    page.click("#theme-button")
    light = page.evaluate(paper)
    assert light != dark and page.get_attribute("#theme-button", "aria-pressed") == "false"
    page.reload()
    page.locator("html[data-theme]").wait_for()
    assert page.evaluate(paper) == light


def test_nothing_moves_for_a_reader_who_wants_it_still(opened, script, say):
    import threading

    script.gate = threading.Semaphore(0)
    moving = "document.getAnimations().length"
    for wish, count in (("reduce", 0), ("no-preference", 1)):
        page = opened(reduced_motion=wish)
        say(page, "Hi", wait=False)
        page.locator(".waiting").wait_for()
        assert page.evaluate(moving) == count
