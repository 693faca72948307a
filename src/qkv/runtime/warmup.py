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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

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
        if not _run_child(module, spec, where, progress):
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


def _title() -> str:
    return f"compiling kernels for {cache.host_cpu()[0]}, once"


def _compile_here(module: str, spec: Any, progress: Progress) -> None:
    names: list[str] = []

    def tell(name: str) -> None:
        names.append(name)
        progress(_title(), len(names), None, "kernels")

    cache.on_compiled.append(tell)
    try:
        importlib.import_module(module).warm(spec)
    finally:
        cache.on_compiled.remove(tell)
    progress(_title(), len(names), len(names), "kernels")


@contextlib.contextmanager
def _only_process(where: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; where the file system has none, compiling twice is all that can happen."""
    lock = filelock.FileLock(where / "lock")
    try:
        while True:
            try:
                lock.acquire(timeout=0.5)
                break
            except filelock.Timeout:
                progress("waiting for another process that compiles kernels", 0, None, "kernels")
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _run_child(module: str, spec: Any, where: Path, progress: Progress) -> bool:
    """Compile in a child; False if there is no Python to start. Raises QkvError if it started and failed."""
    if not sys.executable or getattr(sys, "frozen", False):
        return False
    home = Path(__file__).resolve().parents[2]
    paths = [str(Path(entry).absolute()) for entry in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), *paths])}
    order = json.dumps({"module": module, "spec": spec, "directory": str(where.absolute())})
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "qkv.runtime.warmup"],
                cwd=home,  # where `-m` looks first: not in whatever folder the user is in
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError:
            return False
        try:
            started = _follow(child, order, progress)
            code = child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        if started and code != 0:
            complaints.seek(0)
            raise QkvError(f"compiling the kernels failed: {_reason(complaints.read(), code)}")
        return started


def _follow(child: subprocess.Popen[str], order: str, progress: Progress) -> bool:
    """Give the child its order and report what it says until it ends; whether it ever spoke."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(order)
    spoke = False
    compiled = 0
    for line in child.stdout:
        if line == "ready\n":
            spoke = True
        else:
            compiled += 1
        progress(_title(), compiled, None, "kernels")
    if spoke:
        progress(_title(), compiled, compiled, "kernels")
    return spoke


def _reason(complaints: str, code: int) -> str:
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    if code < 0:
        return f"the compiling process was stopped by signal {-code} (9 usually means that memory ran out)"
    return lines[-1] if lines else f"the compiling process ended with code {code}"


def _child(order: dict[str, Any], reports: TextIO) -> None:
    def tell(line: str) -> None:
        reports.write(f"{line}\n")
        reports.flush()

    tell("ready")
    cache.use_directory(Path(order["directory"]))
    cache.on_compiled.append(tell)
    importlib.import_module(order["module"]).warm(order["spec"])


def _main() -> None:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints here is no report
    _child(json.load(sys.stdin), reports)


if __name__ == "__main__":
    _main()
