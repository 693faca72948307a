"""The first compilation, in a child process: LLVM's memory goes back to the system with it, and the caller can show how
far it is, be interrupted, and then load the machine code from the disk in a moment.

A module that wants its kernels compiled has a function `warm(spec)`, where `spec` is anything JSON can say, and calls
`compile_in_child(__name__, spec, progress)`. In the child `warm` compiles with `kernel.compile(signature)` or
`Program.compile()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numba

from qkv.errors import QkvError
from qkv.progress import Progress, silent
from qkv.runtime import cache


def compile_in_child(module: str, spec: Any, progress: Progress = silent) -> None:
    """Have everything that `module.warm(spec)` compiles on the disk, compiling it in a child process if it is not.

    module: importable name; spec: what JSON can say; progress: told of every compiled function. One process compiles
    and others that want the same wait for it. Where no child can be started, or nothing can be kept on the disk,
    `warm` runs here. Raises QkvError if the child fails.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return
    where = cache.directory()
    if where is None:
        _compile_here(module, spec, progress)
        return
    done = where / f"warm-{hashlib.sha256(json.dumps([module, spec]).encode()).hexdigest()[:20]}"
    if _is_complete(done):
        return
    with _only_process(where, progress):
        if _is_complete(done):
            return
        if not _child_compiles(module, spec, where, progress):
            _compile_here(module, spec, progress)
        with contextlib.suppress(OSError):
            stored = {path.name: path.stat().st_size for path in where.glob("*.nbc")}
            cache.write_atomically(done, json.dumps(stored).encode())


def _is_complete(done: Path) -> bool:
    """Whether `done` was written, and the files that were there then still are, no shorter than they were."""
    try:
        stored = json.loads(done.read_bytes())
        return all((done.parent / name).stat().st_size == size for name, size in stored.items())
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _only_process(where: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; where the file system has none, compiling twice is all that can happen."""
    lock = filelock.FileLock(where / "lock")
    with contextlib.ExitStack() as held:
        while not lock.is_locked:
            try:
                held.enter_context(lock.acquire(timeout=0.5))
            except filelock.Timeout:
                progress("waiting for another process that compiles kernels", 0, None, "kernels")
            except (OSError, NotImplementedError):
                break
        yield


class _Count:
    """Reports how many kernels are compiled so far: called once at the beginning, then with the name of each."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._title = f"compiling kernels for {cache.host_cpu()[0]}, once"
        self.compiled = -1

    def __call__(self, _name: str) -> None:
        self.compiled += 1
        self._progress(self._title, self.compiled, None, "kernels")

    def end(self) -> None:
        self._progress(self._title, self.compiled, self.compiled, "kernels")


def _compile_here(module: str, spec: Any, progress: Progress) -> None:
    count = _Count(progress)
    _compile(module, spec, count)
    count.end()


def _compile(module: str, spec: Any, tell: Callable[[str], None]) -> None:
    tell("ready")
    cache.on_compiled.append(tell)
    try:
        importlib.import_module(module).warm(spec)
    finally:
        cache.on_compiled.remove(tell)


def _child_compiles(module: str, spec: Any, where: Path, progress: Progress) -> bool:
    """Compile in a child; False if there is no Python to start. Raises QkvError if it started and failed."""
    if not sys.executable or getattr(sys, "frozen", False):
        return False
    home = Path(__file__).resolve().parents[2]
    paths = [str(home), *(str(Path(entry).absolute()) for entry in sys.path)]
    count = _Count(progress)
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "qkv.runtime.warmup", json.dumps([module, spec, str(where.absolute())])],
                cwd=home,  # where `-m` looks first: not in whatever folder the user is in
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError:
            return False
        with child:
            try:
                for name in child.stdout or ():
                    count(name)
                child.wait()
            except BaseException:
                child.kill()
                child.wait()
                raise
        if count.compiled < 0:  # it never said that it is ready
            return False
        if child.returncode != 0:
            complaints.seek(0)
            raise QkvError(f"compiling the kernels failed: {_reason(complaints.read(), child.returncode)}")
    count.end()
    return True


def _reason(complaints: str, code: int) -> str:
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    if code < 0:
        return f"the compiling process was stopped by signal {-code} (9 usually means that memory ran out)"
    return lines[-1] if lines else f"the compiling process ended with code {code}"


def _child() -> None:
    """What the child does: a line on its standard output when it is ready, and one for each compiled function."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints here is no report
    module, spec, where = json.loads(sys.argv[1])
    cache.use_directory(Path(where))
    _compile(module, spec, lambda name: print(name, file=reports))


if __name__ == "__main__":
    _child()
