"""A file as bytes that are read when they are looked at, and the few checks that make opening it safe."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qkv.errors import ModelFileError

START = 512
"""Bytes at the beginning of a file that tell a git-lfs pointer, a web page or an archive."""
ARCHIVES = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file read-only. Raises `ModelFileError` for anything else (a pipe would block) and for a file that
    is plainly something else than its name says."""
    with _opened(path) as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _check_kind(path, content[:START])
    return content


def read_limited(path: Path, limit: int) -> bytes:
    """The whole content of a regular file of at most `limit` bytes. Raises `ModelFileError` like `map_file`."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ModelFileError(f"{path}: {size:,} bytes; at most {limit:,} are expected here")
        content = file.read(limit)
    _check_kind(path, content[:START])
    return content


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, if it is a regular one with something in it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty; fetch it again")
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(f"{path}: cannot be read ({reason})") from error


def check_file(path: Path) -> None:
    """Check the beginning of a file that another reader will read whole. Raises `ModelFileError` like `map_file`."""
    with _opened(path) as file:
        start = file.read(START)
    _check_kind(path, start)


def _check_kind(path: Path, start: bytes) -> None:
    """Raise `ModelFileError` if a file that begins so cannot be any file of a model: what it is, and what to do."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        raise ModelFileError(
            f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull` in its folder, or fetch it again"
        )
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise ModelFileError(
            f"{path}: a web page, not the file itself; the download was refused or led elsewhere: "
            "log in or accept the model's terms, then fetch it again"
        )
    for magic, kind in ARCHIVES.items():
        if start.startswith(magic):
            raise ModelFileError(f"{path}: a {kind} archive, not the file itself; unpack it first")


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
