"""A file as bytes that are read when they are looked at, and the few checks that make opening it safe."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

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
