"""Where compiled kernels are kept on disk, and what is done so that a stored kernel is never a wrong one.

Numba's own cache notices a change in a function's file, not in the files of what it calls, and a damaged file stops it
for good. Here every version of everything that shapes the machine code has a folder of its own,
`<cache>/kernels/<fingerprint>/`, one file holds one compiled function, and it begins with a checksum: what does not
match is compiled again. Only qkv's kernels use this; Numba's settings for the rest of the process are left alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core.caching import CompileResultCacheImpl, NullCache
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from qkv import settings

KEPT_VERSIONS = 8
"""How many folders of other versions stay on disk; the oldest beyond that are removed."""

_DIGEST = hashlib.sha256().digest_size
_PACKAGE = Path(__file__).resolve().parent.parent
_IRRELEVANT = {"NUMBA_CACHE_DIR", "NUMBA_DEBUG_CACHE", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER"}

on_compiled: list[Callable[[str], None]] = []
"""Called with a kernel's name whenever one was compiled (not when it came from the disk)."""


def tell_compiled(name: str) -> None:
    """Say that the kernel `name` was compiled."""
    for tell in on_compiled:
        tell(name)


@functools.cache
def host_cpu() -> tuple[str, str]:
    """The name and the features of the CPU that kernels are compiled for, as LLVM writes them."""
    chosen: Any = numba.config
    name = chosen.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    if chosen.CPU_FEATURES is not None:
        return name, chosen.CPU_FEATURES
    return name, llvmlite.binding.get_host_cpu_features().flatten()


@functools.cache
def fingerprint() -> str:
    """Names everything that compiled kernels depend on: their sources, SIMD mode, CPU, Python, Numba and LLVM."""
    parts = [*host_cpu(), sys.platform, sys.implementation.cache_tag or sys.version, numba.__version__]
    parts += [llvmlite.__version__, os.environ.get("QKV_SIMD", ""), os.environ.get("QKV_PLAIN_NUMBA", "")]
    parts += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_") and k not in _IRRELEVANT]
    digest = hashlib.sha256("\0".join(parts).encode())
    rooms = [path for room in ("runtime", "kernels") for path in sorted((_PACKAGE / room).rglob("*.py"))]
    for path in [*rooms, _PACKAGE / "model" / "forward.py"]:
        digest.update(f"\0{path.name}\0".encode())
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


_used: Path | None = None


def directory() -> Path | None:
    """The writable folder for this version's kernels, created if needed; None if the machine has no place for one."""
    return _used or _find_directory()


def use_directory(path: Path | None) -> None:
    """Keep kernels in `path` from now on, or look for the place again if it is None (tests, the compiling child)."""
    global _used
    _used = path
    _find_directory.cache_clear()


@functools.cache
def _find_directory() -> Path | None:
    chosen = settings.cache_dir() / "kernels" / fingerprint()
    if _is_usable(chosen):
        _prune(chosen)
        return chosen
    user = os.getuid() if hasattr(os, "getuid") else "user"
    fallback = Path(tempfile.gettempdir()) / f"qkv-kernels-{user}"
    if _is_usable(fallback) and _is_usable(fallback / fingerprint()):
        _prune(fallback / fingerprint())
        return fallback / fingerprint()
    try:
        return Path(tempfile.mkdtemp(prefix="qkv-kernels-"))
    except OSError:
        return None


def _is_usable(path: Path) -> bool:
    """Whether `path` could be made, is written to by this user alone (loading a kernel unpickles it), and can be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return False
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
            return False
        os.utime(path)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


def _prune(current: Path) -> None:
    """Remove the folders of other versions beyond the newest `KEPT_VERSIONS`. Losing one costs a compilation."""
    aged = []
    for other in current.parent.iterdir():
        try:
            if other != current and not other.is_symlink() and other.is_dir():
                aged.append((other.stat().st_mtime, other))
        except OSError:
            continue  # another process is pruning too
    for _, other in sorted(aged, reverse=True)[KEPT_VERSIONS:]:
        shutil.rmtree(other, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that nobody ever sees half of it. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class _Format(CompileResultCacheImpl):
    """Numba's way to turn a compiled function into something that can be pickled, without its search for a folder."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._locator = self  # its `_py_file` is named in a warning
        self._py_file = function.__code__.co_filename
        self._lineno = function.__code__.co_firstlineno


class KernelCache(NullCache):
    """The compiled signatures of one kernel on disk. A file that is missing, damaged or unreadable is a miss."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._format: Any = _Format(function)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled function for `signature`, or None."""
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        if path is None:
            return None
        try:
            stored = path.read_bytes()
            checksum, data = stored[:_DIGEST], stored[_DIGEST:]
            if hashlib.sha256(data).digest() != checksum:
                return None
            return self._format.rebuild(target_context, pickle.loads(data))
        except Exception:  # whatever is wrong with the file, the kernel can be compiled again
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store the compiled function; a disk that is full or read-only costs the next start some time."""
        tell_compiled(self._function.__qualname__)
        path = self._path(signature, compiled.codegen)
        if path is None or not self._format.check_cachable(compiled):
            return
        data: bytes = dumps(self._format.reduce(compiled))  # type: ignore[no-untyped-call]
        try:
            write_atomically(path, hashlib.sha256(data).digest() + data)
        except OSError:
            return

    def _stem(self) -> str:
        name = f"{self._function.__module__}.{self._function.__qualname__}"
        return name.replace("<", "").replace(">", "")[-120:]

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        where = directory()
        key = key_of(self._function)
        if where is None or key is None:
            return None
        digest = hashlib.sha256(f"{key}\0{signature}\0{codegen.magic_tuple()}".encode()).hexdigest()[:20]
        return where / f"{self._stem()}-{digest}.nbc"


@functools.cache
def _content(path: str) -> bytes | None:
    """A kernel's own file (one outside qkv is not in the fingerprint); None if there is none."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def key_of(function: Callable[..., Any]) -> str | None:
    """What a kernel is, in words that another process would find too; None if it cannot be stored."""
    content = _content(function.__code__.co_filename)
    if content is None:
        return None
    digest = hashlib.sha256(content)
    digest.update(function.__code__.co_code)
    for cell in function.__closure__ or ():
        described = _describe(cell.cell_contents)
        if described is None:
            return None
        digest.update(described)
    return digest.hexdigest()


def _describe(value: Any) -> bytes | None:
    """A value that a kernel closes over. Numba pickles it, which for a kernel differs in every process."""
    if isinstance(value, Dispatcher):
        inner = key_of(value.py_func)
        return None if inner is None else f"{value.py_func.__module__}.{value.py_func.__qualname__}:{inner}".encode()
    if isinstance(value, (bool, int, float, str, bytes, tuple)):
        return repr(value).encode()
    return bytes(dumps(value))  # type: ignore[no-untyped-call]
