"""README and the book in both languages: each page has its other page, and only the prose between the parts differs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BOOK = sorted(page for page in DOCS.glob("*.md") if page.name == "index.md" or re.match(r"\d\d-", page.name))
CHINESE = {ROOT / "README.md": ROOT / "README.zh-CN.md"} | {page: DOCS / "zh" / page.name for page in BOOK}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"^!\[.*\]\((.*)\)\n\n\*.*\*$", re.MULTILINE)
COMMENT = re.compile(r" +# .*")


def parts(page: Path, text: str) -> dict[str, list[str]]:
    """What must not depend on the language: all but prose, the words in formulas, and comments behind commands."""
    fences = FENCE.findall(text)
    prose = FIGURE.sub(r"[figure](\1)", FENCE.sub("", text))
    without_links = re.sub(r"\]\(.*?\)", "]", prose)
    return {
        "code": [COMMENT.sub("", body) if kind == "console" else body for kind, body in fences if kind],
        "fences": [kind for kind, _ in fences],
        "includes and figures": re.findall(r"<!-- .*? -->", text),
        "headings": re.findall(r"^#+ ", prose, re.MULTILINE),
        "tables": [str(row.count("|")) for row in re.findall(r"^\|.*\|$", prose, re.MULTILINE)],
        "links": sorted(linked(page, target) for target in re.findall(r"\]\(([^)#]+)", prose)),
        "names": sorted(re.findall(r"`[^`\n]+`", prose)),
        "numbers": sorted(set(re.findall(r"\d[\d,.]+\d", without_links))),
    }


def linked(page: Path, target: str) -> str:
    """The file or page behind a link: a page in Chinese counts as its English one."""
    if "://" in target:
        return target
    path = (page.parent / target).resolve()
    home = {chinese: english for english, chinese in CHINESE.items()}
    return str(home.get(path, path))


def differences(english: Path, text: str) -> list[str]:
    """Which parts of a Chinese page's text are not those of its English page."""
    expected, found = parts(english, english.read_text(encoding="utf-8")), parts(CHINESE[english], text)
    return [name for name in expected if expected[name] != found[name]]


def test_no_page_is_without_its_other_page():
    assert len(BOOK) > 10
    assert {page.name for page in (DOCS / "zh").glob("*.md")} == {page.name for page in BOOK}


@pytest.mark.parametrize("english", CHINESE, ids=lambda page: page.name)
def test_the_chinese_page_has_the_parts_of_the_english_one(english):
    text = CHINESE[english].read_text(encoding="utf-8")
    assert differences(english, text) == []
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 300


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("code", lambda text: text.replace("rng = ", "rng =  ", 1)),
        ("code", lambda text: text.replace("```text\n", "```text\n ", 1)),
        ("fences", lambda text: text.replace(FENCE.search(text)[0], "", 1)),
        ("includes and figures", lambda text: re.sub(r"<!-- include: .* -->\n", "", text, count=1)),
        ("includes and figures", lambda text: text.replace("<!-- figure: cost", "<!-- figure: cache")),
        ("headings", lambda text: text.replace("## ", "### ", 1)),
        ("links", lambda text: text.replace("](10-kv-cache.md)", "](09-sampling.md)")),
        ("names", lambda text: text.replace("`qkv explain mask", "`qkv explain masks")),
        ("numbers", lambda text: text.replace("22,026", "22,062")),
    ],
)
def test_a_page_that_lacks_a_part_is_noticed(part, change):
    english = DOCS / "06-attention.md"
    text = CHINESE[english].read_text(encoding="utf-8")
    assert change(text) != text
    assert part in differences(english, change(text))


def test_a_table_that_lacks_a_row_is_noticed():
    english = DOCS / "index.md"
    text = CHINESE[english].read_text(encoding="utf-8")
    assert differences(english, re.sub(r"^\| 6 .*\n", "", text, flags=re.MULTILINE)) == ["tables", "links"]


@pytest.mark.parametrize("english", CHINESE, ids=lambda page: page.name)
def test_readers_find_the_other_language_at_the_top_and_stay_in_theirs(english):
    chinese = CHINESE[english]
    title, empty, other, *_ = english.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and empty == "" and other == f"[中文]({os.path.relpath(chinese, english.parent)})"
    title, empty, other, *rest = chinese.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and empty == "" and other == f"[English]({os.path.relpath(english, chinese.parent)})"
    targets = re.findall(r"\]\(([^)#]+)", "\n".join(rest))
    assert [target for target in targets if (chinese.parent / target).resolve() in CHINESE] == []


def test_both_captions_of_a_figure_have_the_same_numbers():
    captions = json.loads((DOCS / "figures/captions.json").read_text(encoding="utf-8"))
    for name, languages in captions.items():
        assert set(languages) == {"en", "zh"}, name
        fields = {tuple(sorted(re.findall(r"\{.*?\}", text["caption"]))) for text in languages.values()}
        assert len(fields) == 1, name


def test_the_site_lists_every_page_in_both_languages():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", site, re.MULTILINE)
    for page in BOOK:
        assert listed.count(page.name) == listed.count(f"zh/{page.name}") == 1, page.name
