"""The page's files as text: nothing from elsewhere, no way from a string to HTML, every word in both languages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from page_server import FILES as NAMES
from page_server import PAGE

FILES = {name: (PAGE / name).read_text(encoding="utf-8") for name in NAMES}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
WAYS_TO_HTML = [
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "createContextualFragment",
]
WAYS_TO_CODE = ["eval(", "new Function", "setHTMLUnsafe", "srcdoc", "import("]


def words() -> dict[str, list[str]]:
    """The table of i18n.js, which is JSON but for its unquoted names and last commas."""
    table = FILES["i18n.js"].split("export const WORDS = ")[1].split("\n};")[0] + "}"
    quoted = re.sub(r"^  (\w+):", r'  "\1":', table, flags=re.M)
    return json.loads(re.sub(r",(\s*[\]}])", r"\1", quoted))


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(FILES["index.html"])
    return parser.found


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_can_turn_a_string_into_html_or_code(name):
    for way in WAYS_TO_HTML + WAYS_TO_CODE:
        assert way not in SCRIPTS[name]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_fetched_from_elsewhere(name):
    outside = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+", FILES[name]))
    assert outside <= {"http://www.w3.org"}  # the namespace of SVG, which is a name and no address
    assert not re.search(r"url\(|@import", FILES[name])


def test_the_policy_allows_neither_inline_script_nor_inline_style(elements):
    assert not [tag for tag, attributes in elements if tag == "style" or "style" in attributes]
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    (policy,) = [a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'self'" in policy and "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy


def test_every_word_is_there_in_english_and_chinese_and_none_is_left_over(elements):
    table = words()
    marks = [a[m] for _, a in elements for m in ("data-t", "data-label", "data-hint") if m in a]
    code = "".join(text for name, text in SCRIPTS.items() if name != "i18n.js")
    assert set(marks) <= set(table)
    assert set(re.findall(r'\bt\("(\w+)"', code)) <= set(table)
    for name, (english, chinese) in table.items():
        assert name in marks or re.search(rf"\b{name}\b", code), f"{name} is used nowhere"
        assert english and chinese
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", chinese))


def test_no_words_outside_the_table(elements):
    chinese = re.compile(r"[\u4e00-\u9fff]")
    assert not [name for name, text in SCRIPTS.items() if name != "i18n.js" and chinese.search(text)]
    visible = re.sub(
        r"<noscript>.*?</noscript>|<!--.*?-->|<title>.*?</title>|<[^>]+>", "", FILES["index.html"], flags=re.S
    )
    assert visible.split() == ["qkv", "◐"]


def test_every_file_is_used(elements):
    named = {a.get("href") or a.get("src") for tag, a in elements if tag in ("link", "script")}
    named |= {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert named | {"index.html"} == set(FILES)


def test_scripts_find_every_element_they_ask_for(elements):
    ids = [a["id"] for _, a in elements if "id" in a]
    assert len(ids) == len(set(ids))
    code = "".join(SCRIPTS.values())
    asked = set(re.findall(r'(?:\$|onClick)\("([\w-]+)"', code))
    assert len(asked) > 20
    assert asked <= set(ids)


def test_no_line_is_too_long_to_read():
    code = {name: text for name, text in FILES.items() if name.endswith((".js", ".css"))}
    assert not [(name, line) for name, text in code.items() for line in text.split("\n") if len(line) > 120]
