"""GGUF models in several files: `name-00001-of-00003.gguf` … Each part is a GGUF file; the first has the metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qkv.errors import ModelFileError
from qkv.weights.gguf import GGUFFile, open_gguf
from qkv.weights.tensor import StoredTensor

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
PARTS_LIMIT = 1000


def open_gguf_model(path: Path) -> GGUFFile:
    """Open a file, or the whole set when it is one part of several. Raises `ModelFileError` for an incomplete set."""
    match = PART_NAME.fullmatch(path.name)
    first = open_gguf(path.with_name(part_name(match[1], 1, int(match[3])))) if match else open_gguf(path)
    count = first.metadata.get("split.count", 0)
    if count in (0, 1):
        return first if first.path == path else open_gguf(path)
    if not isinstance(count, int) or not 1 < count <= PARTS_LIMIT:
        raise ModelFileError(f"{first.path}: split.count must be a whole number up to {PARTS_LIMIT:,}")
    if match is None or int(match[3]) != count:
        raise ModelFileError(
            f"{path}: one of {count} parts, which are found by their names: it must be called "
            f"{part_name('name', 1, count)}"
        )
    tensors: dict[str, StoredTensor] = {}
    for number in range(1, count + 1):
        part_path = path.with_name(part_name(match[1], number, count))
        if not part_path.exists():
            raise ModelFileError(f"{part_path}: missing; the model is in {count} files, fetch them all")
        part = first if number == 1 else open_gguf(part_path)
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != number - 1:
            raise ModelFileError(f"{part.path}: is not part {number} of {count}, as its name says; fetch it again")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{part.path}: {name} is also in an earlier part")
            tensors[name] = tensor
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelFileError(f"{first.path}: the {count} parts hold {len(tensors):,} tensors, not {total!r}")
    return GGUFFile(first.path, first.metadata, tensors)


def all_parts(path: Path) -> list[Path]:
    """The files of the set that this one is part of by its name, itself included; only itself if it is no part."""
    match = PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= PARTS_LIMIT:
        return [path]
    count = int(match[3])
    return [path.with_name(part_name(match[1], number, count)) for number in range(1, count + 1)]


def first_part(files: Sequence[Path]) -> Path | None:
    """The first file of a set, if these are files of one set, complete or not; else None."""
    parts = all_parts(files[0])
    return parts[0] if len(parts) > 1 and set(files) <= set(parts) else None


def part_name(name: str, number: int, count: int) -> str:
    return f"{name}-{number:05d}-of-{count:05d}.gguf"
