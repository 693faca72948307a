"""A strict reader of GGUF headers: nothing in the file is believed before it is checked against the file's size.

Format (versions 2 and 3, little-endian): magic, version u32, tensor count u64, key count u64; then the keys
(string, type u32, value); then for each tensor name, n_dims u32, dims u64 (fastest first), type u32, offset u64;
then, at the next multiple of `general.alignment` (32 if absent), the data. A string is a u64 length and UTF-8.

A model may be in several files, `name-00001-of-00003.gguf` …: each is a GGUF file, and the first has the metadata.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.errors import ModelFileError
from qkv.weights.mapped import map_file
from qkv.weights.tensor import BLOCKS, StoredTensor

# The largest real headers (a vocabulary of 260,000 and its merges) are near 15 MB and a million array items.
HEADER_LIMIT = 128 << 20
ITEM_LIMIT = 1 << 22
COUNT_LIMIT = 1 << 16
KEY_LIMIT, NAME_LIMIT = 65_535, 64  # bytes; the format's own limits
DIMS_LIMIT = 4
PARTS_LIMIT = 1000
ALIGNMENT_LIMIT = 1 << 20

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
TYPE_IDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16",
}  # fmt: skip

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
BOOL, STRING, ARRAY = 7, 8, 9
U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFFile:
    """A checked GGUF file. Tensor data stays on disk until a tensor is looked at."""

    path: Path
    metadata: dict[str, Any]  # arrays are lists
    tensors: dict[str, StoredTensor]  # by the names in the file


def open_gguf(path: Path) -> GGUFFile:
    """Read and check the header. Raises `ModelFileError`, naming the file and what is wrong."""
    content = map_file(path)
    header = _Header(content, str(path))
    try:
        tensor_count, key_count = header.start()
        metadata = header.metadata(key_count)
        infos = header.tensor_infos(tensor_count)
    except UnicodeDecodeError as error:
        raise header.wrong(f"a string before byte {header.position:,} is not UTF-8") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= ALIGNMENT_LIMIT or alignment & (alignment - 1):
        raise header.wrong(f"general.alignment must be a power of two up to {ALIGNMENT_LIMIT:,}, got {alignment!r}")
    data_start = -(-header.position // alignment) * alignment
    tensors = _place(infos, np.frombuffer(content, np.uint8), data_start, alignment, header)
    return GGUFFile(path, metadata, tensors)


# ------------------------------------------------------------------------------------------ models in several files


def open_gguf_model(path: Path) -> GGUFFile:
    """Open a file, or the whole set when it is one part of several. Raises `ModelFileError` for an incomplete set."""
    parts = all_parts(path)
    first = open_gguf(parts[0])
    count = first.metadata.get("split.count", 0)
    if count in (0, 1):
        return first if parts[0] == path else open_gguf(path)
    if not isinstance(count, int) or not 1 < count <= PARTS_LIMIT:
        raise ModelFileError(f"{first.path}: split.count must be a whole number up to {PARTS_LIMIT:,}")
    if len(parts) != count:
        name = f"name-00001-of-{count:05d}.gguf"
        raise ModelFileError(f"{path}: one of {count} parts, which are found by their names: it must be called {name}")
    tensors: dict[str, StoredTensor] = {}
    for number, part_path in enumerate(parts):
        if not part_path.exists():
            raise ModelFileError(f"{part_path}: missing; the model is in {count} files, fetch them all")
        part = open_gguf(part_path) if number else first
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != number:
            raise ModelFileError(f"{part_path}: is not part {number + 1} of {count}, as its name says; fetch it again")
        if twice := part.tensors.keys() & tensors.keys():
            raise ModelFileError(f"{part_path}: {min(twice)} is also in an earlier part")
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelFileError(f"{first.path}: the {count} parts hold {len(tensors):,} tensors, not {total!r}")
    return GGUFFile(first.path, first.metadata, tensors)


def all_parts(path: Path) -> list[Path]:
    """The files of the set that this one is part of by its name, itself included; only itself if it is no part."""
    match = PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= PARTS_LIMIT:
        return [path]
    return [path.with_name(f"{match[1]}-{n:05d}-of-{match[3]}.gguf") for n in range(1, int(match[3]) + 1)]


# ------------------------------------------------------------------------------------------ the header


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the start of the data

    @property
    def row_bytes(self) -> int:
        size, width = BLOCKS[self.dtype]
        return self.shape[-1] // size * width

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class _Header:
    """Walks through the header; every read is checked against its end."""

    def __init__(self, content: mmap.mmap, source: str) -> None:
        self.content, self.source = content, source
        self.end = min(len(content), HEADER_LIMIT)
        self.position = 0
        self.items = 0  # array items so far

    def wrong(self, what: str) -> ModelFileError:
        """The error, in one line: names come from the file and may hold anything."""
        plain = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in what)
        return ModelFileError(f"{self.source}: {plain[:500]}")

    def cut(self) -> ModelFileError:
        if self.end == HEADER_LIMIT:
            return self.wrong(f"the header is larger than {HEADER_LIMIT >> 20} MiB")
        return self.wrong(f"the file ends inside its header ({self.end:,} bytes); it is cut off or damaged")

    def number(self, kind: str) -> Any:
        size = struct.calcsize(kind)
        if self.end - self.position < size:
            raise self.cut()
        (value,) = struct.unpack_from(kind, self.content, self.position)
        self.position += size
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings; a tight loop, since a vocabulary and its merges are 300,000 of them."""
        content, position, end, length_at = self.content, self.position, self.end, U64.unpack_from
        result: list[str] = []
        for _ in range(count):
            first = position + 8
            if first > end:
                raise self.cut()
            position = first + length_at(content, first - 8)[0]
            if position > end:
                raise self.cut()
            self.position = position
            result.append(str(content[first:position], "utf-8"))
        return result

    def start(self) -> tuple[int, int]:
        """Magic and version; returns the number of tensors and of keys."""
        if self.content[:4] != b"GGUF":
            raise self.wrong("not a GGUF file (it does not begin with 'GGUF')")
        self.position = 4
        version = self.number("<I")
        if version & 0xFFFF == 0 and version:
            raise self.wrong("a big-endian GGUF file; only little-endian files are supported")
        if version not in (2, 3):
            raise self.wrong(f"GGUF version {version} is not supported; known: 2, 3")
        tensors, keys = self.number("<Q"), self.number("<Q")
        for count, what in ((tensors, "tensors"), (keys, "keys")):
            if count > COUNT_LIMIT:
                raise self.wrong(f"the header claims {count:,} {what}; at most {COUNT_LIMIT:,} are accepted")
        return tensors, keys

    def metadata(self, count: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if not key or len(key) > KEY_LIMIT:
                raise self.wrong("a metadata key is empty or longer than the format allows")
            if key in result:
                raise self.wrong(f"duplicate metadata key {key!r}")
            result[key] = self.value(key, self.number("<I"))
        return result

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.wrong(f"{key}: unknown metadata type {kind}")
        value = self.number(SCALARS[kind])
        if kind == BOOL:
            if value > 1:
                raise self.wrong(f"{key}: {value} is not a bool")
            return bool(value)
        return value

    def array(self, key: str) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == ARRAY:
            raise self.wrong(f"{key}: arrays of arrays are not supported")
        if kind != STRING and kind not in SCALARS:
            raise self.wrong(f"{key}: unknown metadata type {kind} in an array")
        size = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
        if count * size > self.end - self.position:
            raise self.cut()
        self.items += count
        if self.items > ITEM_LIMIT:
            raise self.wrong(f"{key}: more than {ITEM_LIMIT:,} array items in the header")
        if kind == STRING:
            return self.strings(count)
        values = np.frombuffer(self.content, SCALARS[kind], count, self.position)
        self.position += count * size
        if kind == BOOL:
            if count and values.max() > 1:
                raise self.wrong(f"{key}: an item is not a bool")
            values = values.astype(np.bool_)
        return values.tolist()

    def tensor_infos(self, count: int) -> list[_Info]:
        result: dict[str, _Info] = {}
        for _ in range(count):
            info = self.tensor_info()
            if info.name in result:
                raise self.wrong(f"duplicate tensor {info.name!r}")
            result[info.name] = info
        return list(result.values())

    def tensor_info(self) -> _Info:
        name = self.string()
        if not name or len(name) > NAME_LIMIT:
            raise self.wrong(f"a tensor's name is empty or longer than {NAME_LIMIT} characters")
        n_dims = self.number("<I")
        if not 1 <= n_dims <= DIMS_LIMIT:
            raise self.wrong(f"{name}: {n_dims:,} dimensions; 1 to {DIMS_LIMIT} are accepted")
        shape = tuple(self.number("<Q") for _ in range(n_dims))[::-1]
        if 0 in shape:
            raise self.wrong(f"{name}: a dimension is 0")
        type_id, offset = self.number("<I"), self.number("<Q")
        if type_id not in TYPE_IDS:
            known = ", ".join(TYPE_IDS.values())
            raise self.wrong(f"{name}: quantization type {_type_name(type_id)} is not supported; known: {known}")
        dtype = TYPE_IDS[type_id]
        if shape[-1] % BLOCKS[dtype][0]:
            raise self.wrong(f"{name}: rows of {shape[-1]:,} are not a whole number of {dtype} blocks")
        return _Info(name, shape, dtype, offset)


def _place(
    infos: list[_Info], content: npt.NDArray[np.uint8], data_start: int, alignment: int, header: _Header
) -> dict[str, StoredTensor]:
    """Check that every tensor lies inside the file, aligned and apart from the others; make views of them."""
    tensors: dict[str, StoredTensor] = {info.name: None for info in infos}  # type: ignore[misc]  # keeps the order
    previous_end, previous = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        size = info.rows * info.row_bytes
        first = data_start + info.offset
        if info.offset % alignment:
            raise header.wrong(f"{info.name}: offset {info.offset:,} is not a multiple of {alignment}")
        if first + size > len(content):
            raise header.wrong(
                f"{info.name}: its data would end at byte {first + size:,} of {len(content):,}; "
                "the file is cut off or damaged, fetch it again"
            )
        if info.offset < previous_end:
            raise header.wrong(f"{info.name}: shares bytes with {previous}")
        previous_end, previous = info.offset + size, info.name
        data = content[first : first + size].reshape(info.rows, info.row_bytes)
        tensors[info.name] = StoredTensor(info.name, info.shape, info.dtype, data)
    return tensors


def _type_name(type_id: int) -> str:
    """The name of a type this reader does not know, where the `gguf` package knows it."""
    import gguf

    try:
        return f"{gguf.GGMLQuantizationType(type_id).name} ({type_id})"
    except ValueError:
        return str(type_id)
