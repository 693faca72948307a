"""Safetensors files and folders of them, as views of the mapped bytes.

The official library validates a file (offsets against shapes, overlaps, holes); this module then reads the header
itself for the offsets, because the library copies every tensor it gives out and NumPy has no bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from qkv.errors import ModelFileError
from qkv.model.keys import short
from qkv.weights.jsonfile import parse_json, read_json
from qkv.weights.mapped import map_file
from qkv.weights.tensor import StoredTensor

HEADER_LIMIT = 32 << 20
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Those of a type other than F32, F16 and BF16 are listed, but cannot be decoded."""
    content = map_file(path)
    header_size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or header_size > len(content) - 8:
        raise ModelFileError(f"{path}: the file ends inside its header ({len(content):,} bytes); fetch it again")
    if header_size > HEADER_LIMIT:
        raise ModelFileError(f"{path}: the header is larger than {HEADER_LIMIT >> 20} MiB")
    header = parse_json(content[8 : 8 + header_size], f"{path}: header")
    _validate(path)
    data = np.frombuffer(content, np.uint8)[8 + header_size :]
    header.pop("__metadata__", None)
    return {name: _view(name, entry, data) for name, entry in header.items()}


def _validate(path: Path) -> None:
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelFileError(f"{path}: damaged ({' '.join(str(error).split())}); fetch it again") from error


def _view(name: str, entry: dict[str, Any], data: np.ndarray[Any, np.dtype[np.uint8]]) -> StoredTensor:
    """A tensor's bytes by rows. The entry has been validated: its offsets fit its shape and lie inside `data`."""
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    first, end = entry["data_offsets"]
    columns = shape[-1] if shape else 1
    row_bytes = columns * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - first
    rows = (end - first) // row_bytes if row_bytes else 0
    return StoredTensor(name, shape, dtype, data[first:end].reshape(rows, row_bytes))


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder: what its index says, else `model.safetensors`, else its one *.safetensors file."""
    if (folder / INDEX).exists():
        return _open_indexed(folder)
    if (folder / SINGLE).exists():
        return open_safetensors(folder / SINGLE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{folder}: no *.safetensors file; a model folder holds config.json and its weights")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ModelFileError(f"{folder}: several weight files ({names}) and no {INDEX} to say what is where")
    return open_safetensors(files[0])


def _open_indexed(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ModelFileError(f"{index}: weight_map must map tensor names to file names")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(places.values())):
        plain = file.endswith(".safetensors") and Path(file).name == file and "\\" not in file and file.isprintable()
        if not plain or len(file) > 200:
            raise ModelFileError(f"{index}: {short(file)} is not the name of a safetensors file in this folder")
        if not (folder / file).is_file():
            raise ModelFileError(f"{folder / file}: missing, but {INDEX} names it; fetch the model again")
        shards[file] = open_safetensors(folder / file)
    for name, file in places.items():
        if name not in shards[file]:
            raise ModelFileError(f"{folder / file}: has no tensor {short(name)}, but {INDEX} says so")
    return {name: shards[file][name] for name, file in places.items()}
