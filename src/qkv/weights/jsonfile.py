"""JSON from files nobody vouches for: bounded in size and depth, no key twice, no NaN, only real text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from qkv.errors import ModelFileError
from qkv.weights.mapped import read_limited

SIZE_LIMIT = 32 << 20  # a tokenizer_config.json or the index of a huge model; both stay far below
DEPTH_LIMIT = 32


def read_json(path: Path, limit: int = SIZE_LIMIT) -> dict[str, Any]:
    """The object in the file. Raises `ModelFileError` for anything that is not one clean JSON object."""
    return parse_json(read_limited(path, limit), str(path))


def parse_json(content: bytes, source: str) -> dict[str, Any]:
    """Like `read_json`, for bytes at hand; `source` names them in messages."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{source}: not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ModelFileError(f"{source}: JSON nested deeper than {DEPTH_LIMIT} levels") from error
    except ValueError as error:
        raise ModelFileError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{source}: a JSON object is expected, not {type(value).__name__}")
    _check(value, source)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    counts = Counter(key for key, _ in pairs)
    raise ValueError(f"duplicate key {counts.most_common(1)[0][0]!r}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: dict[str, Any], source: str) -> None:
    """Refuse deep nesting (later code may recurse) and half surrogate pairs (no encoder takes them)."""
    level: list[Any] = [value]
    for _ in range(DEPTH_LIMIT):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, str) and not _is_text(item):
                raise ModelFileError(f"{source}: a string holds half of a surrogate pair: {item[:40]!r}")
        if not inner:
            return
        level = inner
    raise ModelFileError(f"{source}: JSON nested deeper than {DEPTH_LIMIT} levels")


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
