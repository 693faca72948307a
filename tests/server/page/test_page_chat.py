"""The page in a real browser: what a reader does with it, and what goes over the wire."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

ANSWERS = ".message.assistant"
LAST = ".message.assistant >> nth=-1"


def text_of(page, selector: str = LAST) -> str:
    return page.locator(f"{selector} >> .text").inner_text()


def said(body: dict) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def wait_for_text(page, text: str) -> None:
    page.locator(f"{LAST} >> .text", has_text=text).wait_for()


def test_it_loads_and_names_the_model(page):
    assert page.title() == "qkv"
    assert "scripted" in page.inner_text("#model") and "32,768" in page.inner_text("#model")
    assert page.locator("#greeting").is_visible()
    assert page.evaluate("document.activeElement.id") == "message"


def test_text_streams_in_and_ends_with_its_figures(page, script, say):
    script.gate, script.thoughts, script.pieces = threading.Semaphore(0), ["Let me ", "see."], ["One ", "two ", "three"]
    say(page, "Count.", wait=False)
    page.locator(".waiting").wait_for()
    script.gate.release(2)
    page.get_by_text("Thinking…").wait_for()
    assert page.locator("details .written").inner_text() == ""  # folded
    script.gate.release(2)
    wait_for_text(page, "One two")
    assert page.locator("#stop").is_visible() and page.locator(f"{LAST} >> .figures").count() == 0
    script.gate.release()
    page.locator(f"{LAST} >> .figures").wait_for()
    assert text_of(page) == "One two three"
    assert page.inner_text(".figures").strip() == "41.5 tokens/s · 3 tokens · prompt 100, 75% cached"
    page.click("summary")
    assert page.locator("details .written").inner_text() == "Let me see."
    assert page.locator("#send").is_visible() and page.inner_text("#status") == "The answer is complete."


def test_an_untouched_panel_sends_no_parameter(page, script, say):
    say(page, "Hi")
    (asked,) = script.asked
    assert asked == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_panel_is_sent_as_numbers_and_kept(page, script, say):
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_tokens": 64, "seed": 9007199254740991}
    page.click("#settings-button")
    for name, value in numbers.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("[name=system]", "Be brief.")
    page.select_option("[name=think]", "off")
    page.reload()
    say(page, "Hi")
    asked = script.asked[0]
    assert {name: asked[name] for name in numbers} == numbers
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert said(asked) == [("system", "Be brief."), ("user", "Hi")]
    page.click("#settings-button")
    page.click("#settings-form [type=reset]")
    say(page, "Again")
    assert not set(numbers) & set(script.asked[1]) and "chat_template_kwargs" not in script.asked[1]


@pytest.mark.parametrize(("name", "value"), [("temperature", "-1"), ("top_p", "1.5"), ("top_k", "0.5"), ("seed", "-3")])
def test_a_wrong_parameter_is_pointed_at_and_nothing_is_sent(page, script, name, value):
    page.click("#settings-button")
    page.fill(f"[name={name}]", value)
    page.click("#settings-button")
    page.fill("#message", "Hi")
    page.press("#message", "Enter")
    assert page.evaluate("document.activeElement.name") == name
    assert page.input_value("#message") == "Hi" and script.asked == []


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_closes_the_connection_and_keeps_the_text(page, script, say, way):
    script.gate, script.pieces = threading.Semaphore(1), ["Kept. ", "Never."]
    say(page, "Go", wait=False)
    wait_for_text(page, "Kept.")
    page.click("#stop") if way == "button" else page.keyboard.press("Escape")
    page.get_by_text("Stopped.", exact=True).first.wait_for()
    assert script.gone.wait(10)
    assert text_of(page) == "Kept."
    script.gate = None
    say(page, "And now?")
    assert said(script.asked[1]) == [("user", "Go"), ("assistant", "Kept. "), ("user", "And now?")]


def test_an_edited_message_replaces_what_followed(page, script, say):
    for text in ("One", "Two", "Three"):
        say(page, text)
    page.locator(".user").nth(1).get_by_text("Edit").click()
    page.fill(".editing textarea", "Two, changed")
    page.click(".editing .main")
    page.locator(f"{ANSWERS}[aria-busy=false]").nth(1).wait_for()
    assert said(script.asked[3]) == [("user", "One"), ("assistant", "Hello there."), ("user", "Two, changed")]
    assert page.locator(".user").count() == page.locator(ANSWERS).count() == 2


def test_an_edit_that_is_given_up_changes_nothing(page, script, say):
    say(page, "One")
    page.get_by_text("Edit").click()
    page.fill(".editing textarea", "Other")
    page.keyboard.press("Escape")
    assert page.inner_text(".user .text") == "One" and len(script.asked) == 1
    assert page.evaluate("document.activeElement.textContent") == "Edit"


def test_regenerate_asks_the_same_again(page, script, say):
    say(page, "One")
    script.pieces = ["Another."]
    page.get_by_text("Regenerate").click()
    wait_for_text(page, "Another.")
    assert script.asked[0] == script.asked[1]
    assert page.locator(ANSWERS).count() == 1


def test_a_cut_answer_says_so(page, script, say):
    script.finish = "length"
    say(page, "One")
    assert "Cut at the limit of tokens." in page.inner_text(LAST)


REFUSALS = {
    400: "The server refused the request (400). temperature: too hot",
    413: "The server refused the request (413). temperature: too hot",
    429: "The server is busy. Try again in 7 s. temperature: too hot",
    500: "The server refused the request (500). temperature: too hot",
    503: "The server is busy. Try again in 7 s. temperature: too hot",
}


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_is_told_in_the_servers_words_and_can_be_tried_again(page, script, say, status):
    script.status, script.message = status, "temperature: too hot"
    say(page, "One")
    assert page.inner_text(f"{LAST} >> [role=alert]") == REFUSALS[status]
    script.status = 200
    page.get_by_text("Regenerate").click()
    wait_for_text(page, "Hello there.")
    assert said(script.asked[1]) == [("user", "One")]


def test_a_failure_within_the_stream_keeps_what_came(page, script, say):
    script.fails_after = 1
    say(page, "One")
    assert text_of(page) == "Hello" and "the model broke" in page.inner_text(f"{LAST} >> [role=alert]")


def test_a_stream_that_ends_early_is_an_error(page, script, say):
    script.cut_after = 1
    say(page, "One")
    assert text_of(page) == "Hello"
    assert page.inner_text(f"{LAST} >> [role=alert]") == "The connection ended before the answer was complete."


def test_a_server_that_is_gone_is_told(page, server, say):
    server.close()
    say(page, "One")
    assert "The server does not answer." in page.inner_text(f"{LAST} >> [role=alert]")


def test_a_key_is_asked_for_and_kept_for_the_tab_only(opened, script, say):
    script.key = "sesame"
    page = opened(model_known=False)
    page.locator("#question").wait_for()
    page.fill("#question input", "wrong")
    page.keyboard.press("Enter")
    page.locator("#question input[type=password]").wait_for()
    page.fill("#question input", "sesame")
    page.keyboard.press("Enter")
    page.locator("#model", has_text="scripted").wait_for()
    say(page, "Hi")
    assert text_of(page) == "Hello there."
    assert "sesame" not in page.evaluate("JSON.stringify({...localStorage})")
    page.reload()
    page.locator("#model", has_text="scripted").wait_for()


def test_two_answers_grow_at_once_each_in_its_conversation(page, script, say):
    script.gate = threading.Semaphore(0)
    script.model_says = lambda body: [f"To {body['messages'][0]['content']}", "."]
    say(page, "first", wait=False)
    page.click("#new-button")
    say(page, "second", wait=False)
    script.gate.release(4)
    wait_for_text(page, "To second.")
    page.locator("#list button", has_text="first").click()
    wait_for_text(page, "To first.")
    assert page.locator(".message").count() == 2


def test_reload_keeps_conversations_also_an_answer_that_was_growing(page, script, say):
    say(page, "One")
    before = page.inner_html("#messages")
    page.click("#new-button")
    script.gate, script.pieces = threading.Semaphore(1), ["Half. ", "Whole."]
    say(page, "Two", wait=False)
    wait_for_text(page, "Half.")
    page.wait_for_timeout(2500)  # it is saved every two seconds
    page.reload()
    wait_for_text(page, "Half.")
    assert "Stopped." in page.inner_text(LAST)
    page.locator("#list button", has_text="One").click()
    assert page.inner_html("#messages") == before


def test_rename_export_and_delete(page, script, say, tmp_path):
    script.thoughts = ["Hm."]
    say(page, "One\nmore 东京")
    assert page.inner_text("#title") == "One"
    page.click("#rename-button")
    page.fill("#question input", "A <b>new</b> name")
    page.keyboard.press("Enter")
    page.locator("#list button", has_text="A <b>new</b> name").wait_for()
    with page.expect_download() as started:
        page.click("#export-button")
    started.value.save_as(tmp_path / "kept.json")
    kept = json.loads(Path(tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert kept["title"] == "A <b>new</b> name"
    user, answer = kept["messages"]
    assert user == {"role": "user", "content": "One\nmore 东京"}
    assert (answer["content"], answer["reasoning"], answer["state"]) == ("Hello there.", "Hm.", "done")
    page.click("#remove-button")
    page.keyboard.press("Escape")
    assert page.locator(".message").count() == 2
    page.click("#remove-button")
    page.click("#question-yes")
    page.locator("#greeting").wait_for()
    page.reload()
    page.locator("#greeting").wait_for()
    assert page.locator("#list button").count() == 0


def test_full_storage_is_told_and_the_chat_goes_on(page, script, server, say):
    devtools = page.context.new_cdp_session(page)
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": server.url, "quotaSize": 1})
    say(page, "One")
    page.locator("#notice", has_text="storage is full").wait_for()
    assert text_of(page) == "Hello there."
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": server.url})
    say(page, "Two")
    page.locator("#notice").wait_for(state="hidden")
    page.reload()
    page.locator(".user .text", has_text="Two").wait_for()


FORBIDDEN = """
for (const name of ["localStorage", "indexedDB"])
  Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError") } });
"""


def test_a_browser_that_forbids_storage_can_chat(opened, say):
    page = opened(before=FORBIDDEN)
    page.locator("#notice", has_text="forbids storage").wait_for()
    say(page, "One")
    assert text_of(page) == "Hello there."
    page.click("#theme-button")
    page.click("#language-button")
    assert page.evaluate("document.documentElement.lang") == "zh"


def test_verify_shows_four_equal_hashes(page, script):
    page.click("#verify-button")
    page.click("#verify-run")
    page.locator("#verify-result", has_text="Equal").wait_for()
    hashes = page.locator("#verify-rows code").all_inner_texts()
    assert len(hashes) == 4 and len(set(hashes)) == 1
    requests = [body for body in script.asked if "sea" in body["messages"][0]["content"]]
    assert len(requests) == 4 and len(script.asked) == 11
    plain = [{name: value for name, value in body.items() if not name.startswith("stream")} for body in requests]
    assert plain[0] == plain[1] == plain[2] == plain[3]
    assert [body.get("stream", False) for body in requests] == [False, False, False, True]


def test_verify_shows_a_difference(page, script):
    script.model_says = lambda body: ["Streamed." if body.get("stream") else "Whole."]
    page.click("#verify-button")
    page.click("#verify-run")
    page.locator("#verify-result", has_text="Different").wait_for()
    assert len(set(page.locator("#verify-rows code").all_inner_texts())) == 2


def test_verify_tells_an_error(page, script):
    script.status, script.message = 400, "no"
    page.click("#verify-button")
    page.click("#verify-run")
    page.locator("#verify-result", has_text="refused the request (400)").wait_for()
    assert page.locator("#verify-run").is_enabled()


@pytest.mark.parametrize("host", ["localhost", "page.test"], ids=["secure", "plain-http"])
def test_code_is_copied_as_it_is(opened, server, script, say, host):
    code = "a = 1\n\n\tb = '<b>'  "
    script.pieces = [f"So:\n\n```python\n{code}\n```\n"]
    page = opened(f"http://page.test:{server.port}" if host == "page.test" else "")
    assert page.evaluate("isSecureContext") == (host == "localhost")
    if host == "localhost":
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "Code?")
    page.click("[data-copy]")
    page.get_by_text("Copied").wait_for()
    page.fill("#message", "")
    page.press("#message", "Control+v")
    assert page.input_value("#message") == code
