"""For mkdocs: pages link to source files outside docs/; the site gets a page for each of them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(((?:\.\./)+(?:src|tests|benchmarks|examples)/[\w/.-]+\.py)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for every source file that a page links to."""
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= {_target(file.src_uri, link) for link in LINK.findall(file.content_string)}
    for path in sorted(linked):
        source = (ROOT / path).read_text(encoding="utf-8")
        page = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````python\n{source}````\n"
        files.append(File.generated(config, f"source/{path}.md", content=page))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let the links lead to those pages."""
    here = posixpath.dirname(page.file.src_uri)

    def local(match: re.Match[str]) -> str:
        path = f"source/{_target(page.file.src_uri, match[1])}.md"
        return f"]({posixpath.relpath(path, here or '.')})"

    return LINK.sub(local, markdown)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Name the language of a page in Chinese: browsers choose its characters' shapes, and readers' voices, by it."""
    return output.replace('lang="en"', 'lang="zh-Hans"', 1) if page.file.src_uri.startswith("zh/") else output


def _target(page: str, link: str) -> str:
    """A link on a page of docs/ as a path from the repository's root."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
