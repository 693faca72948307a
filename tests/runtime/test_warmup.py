import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkv.errors import QkvError
from qkv.runtime import cache
from qkv.runtime.warmup import compile_in_child

HERE = Path(__file__).parent
SOURCE = Path(cache.__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, here and in child processes."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{os.pathsep}{HERE}")
    cache.use_directory(None)
    yield tmp_path / "cache" / "kernels" / cache.fingerprint()
    cache.use_directory(None)


def python(code):
    """Run `code` in a new process; what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def recorder():
    calls = []

    def progress(what, done, total, unit="bytes"):
        calls.append((what, done, total, unit))

    return calls, progress


def test_the_child_compiles_and_others_load(folder):
    calls, progress = recorder()
    compile_in_child("warm_samples", {"types": ["float64"]}, progress)
    title = f"compiling kernels for {cache.host_cpu()[0]}, once"
    assert calls == [(title, k, None, "kernels") for k in range(4)] + [(title, 3, 3, "kernels")]
    stored = sorted(path.name for path in folder.glob("*.nbc"))
    assert [name.rsplit("-", 1)[0] for name in stored] == ["warm_samples.total"]
    code = "import pathlib, warm_samples; from qkv.runtime import cache; "
    code += f"cache.use_directory(pathlib.Path({str(folder)!r})); print(*warm_samples.use())"
    assert python(code) == "36.0 1\n"
    assert sorted(path.name for path in folder.glob("*.nbc")) == stored


def test_what_was_compiled_is_not_compiled_again(folder):
    spec = {"types": ["float64"], "note": str(folder.parents[2] / "note")}
    for _ in range(3):
        compile_in_child("warm_samples", spec)
    assert len(Path(spec["note"]).read_text().splitlines()) == 1


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:100]), Path.unlink])
def test_what_was_damaged_is_compiled_again_by_a_child(folder, damage):
    spec = {"types": ["float64"], "note": str(folder.parents[2] / "note")}
    compile_in_child("warm_samples", spec)
    (stored,) = folder.glob("*.nbc")
    content = stored.read_bytes()
    damage(stored)
    for _ in range(2):
        compile_in_child("warm_samples", spec)
    assert len(stored.read_bytes()) == len(content)
    assert len(Path(spec["note"]).read_text().splitlines()) == 2


def test_two_processes_compile_once(folder, tmp_path):
    spec = {"types": ["float64"], "note": str(tmp_path / "note"), "sleep": 1}
    code = f"from qkv.runtime.warmup import compile_in_child; compile_in_child('warm_samples', {spec!r})"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert len(Path(spec["note"]).read_text().splitlines()) == 1


def test_a_failing_child_is_one_line(folder):
    with pytest.raises(QkvError, match=r"^compiling the kernels failed: RuntimeError: no such thing$"):
        compile_in_child("warm_samples", {"fail": "no such thing"})
    with pytest.raises(QkvError, match=r"^compiling the kernels failed: the compiling process ended with code 3$"):
        compile_in_child("warm_samples", {"exit": 3})
    compile_in_child("warm_samples", {"types": ["float64"]})
    assert len(list(folder.glob("*.nbc"))) == 1


def test_interrupting_the_parent_ends_the_child(folder, tmp_path):
    note = tmp_path / "note"

    def interrupt(what, done, total, unit="bytes"):
        while not (note.exists() and note.read_text().endswith("\n")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_in_child("warm_samples", {"types": [], "note": str(note), "sleep": 600}, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.parametrize("executable", ["", "/no/such/python", "/bin/false"])
def test_without_a_python_to_start_it_compiles_here(folder, tmp_path, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    calls, progress = recorder()
    note = tmp_path / "note"
    compile_in_child("warm_samples", {"types": [], "note": str(note)}, progress)
    assert note.read_text() == f"{os.getpid()}\n"
    assert calls[-1][1:] == (0, 0, "kernels")


def test_without_a_place_to_keep_anything_it_compiles_here(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: None)
    note = tmp_path / "note"
    compile_in_child("warm_samples", {"types": [], "note": str(note)})
    assert note.read_text() == f"{os.getpid()}\n"
