"""The house rules: imports point one way, importing qkv is cheap, the wheel is pure Python."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import qkv

SOURCE = Path(qkv.__file__).parent
ROOT = Path(__file__).resolve().parent.parent

# What each room may import, beside itself and the leaves that everyone may (errors, progress, settings).
LEAVES = {"checks", "errors", "progress", "settings"}
MAY_IMPORT = {
    "runtime": set(),
    "kernels": {"runtime"},
    "model": {"kernels", "runtime"},
    "weights": {"model", "kernels", "runtime"},
    "engine": {"model", "kernels"},
    "text": {"model"},
    "explain": {"measure", "model"},
    "measure": {"engine", "model", "kernels", "runtime"},
    "completion": {"engine", "text", "model"},
    "batch": {"completion", "engine"},
    "opened": {"engine", "text", "weights", "model", "runtime"},
    "look": {"model", "kernels", "runtime"},
    "llm": {"opened", "batch", "completion", "look", "engine", "text", "weights", "model", "kernels", "runtime"},
    "server": {"llm", "engine", "text"},
    "cli": {"server", "llm", "look", "opened", "explain", "measure", "engine", "text", "weights"}
    | {"model", "kernels", "runtime"},
    "__main__": {"cli"},
    # The package's own face: names for type checkers and lazily loaded ones.
    "__init__": {"llm", "engine", "look"},
    **{leaf: set() for leaf in LEAVES},
}


def imports_of(file: Path) -> set[str]:
    """The rooms of qkv that a file imports, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" if node.module == "qkv" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("qkv.")}
    return found - {"__version__"}


def test_imports_point_one_way():
    checked = 0
    for file in SOURCE.rglob("*.py"):
        room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        wrong = imports_of(file) - MAY_IMPORT[room] - LEAVES - {room}
        assert not wrong, f"{file.relative_to(SOURCE)} must not import {sorted(wrong)}"
        checked += 1
    assert checked > 10


def test_importing_qkv_loads_nothing_heavy():
    heavy = {"numpy", "numba", "tokenizers", "jinja2", "typer", "rich"}
    code = f"import sys, qkv; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_what_plans_loads_no_numba():
    """Who runs next, and on which blocks, is logic alone: no kernel, nothing that takes a second to load."""
    for module in ("scheduler", "prefix", "blocks", "request", "session"):
        code = f"import sys, qkv.engine.{module}; print('numba' in sys.modules, 'qkv.model.compiled' in sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.split() == ["False", "False"], module


def test_every_public_name_can_be_imported():
    for name in qkv.__all__:
        assert getattr(qkv, name) is not None


def test_nothing_compiled_is_in_the_package():
    suffixes = {file.suffix for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert suffixes <= {".py", ".typed", ".html", ".css", ".js", ".svg"}  # the last four are the page that is served


def test_no_two_test_files_have_one_name():
    """Else pytest collects only the first of them."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_target_that_is_no_file_is_phony():
    """Else a folder of that name, such as docs/, makes `make` do nothing. And `make help` names each."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split())
    named = set(re.findall(r'@echo "make ([\w-]+) ', makefile))
    assert targets == phony == named | {"help"}


def test_the_size_gate_counts_lines_and_fails_over_its_budget(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("size", ROOT / ".ci" / "size.py")
    size = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(size)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text("a\n\n# b\n")
    (tmp_path / "room" / "two.py").write_text("c\n" * 5)
    (tmp_path / "top.py").write_text("d\n")
    (tmp_path / "not.txt").write_text("e\n")
    monkeypatch.setattr(size, "SOURCE", tmp_path)
    assert size.rooms_of(size.lines_of(tmp_path)) == {"room/": 8, "top files": 1}
    for total, file, complaint in ((9, 5, ""), (8, 5, "1 over its budget"), (9, 4, "room/two.py has 5 lines")):
        monkeypatch.setattr(size, "BUDGET", total)
        monkeypatch.setattr(size, "FILE_BUDGET", file)
        assert size.main() == bool(complaint)
        assert complaint in capsys.readouterr().err
