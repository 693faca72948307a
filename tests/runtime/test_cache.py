import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numba
import pytest

from qkv.runtime import cache
from qkv.runtime.jit import kernel

HERE = Path(__file__).parent
SOURCE = Path(cache.__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own. The processes of `use` have it too (next to it, if a source changed since)."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    cache.use_directory(None)
    yield tmp_path / "cache" / "kernels" / cache.fingerprint()
    cache.use_directory(None)


def use(**environment):
    """Run the sample kernel in a new process: (result, hits on the disk), which nothing may complain about."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import warm_samples; print(*warm_samples.use())"],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result, hits = done.stdout.split()
    return float(result), int(hits)


def test_the_second_process_compiles_nothing_closures_included(folder):
    assert use() == (36.0, 0)
    (used,) = folder.parent.iterdir()
    stored = {path: path.stat().st_mtime_ns for path in used.iterdir()}
    assert len(stored) == 1
    assert use() == (36.0, 1)
    assert {path: path.stat().st_mtime_ns for path in used.iterdir()} == stored


def test_a_damaged_file_is_compiled_again(folder):
    use()
    damages = {
        "empty": lambda content: b"",
        "truncated": lambda content: content[: len(content) // 2],
        "one bit flipped": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "garbage": lambda content: b"\x80\x05garbage" * 100,
    }
    for name, damage in damages.items():
        stored = {path: path.read_bytes() for path in folder.parent.glob("*/*.nbc")}
        assert len(stored) == 1
        for path, content in stored.items():
            path.write_bytes(damage(content))
        assert use() == (36.0, 0), name
    assert use() == (36.0, 1)


def test_a_folder_in_the_place_of_a_file_is_no_error(folder):
    use()
    for path in folder.parent.glob("*/*.nbc"):
        path.unlink()
        path.mkdir()
    assert use() == (36.0, 0)


def test_a_stored_kernel_that_cannot_be_unpickled_is_compiled_again(folder):
    """The checksum is right and the content is of another time."""
    use()
    for path in folder.parent.glob("*/*.nbc"):
        data = b"cno_such_module\nname\n."
        path.write_bytes(hashlib.sha256(data).digest() + data)
    assert use() == (36.0, 0)
    assert use() == (36.0, 1)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX permissions")
def test_an_unusable_cache_folder_falls_back_to_a_private_temporary_one(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    environment = {"QKV_CACHE": str(tmp_path / "file" / "below"), "TMPDIR": str(tmp_path / "tmp")}
    assert use(**environment) == (36.0, 0)
    (made,) = (tmp_path / "tmp").iterdir()
    assert made.name == f"qkv-kernels-{os.getuid()}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert use(**environment) == (36.0, 1)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX permissions")
@pytest.mark.parametrize("trap", ["open to all", "symbolic link", "file"])
def test_a_temporary_folder_that_others_could_write_to_is_not_used(tmp_path, trap):
    (tmp_path / "file").write_text("")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    taken = temporary / f"qkv-kernels-{os.getuid()}"
    if trap == "open to all":
        taken.mkdir()
        taken.chmod(0o777)
    elif trap == "symbolic link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "elsewhere")
    else:
        taken.write_text("")
    assert use(QKV_CACHE=str(tmp_path / "file" / "below"), TMPDIR=str(temporary)) == (36.0, 0)
    others = [path for path in temporary.iterdir() if path != taken]
    assert len(others) == 1
    assert stat.S_IMODE(others[0].stat().st_mode) == 0o700
    assert len(list(others[0].glob("*.nbc"))) == 1
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX permissions")
def test_a_cache_folder_that_others_may_write_to_is_not_used(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert cache.directory() == tmp_path / f"qkv-kernels-{os.getuid()}" / cache.fingerprint()


def test_old_versions_are_pruned_to_a_bound(folder):
    for age in range(20):
        old = folder.parent / f"version{age}"
        old.mkdir(parents=True)
        (old / "kernel.nbc").write_bytes(b"x")
        os.utime(old, (1e9 - age, 1e9 - age))
    assert cache.directory() == folder
    kept = {path.name for path in folder.parent.iterdir()}
    assert kept == {folder.name} | {f"version{age}" for age in range(cache.KEPT_VERSIONS)}


def fingerprint_in_child(**environment):
    code = "from qkv.runtime import cache; print(cache.fingerprint())"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout


def test_the_fingerprint_changes_with_what_shapes_the_code():
    prints = [
        fingerprint_in_child(),
        fingerprint_in_child(QKV_SIMD="portable"),
        fingerprint_in_child(QKV_SIMD="checked"),
        fingerprint_in_child(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""),
        fingerprint_in_child(NUMBA_OPT="1"),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint_in_child(NUMBA_CACHE_DIR="/somewhere", NUMBA_NUM_THREADS="1") == prints[0]


def test_the_fingerprint_changes_with_the_sources(tmp_path, monkeypatch):
    package = tmp_path / "qkv"
    (package / "kernels").mkdir(parents=True)
    (package / "model").mkdir()
    files = [package / "kernels" / "a.py", package / "kernels" / "b.py", package / "model" / "forward.py"]
    monkeypatch.setattr(cache, "_PACKAGE", package)
    seen = [cache.fingerprint.__wrapped__()]
    for file in files:
        for content in ("one", "two"):
            file.write_text(content)
            seen.append(cache.fingerprint.__wrapped__())
    assert len(set(seen)) == len(seen)
    (package / "model" / "other.py").write_text("irrelevant")
    assert cache.fingerprint.__wrapped__() == seen[-1]


def test_other_peoples_functions_keep_their_own_cache(folder, tmp_path):
    cache.directory()
    assert os.environ.get("NUMBA_CACHE_DIR", "") == numba.config.CACHE_DIR
    assert type(numba.njit(lambda x: x)._cache).__name__ == "NullCache"
    assert "NUMBA_CACHE_DIR" not in os.environ or not os.environ["NUMBA_CACHE_DIR"].startswith(str(tmp_path))


def test_a_kernel_without_a_source_file_works_uncached(folder):
    scope = {}
    exec(compile("def f(x):\n    return x + 1\n", "<no file>", "exec"), scope)
    assert kernel(scope["f"])(1) == 2
    assert list(folder.glob("*.nbc")) == []


def test_closures_over_different_values_are_different_kernels(folder):
    def adder(amount):
        @kernel
        def add(x):
            return x + amount

        return add

    assert [adder(amount)(1) for amount in (1, 2, 1)] == [2, 3, 2]
    assert len(list(folder.glob("*add-*.nbc"))) == 2


def test_kernels_stored_by_two_processes_are_not_taken_for_each_other(folder):
    """Both children count their kernels alike, so Numba alone would give both `long`s one symbol."""
    code = "import sys, warm_samples; print(warm_samples.called(int(sys.argv[1]))(5.0))"
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}"}
    command = [sys.executable, "-c", code]
    alone = [subprocess.check_output([*command, str(k)], env=environment, text=True, timeout=120) for k in (3, 7)]
    assert alone == ["6.0\n", "14.0\n"]
    both = "import warm_samples; print([warm_samples.called(k)(5.0) for k in (3, 7)])"
    loaded = subprocess.check_output([sys.executable, "-c", both], env=environment, text=True, timeout=120)
    assert loaded == "[6.0, 14.0]\n"


def test_a_full_disk_costs_nothing_but_time(folder, monkeypatch):
    def refuse(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_atomically", refuse)

    @kernel
    def twice(x):
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twice(4) == 8


def test_an_unfinished_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.write_atomically(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_everything_imports_without_jit():
    modules = ["aside", "atomics", "cache", "cores", "jit", "spmd", "team", "warmup"]
    code = f"import {', '.join(f'qkv.runtime.{name}' for name in modules)}"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
