"""A file as bytes that are read when they are looked at, and the few checks that make opening it safe."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.errors import ModelFileError


def map_file(path: Path) -> mmap.mmap:
    """Map a regular, non-empty file read-only. Raises `ModelFileError` for anything else (a pipe would block)."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty; fetch it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def let_go(view: npt.NDArray[Any]) -> None:
    """Give the memory of a mapped file's part back to the system, once it has been read.

    The bytes stay readable and unchanged; a program that reads a model through once holds little of it at a time.
    """
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    content = base.obj if isinstance(base, memoryview) else base
    if not isinstance(content, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED") or not view.flags.c_contiguous:
        return
    first = view.ctypes.data - np.frombuffer(content, np.uint8).ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: others may be using the rest
    end = (first + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        content.madvise(mmap.MADV_DONTNEED, start, end - start)


def read_limited(path: Path, limit: int) -> bytes:
    """The whole content of a regular file of at most `limit` bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size > limit:
            raise ModelFileError(f"{path}: {status.st_size:,} bytes; at most {limit:,} are expected here")
        with path.open("rb") as file:
            return file.read(limit)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ModelFileError:
    """The error for a file the operating system would not give."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ModelFileError(f"{path}: cannot be read ({reason})")
