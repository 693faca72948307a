"""The strict GGUF reader: what it reads equals the gguf package's reading; what it should refuse, it refuses."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from qkv.errors import ModelFileError
from qkv.weights.gguf import ITEM_LIMIT, TYPE_IDS, open_gguf
from qkv.weights.tensor import BLOCKS
from tiny import random_tensors, tiny_config
from tinyfiles import write_gguf


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def file_bytes(
    keys: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def refused(tmp_path: Path, content: bytes, because: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert because in message
    assert str(path) in message
    assert "\n" not in message


ONE = [tensor("a", [4])]


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "good.gguf"
    values = np.arange(8, dtype=np.float32)
    keys = [
        key("n", 4, struct.pack("<I", 7)),
        key("yes", 7, b"\1"),
        key("half", 6, struct.pack("<f", 0.5)),
        key("text", 8, text("né")),
        key("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
        key("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        key("flags", 9, struct.pack("<IQ2B", 7, 2, 1, 0)),
    ]
    path.write_bytes(file_bytes(keys, [tensor("a", [4, 2])], values.tobytes()))
    file = open_gguf(path)
    assert file.metadata == {
        "n": 7,
        "yes": True,
        "half": 0.5,
        "text": "né",
        "words": ["a", ""],
        "numbers": [1, -2, 3],
        "flags": [True, False],
    }
    assert file.tensors["a"].shape == (2, 4)
    assert np.array_equal(file.tensors["a"].to_float32(), values.reshape(2, 4))
    assert not file.tensors["a"].rows().flags.writeable


def test_version_2_is_read(tmp_path):
    path = tmp_path / "v2.gguf"
    path.write_bytes(file_bytes([], ONE, bytes(16), version=2))
    assert list(open_gguf(path).tensors) == ["a"]


HOSTILE = [
    (b"", "empty"),
    (b"GG", "not a GGUF file"),
    (b"GGUF", "ends inside its header"),
    (file_bytes(magic=b"GGJT"), "not a GGUF file"),
    (file_bytes(version=1), "version 1"),
    (file_bytes(version=4), "version 4"),
    (file_bytes(version=3 << 24), "big-endian"),
    (file_bytes(counts=(2**63, 0)), "tensors"),
    (file_bytes(counts=(0, 2**64 - 1)), "keys"),
    (file_bytes([], ONE, bytes(16), counts=(65_000, 0)), "name is empty"),
    # G3: dimensions
    (file_bytes([], [text("a") + struct.pack("<I", 1_000_000)]), "1,000,000 dimensions"),
    (file_bytes([], [tensor("a", [])]), "0 dimensions"),
    (file_bytes([], [tensor("a", [4, 1, 1, 1, 1])], bytes(64)), "5 dimensions"),
    (file_bytes([], [tensor("a", [2**42 + 1, 2**22])], bytes(64)), "would end at byte"),
    (file_bytes([], [tensor("a", [2**32, 2**32])], bytes(64)), "would end at byte"),
    # G4: zeros and alignment
    (file_bytes([], [tensor("a", [4, 0])]), "a dimension is 0"),
    (file_bytes([], [tensor("", [4])], bytes(16)), "name is empty"),
    (file_bytes([key("", 4, bytes(4))]), "key is empty"),
    (file_bytes([key("general.alignment", 4, struct.pack("<I", 0))], ONE, bytes(16)), "general.alignment"),
    (file_bytes([key("general.alignment", 4, struct.pack("<I", 24))], ONE, bytes(16)), "general.alignment"),
    (file_bytes([key("general.alignment", 4, struct.pack("<I", 2**30))], ONE, bytes(16)), "general.alignment"),
    (file_bytes([key("general.alignment", 8, text("32"))], ONE, bytes(16)), "general.alignment"),
    # G5: nested arrays
    (file_bytes([key("k", 9, struct.pack("<IQ", 9, 1) * 10_000)]), "arrays of arrays"),
    # G6: unknown types
    (file_bytes([], [tensor("a", [4], 99)], bytes(64)), "type 99"),
    (file_bytes([], [tensor("a", [256], 16)], bytes(128)), "IQ2_XXS (16)"),
    (file_bytes([key("k", 13, bytes(8))]), "unknown metadata type 13"),
    (file_bytes([key("k", 9, struct.pack("<IQ", 13, 1))]), "unknown metadata type 13"),
    # lengths and values
    (file_bytes([text("k") + struct.pack("<IQ", 8, 2**63)]), "ends inside its header"),
    (file_bytes([struct.pack("<Q", 2**64 - 1) + b"k"]), "ends inside its header"),
    (file_bytes([key("k", 9, struct.pack("<IQ", 4, 2**62))]), "ends inside its header"),
    (file_bytes([key("k", 9, struct.pack("<IQ", 8, 2**62))]), "ends inside its header"),
    (file_bytes([key("k", 9, struct.pack("<IQ", 0, ITEM_LIMIT + 1) + bytes(ITEM_LIMIT + 1))]), "array items"),
    (file_bytes([key("k", 7, b"\2")]), "not a bool"),
    (file_bytes([key("k", 9, struct.pack("<IQ", 7, 1) + b"\2")]), "not a bool"),
    (file_bytes([key("k", 8, text(b"\xff\xfe"))]), "not UTF-8"),
    (file_bytes([], [tensor("a" * 65, [4])], bytes(16)), "longer than 64"),
    (file_bytes([key("k", 4, bytes(4))] * 2), "duplicate metadata key 'k'"),
    # tensors
    (file_bytes([], [tensor("a", [4]), tensor("a", [4], offset=32)], bytes(64)), "duplicate tensor 'a'"),
    (file_bytes([], [tensor("a", [16]), tensor("b", [4], offset=32)], bytes(64)), "b: shares bytes with a"),
    (file_bytes([], [tensor("a", [4]), tensor("b", [4])], bytes(64)), "shares bytes"),
    (file_bytes([], [tensor("a", [4], offset=8)], bytes(64)), "not a multiple of 32"),
    (file_bytes([], [tensor("a", [4], offset=2**64 - 32)], bytes(64)), "would end at byte"),
    (file_bytes([], [tensor("a", [33], 2)], bytes(64)), "not a whole number of Q4_0 blocks"),
    (file_bytes([], ONE, bytes(15)), "cut off or damaged"),
    (file_bytes([], [tensor("a\nb\x1b", [4, 0])]), "a\ufffdb\ufffd: a dimension is 0"),
    (file_bytes([key("\n", 99, b"")]), "\ufffd: unknown metadata type 99"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "because"), HOSTILE, ids=[because.replace(" ", "-") for _, because in HOSTILE])
def test_damaged_or_hostile_files_are_refused(tmp_path, content, because):
    refused(tmp_path, content, because)


def test_every_cut_of_a_file_is_refused(tmp_path):
    keys = [key("text", 8, text("né")), key("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))]
    whole = file_bytes(keys, [tensor("a", [4]), tensor("b", [4, 2], offset=32)], bytes(64))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    assert len(open_gguf(path).tensors) == 2
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            open_gguf(path)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ModelFileError, match=path.name):
            open_gguf(path)


def test_the_table_of_types_is_ggufs():
    for type_id, name in TYPE_IDS.items():
        assert gguf.GGMLQuantizationType(type_id).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)] == BLOCKS[name]
    assert set(TYPE_IDS.values()) == set(BLOCKS)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_random_blocks_of_every_type_equal_gguf(tmp_path, kind):
    type_id = next(id_ for id_, name in TYPE_IDS.items() if name == kind)
    size, width = BLOCKS[kind]
    columns, rows = 2 * max(size, 32), 5
    # Random bytes, but no infinities and NaNs in half floats: exponents stay below their maximum.
    data = np.random.default_rng(3).integers(0, 256, (rows, columns // size * width)).astype(np.uint8) & 0x3B
    path = tmp_path / "blocks.gguf"
    path.write_bytes(file_bytes([], [tensor("a", [columns, rows], type_id)], data.tobytes()))
    ours = open_gguf(path).tensors["a"]
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(ours.rows(), data)
    assert ours.to_float32().dtype == np.float32
    assert np.array_equal(ours.to_float32(), theirs)
    assert np.unique(theirs).size > 8


def equals_gguf_reader(path: Path) -> int:
    """Compare every key and tensor with the gguf package's reader; returns how many tensors were compared."""
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert mine.dtype == tensor.tensor_type.name
        assert mine.rows().tobytes() == tensor.data.tobytes()
        assert np.array_equal(mine.to_float32(), gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    return len(theirs.tensors)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_tiny_file_equals_the_gguf_readers_view(tmp_path, kind):
    config = tiny_config()
    path = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), kind)
    assert equals_gguf_reader(path) == len(config.parameter_shapes())


def test_smollm2_equals_the_gguf_readers_view(smollm2):
    assert equals_gguf_reader(smollm2) == 272
