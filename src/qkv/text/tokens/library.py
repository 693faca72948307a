"""The `tokenizers` library's own errors as qkv's. It is written in Rust, whose panics are no `Exception`s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qkv.errors import ModelFileError


@contextmanager
def library_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn anything the library raises into a ModelFileError: `what` (the library's reason); `advice`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(f"{what} ({reason}){advice and '; ' + advice}") from error
