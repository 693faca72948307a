"""Keep the pages of this folder true: source, figure captions and printed output are written into them, never typed.

    python docs/sync.py          write the current source and captions into the pages
    python docs/sync.py --run    also run each page's Python blocks and write what they print (needs SmolLM2)

What a page holds, as plain Markdown that reads well anywhere:

    <!-- include: FILE::NAME -->        the fenced block below is that function (or Class.method) as it is in FILE;
                                        FILE may be a folder, in which the name must be unique
    <!-- include: FILE::NAME ~ TEXT --> only its lines that contain TEXT
    <!-- figure: NAME -->               the image and the caption below come from figures/ (captions.json, figures.json)
    ```python                           runs, in order, in one session for the page
    ```text                             behind a Python block: what that block prints

`tests/test_book.py` fails when a page is not what this script would write.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FIGURES = DOCS / "figures" / "figures.json"
CAPTIONS = DOCS / "figures" / "captions.json"

INCLUDE = re.compile(r"(<!-- include: (?P<what>.+?) -->\n```python\n)(?P<code>.*?)(?P<end>\n?```)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (?P<name>[\w-]+) -->\n)!\[[^\n]*\n\n\*[^\n]*\*\n")
BLOCK = re.compile(
    r"(?P<include><!-- include: [^\n]+ -->\n)?```python\n(?P<code>.*?)```\n(?P<output>\n```text\n(?P<text>.*?)```\n)?",
    re.DOTALL,
)


def pages() -> list[Path]:
    """Every page of the book, all languages."""
    return sorted(page for page in DOCS.rglob("*.md"))


def synced(page: Path, text: str) -> str:
    """The page's text with its includes and captions as they should be now."""
    text = INCLUDE.sub(lambda m: m[1] + included(m["what"]) + "\n```", text)
    return FIGURE.sub(lambda m: m[1] + figure_lines(page, m["name"]), text)


def figure_lines(page: Path, name: str) -> str:
    """The image and its caption with its numbers, in the language of the page's folder."""
    numbers = json.loads(FIGURES.read_text(encoding="utf-8"))[name]["numbers"]
    language = "zh" if page.parent.name == "zh" else "en"
    text = json.loads(CAPTIONS.read_text(encoding="utf-8"))[name][language]
    path = ("../" if language == "zh" else "") + f"figures/{name}.png"
    return f"![{text['alt']}]({path})\n\n*{text['caption'].format(**numbers)}*\n"


def included(what: str) -> str:
    """The source that an include marker names. Raises LookupError if it is not there, or not once."""
    what, _, wanted = what.partition(" ~ ")
    code = definition(what)
    if wanted:
        code = textwrap.dedent("\n".join(line for line in code.splitlines() if wanted in line))
        if not code:
            raise LookupError(f"{what} has no line with {wanted!r}")
    return code


def definition(what: str) -> str:
    """`FILE::NAME` or `FOLDER::NAME` → the source of that function, class or method, with its decorators, dedented."""
    path, _, name = what.partition("::")
    files = sorted((ROOT / path).glob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]
    found = [code for file in files for code in _definitions(file, name.split("."))]
    if len(found) != 1:
        raise LookupError(f"{what}: {len(found)} definitions, expected one")
    return found[0]


def _definitions(file: Path, names: list[str]) -> list[str]:
    source = file.read_text(encoding="utf-8")
    scopes: list[Any] = [ast.parse(source)]
    for name in names:
        kinds = (ast.FunctionDef, ast.ClassDef)
        scopes = [node for scope in scopes for node in scope.body if isinstance(node, kinds) and node.name == name]
    lines = source.splitlines()
    starts = [min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in scopes]
    return [
        textwrap.dedent("\n".join(lines[start - 1 : node.end_lineno]))
        for node, start in zip(scopes, starts, strict=True)
    ]


def needs_model(text: str) -> bool:
    """Whether a block of the page loads SmolLM2."""
    return any('"smollm2"' in block["code"] for block in BLOCK.finditer(text))


def ran(text: str, name: str) -> str:
    """The page's text with the output its blocks print now; a block's failure is raised as it is."""
    session: dict[str, Any] = {"__name__": "__page__"}

    def run(block: re.Match[str]) -> str:
        if block["include"]:
            return block[0]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], f"<{name}>", "exec"), session)
        code = f"```python\n{block['code']}```\n"
        return code + (f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else "")

    return BLOCK.sub(run, text)


def main() -> None:
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = synced(page, old)
        if "--run" in sys.argv[1:]:
            new = ran(new, page.name)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
