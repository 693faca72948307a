"""`qkv look` on a tiny model: what it prints and writes, and what it says to bad input."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rich.cells import cell_len

from qkv.cli.main import execute
from qkv.look.report import LABEL
from qkv.look.view import label
from tinyllm import opened, write_model

TEXT = "ab cd\nab 你好 cd"
OPTIONS = ["--weights", "f32", "--context", "256", "--cache", "f32", "-q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_it_draws_the_heads_one_heads_weights_and_the_strongest_links(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert execute(["look", "-m", folder, TEXT, *OPTIONS, "--layer", "1", "--head", "-1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    with opened(folder, cache="f32") as llm:
        look = llm.look(TEXT)
        T = len(look)
        weights = look.pattern(1, 3)
    lines = out.splitlines()
    assert lines[0].split() == ["layer", "0", "1", "2", "3"]
    start = next(i for i, line in enumerate(lines) if line.startswith("Layer 1, head 3"))
    first = next(i for i, line in enumerate(lines) if i > start and line.startswith("a "))
    for i, line in enumerate(lines[first : first + T]):
        shades = np.searchsorted([0.01, 0.05, 0.2, 0.4, 0.7], weights[i], "right")
        assert line[:LABEL].strip() == label(look.tokens[i])
        assert line[LABEL + 1 :: 2] == "".join(" ·░▒▓█"[shade] for shade in shades[: i + 1])
    links = re.findall(r"^  (0\.\d\d)  layer +(\d+), head +(\d+)", out, re.MULTILINE)
    assert len(links) == 10
    assert [float(weight) for weight, _, _ in links] == sorted((float(weight) for weight, _, _ in links), reverse=True)
    best = max((look.pattern(layer, head)[-1, 1:-1].max(), layer, head) for layer in (0, 1) for head in range(4))
    assert links[0] == (f"{best[0]:.2f}", str(best[1]), str(best[2]))
    assert max(map(cell_len, lines)) <= 110


def test_it_writes_files(folder, capsys, tmp_path):
    files = {kind: tmp_path / f"look.{kind}" for kind in ("html", "npz")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert execute(["look", "-m", folder, TEXT, *OPTIONS, "--layer", "0", "--head", "2", *options]) == 0
    assert capsys.readouterr().err == ""
    page = files["html"].read_text(encoding="utf-8")
    assert '"layers":[0,1],"heads":[0,1,2,3]' in page and '"chosen":[0,2]' in page
    with np.load(files["npz"]) as arrays, opened(folder, cache="f32") as llm:
        look = llm.look(TEXT)
        assert np.array_equal(arrays["pattern"], look.pattern(0, 2))
        assert np.array_equal(arrays["ids"], look.ids)
        assert arrays["tokens"].tolist() == look.tokens
        assert np.array_equal(arrays["entropy"], look.statistics.entropy)
        for name in ("q", "k", "v", "z"):
            assert np.array_equal(arrays[name], getattr(look, name)(0, 2))
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_it_draws_a_png(folder, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "look.png"
    assert execute(["look", "-m", folder, TEXT, *OPTIONS, "--layer", "0", "--head", "2", "--png", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_conversation_and_an_answer(folder, capsys, tmp_path):
    path = str(tmp_path / "look.npz")
    assert execute(["look", "-m", folder, "Hello", *OPTIONS, "--chat", "--generate", "5", "--npz", path]) == 0
    with np.load(path) as arrays:
        assert "Hello" in "".join(arrays["tokens"].tolist())
    assert "takes most from" in capsys.readouterr().out


def test_a_single_token_and_a_text_longer_than_the_screen(folder, capsys):
    assert execute(["look", "-m", folder, "a", *OPTIONS]) == 0
    assert execute(["look", "-m", folder, "abc " * 40, *OPTIONS]) == 0
    assert "before these" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "2", "ab"], "--layer must be a whole number from -2 to 1, got 2"),
        (["--head", "9", "ab"], "--head must be a whole number from -4 to 3, got 9"),
        (["--generate", "-1", "ab"], "generate must be a whole number"),
        ([""], "the prompt is empty"),
        (["a" * 300], "prompt has 300 tokens and the context holds 256"),
        (["--npz", "missing/look.npz", "ab"], "missing: no such folder"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert execute(["look", "-m", folder, *OPTIONS, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qkv: ")
    assert message in err
    assert err.count("\n") == 1
