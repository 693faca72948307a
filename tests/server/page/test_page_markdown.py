"""Model output as text on the page: right where it is harmless, harmless where it is not, quick where it is long."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

WHOLE = """async (text) => {
  const { LiveMarkdown } = await import("/live.js");
  const root = document.createElement("div");
  const live = new LiveMarkdown(root);
  live.push(text);
  live.flush();
  return root.innerHTML;
}"""
CHUNKED = """async ([text, cuts]) => {
  const { LiveMarkdown } = await import("/live.js");
  const root = document.createElement("div");
  const live = new LiveMarkdown(root);
  for (let i = 0; i + 1 < cuts.length; i++) {
    live.push(text.slice(cuts[i], cuts[i + 1]));
    live.flush();
  }
  return root.innerHTML;
}"""

# What models write, in the parts that have one meaning in CommonMark and GFM.
ORDINARY = {
    "paragraphs": "One line\nand its second.\n\nAnother paragraph.",
    "emphasis": "A *b* **c** ***d*** _e_ __f__ ~~g~~ **bold *both* bold** snake_case_name 2 * 3 * 4 *a*b",
    "unclosed": "A **b and *c and `d and ~~e",
    "code": "Use `a_b*c*`, ``two ` ticks`` and ` padded `.",
    "escapes": r"\*not em\* \_no\_ \`no\` 1\. \# \\",
    "links": "[a *b* c](https://example.org/x_(y)) and <https://example.org/a_b> or [mail](mailto:a@b.c).",
    "headings": "# One\n## Two ##\ntext\n### Three\n\n#### Four\n#no heading",
    "rules": "a\n\n---\n\n***\n\nb",
    "fences": "```python title\na = 1\n\n  b\n```\n\n~~~\n```\n~~~\nend",
    "unclosed fence": "```\na\n\n# b",
    "fence in item": "1. Step:\n   ```sh\n   ls -l\n     two\n   ```\n2. Next",
    "bullets": "- a\n- b\n  - c\n    - d\n  - e\n- f",
    "numbers": "3. a\n4. b\n   1. c\n5. d",
    "kinds of lists": "- a\n- b\n\n1. c\n2. d",
    "item of several lines": "- a\n  more\n- b\nlazy",
    "quote": "> a *b*\n> c\n>\n> - d\n> - e\n\nf",
    "nested quote": "> > a\n> b",
    "table": "| a | b | c |\n|:--|:-:|--:|\n| 1 | `x\\|y` | **3** |\n| 4 | 5 |\n\nafter",
    "table after text": "a | b\n--|--\n1 | 2",
    "html": "<b>a</b> <script>x</script> & <!-- c -->",
    "chinese": "这是**重点**，见[文档](https://example.org/中文)。\n\n- 一\n- 二",
}
KEPT = {"strong", "em", "s", "code", "a", "h1", "h2", "h3", "h4", "hr", "pre", "ul", "ol", "li", "blockquote", "p"}
KEPT |= {"table", "thead", "tbody", "tr", "th", "td"}
OURS = {"del": "s", "h3": "h1", "h4": "h2", "h5": "h3", "h6": "h4"}


class Shape(HTMLParser):
    """A document as its elements and words, without what the two renderers may do each in its own way."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names, self.parts, self.hidden = names, [], 0

    def handle_starttag(self, tag, attributes):
        tag, values = self.names.get(tag, tag), dict(attributes)
        self.hidden += tag == "figcaption"
        side = values.get("class") if tag in ("td", "th") else None
        side = side or {"text-align:center": "middle", "text-align:right": "end"}.get(values.get("style"))
        if tag in KEPT:
            self.parts.append((tag, values.get("href"), values.get("start"), side))

    def handle_endtag(self, tag):
        self.hidden -= tag == "figcaption"
        tag = self.names.get(tag, tag)
        if tag in KEPT and tag != "hr":
            self.parts.append(f"/{tag}")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)


def shape(html: str, names: dict[str, str]) -> list:
    parser = Shape(names)
    parser.feed(html)
    tidy: list = []
    for part in parser.parts:
        if (
            isinstance(part, str)
            and not part.startswith("/")
            and tidy
            and isinstance(tidy[-1], str)
            and tidy[-1][0] != "/"
        ):
            tidy[-1] += part
        else:
            tidy.append(part)
    words = [re.sub(r"\s+", " ", part).strip() if isinstance(part, str) else part for part in tidy]
    tight = [part for part in words if part not in ("", "/p") and not (isinstance(part, tuple) and part[0] == "p")]
    return tight


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_markdown_is_read_as_markdown_it_reads_it(page, name):
    from markdown_it import MarkdownIt

    oracle = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    ours = page.evaluate(WHOLE, ORDINARY[name])
    assert shape(ours, OURS) == shape(oracle.render(ORDINARY[name]), {})


FRAGMENTS = [
    "a",
    "b c",
    " ",
    "  ",
    "\n",
    "\n",
    "\n\n",
    "*",
    "**",
    "_",
    "`",
    "```",
    "```py\n",
    "- ",
    "1. ",
    "2) ",
    "# ",
    "#",
]
FRAGMENTS += [
    "> ",
    ">",
    "|",
    "|-|-|",
    "--",
    "---",
    "~~",
    "[",
    "](",
    "https://x.org",
    ")",
    "\\",
    "\\[",
    "$$",
    "$",
    "<",
    "!",
]
FRAGMENTS += ["[x] ", "    ", "\t", "东", "😀", "&lt;", "a | b\n--|--\n"]


def test_a_streamed_text_is_the_text_at_once_wherever_it_is_cut(page):
    chance = random.Random(1)
    for _ in range(600):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 40)))
        size = len(text.encode("utf-16-le")) // 2
        inner = sorted(chance.choices(range(size + 1), k=chance.randint(0, 30)))
        cuts = list(range(size + 1)) if chance.random() < 0.3 else [0, *inner, size]
        assert page.evaluate(CHUNKED, [text, cuts]) == page.evaluate(WHOLE, text), repr(text)


def test_no_word_is_ever_lost(page):
    chance = random.Random(2)
    for _ in range(300):
        parts = [[chance.choice(FRAGMENTS[2:]), f" word{i} "] for i in range(chance.randint(1, 15))]
        text = "".join(part for pair in parts for part in pair)
        shown = page.evaluate(WHOLE, text)
        # Of the words after ``` only the first is shown, as the language. A table drops cells beyond its columns.
        if "```" in text or "|" in text:
            continue
        assert re.findall(r"word\d+", re.sub(r'(title|href)="[^"]*"', "", shown)) == re.findall(r"word\d+", text), repr(
            text
        )


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<svg onload=alert(1)><style>*{display:none}</style>",
    "<iframe src='https://evil.example'></iframe><base href='https://evil.example'>",
    "![pixel](https://evil.example/x.png) ![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java\tscript:alert(1)) [d](\x01javascript:alert(1))",
    "[e](data:text/html,<script>alert(1)</script>) [f](vbscript:x) [g](/v1/models) [h](//evil.example) [i](file:///etc)",
    "<javascript:alert(1)> <data:text/html,x> [j](<javascript:alert(1)>) [k](blob:x) [l](https:javascript:alert(1))",
    '[m](https://ok.example"onmouseover="alert(1)) [n](https://ok.example "\\"onclick=alert(1)")',
    "```<img src=x onerror=alert(1)>\n<img src=x onerror=alert(1)>\n```",
    "| <img src=x onerror=alert(1)> |\n|-|\n| <script>alert(1)</script> |",
    "[https://bank.example](https://evil.example) [[x](https://a.example)](https://b.example)",
    "&lt;script&gt;alert(1)&lt;/script&gt; \u202egnp.exe \x00 \ufeff",
    '{"__proto__": {"x": 1}} constructor toString',
]
ALLOWED = {
    "P",
    "STRONG",
    "A",
    "CODE",
    "PRE",
    "FIGURE",
    "FIGCAPTION",
    "SPAN",
    "BUTTON",
    "DIV",
    "TABLE",
    "THEAD",
    "TBODY",
    "TR",
    "TH",
    "TD",
}
ATTRIBUTES = {"href", "title", "target", "rel", "class", "role", "tabindex", "aria-label", "type", "data-copy", "scope"}


@pytest.mark.parametrize("place", ["answer", "thought", "title", "error"])
def test_hostile_output_is_only_text(page, script, say, place):
    """The fixture adds: no request, no dialog, no console error. The policy of the page is only a second wall."""
    for hostile in HOSTILE:
        script.pieces, script.thoughts, script.status = ["fine"], [], 200
        if place == "answer":
            script.pieces = [hostile[:9], hostile[9:]]
        elif place == "thought":
            script.thoughts = [hostile]
        elif place == "error":
            script.status, script.message = 400, hostile
        page.click("#new-button")
        say(page, hostile if place == "title" else "x")
        where = {"answer": ".text", "thought": "details .written", "error": "[role=alert]"}.get(place)
        root = page.locator("#list" if place == "title" else f".message.assistant >> nth=-1 >> {where}").first
        tags = root.evaluate("root => [...root.querySelectorAll('*')].map(e => [e.tagName, e.getAttributeNames()])")
        assert {tag for tag, _ in tags} <= ALLOWED | {"LI"}
        assert {name for _, names in tags for name in names} <= ATTRIBUTES | {"aria-current"}
        for address, rel in root.evaluate("root => [...root.querySelectorAll('a')].map(a => [a.href, a.rel])"):
            assert address.startswith(("https://", "http://", "mailto:")) and "noopener" in rel
        assert root.locator("a a").count() == 0
        if place in ("thought", "error"):
            assert hostile.strip("\x00\ufeff") in root.evaluate("root => root.textContent")


LONG = {
    "words": "word " * 10_000,
    "one unbroken word": "x" * 40_000,
    "paragraphs": "A sentence with **bold** and `code` in it.\n\n" * 900,
    "one list": "- an item with *emphasis*\n" * 1600,
    "code": "```python\n" + "    value = function(value)\n" * 1500,
    "one table": "| a | b |\n|---|---|\n" + "| **1** | `2` |\n" * 2500,
    "nested quotes": ">" * 40_000,
    "nested lists": "".join("  " * i + "- x\n" for i in range(280)),
    "brackets": "[" * 40_000,
    "bracket pairs": "[](" * 13_000,
    "stars": "*a " * 13_000,
    "double stars": "**a" * 13_000,
    "backticks": " ".join("`" * (i % 280 + 1) for i in range(280)),
    "single backticks": "`a" * 20_000,
    "formulas": "\\(" * 20_000,
    "dollars": "$$ " * 13_000,
    "hashes": "# " + "#" * 40_000 + "x",
    "spaces": "# " + " " * 40_000 + "x",
    "pipes": "|" * 20_000 + "\n" + "|-" * 10_000,
    "addresses": "https://a.org/" + ")" * 40_000,
    "dashes": "- " * 20_000 + "x",
}
WATCH = """
window.longest = 0;
new PerformanceObserver((list) => list.getEntries().forEach((one) => (longest = Math.max(longest, one.duration))))
  .observe({ type: "longtask", buffered: true });
"""


@pytest.mark.parametrize("name", LONG)
def test_ten_thousand_tokens_do_not_hang_the_page(opened, script, say, name):
    """Whatever the text is, the page goes on and stays as wide as a phone.

    The limit only tells a page that hangs: a step that were quadratic in the text would take many times as long.
    """
    page = opened(before=WATCH, viewport={"width": 360, "height": 740})
    page.set_default_timeout(60_000)
    text = LONG[name]
    script.pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    say(page, "Go on.")
    assert page.evaluate("longest") < 15_000
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("thread.scrollWidth <= thread.clientWidth")
    assert page.evaluate("thread.scrollTop + thread.clientHeight > thread.scrollHeight - 60")  # the end is in view


def test_finished_blocks_are_never_touched_again(page, script, say):
    """What a reader has selected stays selected while the answer grows below."""
    import threading

    script.gate, script.pieces = threading.Semaphore(2), ["First *paragraph*.\n\n", "Second\n", "more\n\n", "Third"]
    say(page, "Go", wait=False)
    page.locator(".message.assistant p", has_text="Second").wait_for()
    first = page.locator(".message.assistant p").first.element_handle()
    script.gate.release(9)
    page.locator(".message.assistant p", has_text="Third").wait_for()
    assert first.evaluate("node => node.isConnected")


def test_a_reader_who_scrolled_up_is_left_alone(page, script, say):
    import threading

    script.gate, script.pieces = threading.Semaphore(1), ["line\n\n" * 100, "line\n\n" * 100]
    say(page, "Go", wait=False)
    page.locator(".message.assistant p").nth(99).wait_for()
    page.locator("#thread").hover()
    page.mouse.wheel(0, -1500)
    page.wait_for_timeout(300)
    place = page.evaluate("thread.scrollTop")
    script.gate.release(9)
    page.locator(".figures").wait_for(state="attached")
    assert page.evaluate("thread.scrollTop") == place
    assert page.evaluate("thread.scrollHeight - thread.clientHeight") > place + 1500
