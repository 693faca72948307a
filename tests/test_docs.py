"""What the pages say is there is there: files, quoted lines, tests, links, commands, and the README's example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: letters of any script, digits, "_" and "-"."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.+)$", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert anchor in anchors(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"


def test_the_specification_quotes_lines_that_exist():
    """`file`: `line` (why), `line` (why); …"""
    quoted = 0
    for row in (ROOT / "docs/specification.md").read_text(encoding="utf-8").splitlines():
        if not row.startswith(("| definition", "| compiled")):
            continue
        file = None
        for text in re.findall(r"`([^`]+)`", row):
            if text.startswith("src/"):
                file = ROOT / text
                continue
            assert file is not None
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            assert any(line == text or line.startswith(text + "  #") for line in lines), f"{file.name}: {text}"
            quoted += 1
    assert quoted >= 12


def test_the_names_that_readers_bring_lead_to_names_that_exist():
    """In the table of names, each name in the column "here" stands in the model's source or the attention kernel's."""
    page = (ROOT / "docs/specification.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| (.+) \|$", page[page.index("| elsewhere ") : page.index("## 1.")], re.MULTILINE)[1:]
    files = [*(ROOT / "src/qkv/model").glob("*.py"), ROOT / "src/qkv/kernels/attention.py"]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert len(rows) >= 7
    for text in re.findall(r"`([^`]+)`", " ".join(rows)):
        if text.startswith("src/"):
            assert (ROOT / text).is_file(), text
        else:
            known = text in source or re.search(rf"def {text.split('.')[-1]}\(", source)
            assert known, text


def test_the_specification_names_tests_that_exist():
    page = (ROOT / "docs/specification.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) >= 12
    for file, function in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source, f"{file}::{function}"


def test_every_command_the_readme_names_exists():
    from typer.main import get_command

    from qkv.cli.main import app

    verbs = set(get_command(app).commands)
    for page in PAGES:
        used = re.findall(r"(?:`|\$ |bin/)qkv ([a-z]+)", page.read_text(encoding="utf-8"))
        assert set(used) <= verbs, page.name


def test_the_readme_example_runs_and_says_what_it_says(smollm2, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    found = f"lambda name, **k: __import__('pathlib').Path({str(smollm2)!r})"
    run = f"import qkv.weights.names\nqkv.weights.names.resolve = {found}\n{code}"
    result = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "The capital of France is Paris." in result.stdout
    assert re.search(r"^\d+ tokens/s$", result.stdout, re.MULTILINE)
