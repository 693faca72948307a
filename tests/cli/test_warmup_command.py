"""`qkv warmup` compiles what a run of the model would, and fetches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.cli.main import execute
from qkv.model import compiled
from tiny import random_tensors, tiny_config
from tinyfiles import write_hf


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []
    monkeypatch.setattr(compiled, "compile_kernels", lambda formats, progress: found.append(sorted(formats)))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    return str(tmp_path)


@pytest.mark.parametrize(("options", "formats"), [([], ["int8"]), (["--weights", "int4"], ["int4"])])
def test_a_model_on_this_machine(folder, compilations, capsys, options, formats):
    assert execute(["warmup", "-m", folder, *options]) == 0
    assert compilations == [formats]
    assert f"({formats[0]})" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "formats"), [([], ["int8"]), (["--weights", "bf16"], ["bf16"])])
def test_a_model_that_is_not_here_is_not_fetched(monkeypatch, compilations, options, formats):
    monkeypatch.setattr("qkv.weights.names.find", lambda name: None)
    assert execute(["warmup", "-m", "Qwen/Qwen3-0.6B", "-q", *options]) == 0
    assert compilations == [formats]


@pytest.mark.parametrize("arguments", [["--weights", "int3"], ["-m", "no-such-model"], ["-m", "nobody/nothing"]])
def test_bad_input_is_one_line(compilations, capsys, arguments):
    assert execute(["warmup", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert compilations == []
