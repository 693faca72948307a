"""Safetensors files and folders: equal to the official readers where they are whole, refused by name where not."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from qkv.errors import ModelFileError
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.safetensors import INDEX, open_folder, open_safetensors
from tiny import random_tensors, tiny_config
from tinyfiles import safetensors_bytes, write_hf


def with_header(header: str | bytes, data: bytes = b"") -> bytes:
    header = header.encode() if isinstance(header, str) else header
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def entry(name: str, dtype: str, shape: list[int], offsets: list[int]) -> str:
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}})[1:-1]


def refused(path: Path, content: bytes, because: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=because) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_file_equals_the_official_readers_view(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(random_tensors(tiny_config()), dtype))
    expected = safetensors.numpy.load_file(path)
    ours = open_safetensors(path)
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert ours[name].shape == values.shape
        assert ours[name].dtype == dtype
        assert np.array_equal(ours[name].to_float32(), values.astype(np.float32))
        assert ours[name].rows().tobytes() == values.tobytes()


def test_bfloat16_is_exact(tmp_path):
    path = tmp_path / "model.safetensors"
    stored = np.array([0x3F80, 0xC020, 0x7E96, 0x8000, 0x0001, 0x7F80], "<u2")
    path.write_bytes(with_header("{" + entry("a", "BF16", [6], [0, 12]) + "}", stored.tobytes()))
    values = open_safetensors(path)["a"].to_float32()
    assert values.tolist() == [1.0, -2.5, float(np.uint32(0x7E960000).view(np.float32)), -0.0, 2.0**-133, np.inf]
    assert np.signbit(values[3])


@pytest.mark.oracle
def test_random_bfloat16_equals_torch(tmp_path):
    torch = pytest.importorskip("torch")
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    bits = torch.from_numpy(np.arange(0x7F80, dtype=np.int16).reshape(-1, 16)).view(torch.bfloat16)
    safetensors.torch.save_file({"a": bits}, path)
    assert np.array_equal(open_safetensors(path)["a"].to_float32(), bits.float().numpy())


def test_mixed_types_in_one_file(tmp_path):
    tensors = random_tensors(tiny_config())
    kinds = {name: ("F32", "F16", "BF16")[i % 3] for i, name in enumerate(tensors)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(tensors, kinds))
    ours = open_safetensors(path)
    for name, values in tensors.items():
        assert ours[name].dtype == kinds[name]
        tolerance = {"F32": 0, "F16": 2**-10, "BF16": 2**-7}[kinds[name]]
        assert np.allclose(ours[name].to_float32(), values, rtol=tolerance, atol=1e-7 if tolerance else 0)


def test_every_kind_of_cut_is_refused(tmp_path):
    whole = safetensors_bytes(random_tensors(tiny_config()))
    for size in [1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        refused(tmp_path / "model.safetensors", whole[:size], "ends inside its header|damaged")
    refused(tmp_path / "model.safetensors", b"", "empty")


A, B = entry("a", "F32", [1], [0, 4]), entry("b", "F32", [1], [4, 8])


@pytest.mark.parametrize(
    ("content", "because"),
    [
        (with_header("{" + entry("a", "F32", [1000, 1000], [0, 4]) + "}", bytes(4)), "damaged"),
        (with_header("{" + A + "," + entry("b", "F32", [1], [0, 4]) + "}", bytes(4)), "damaged"),
        (with_header("{" + A + "," + entry("b", "F32", [1], [8, 12]) + "}", bytes(12)), "damaged"),
        (with_header("{" + A + "}", bytes(8)), "damaged"),
        (with_header("{" + entry("a", "F32", [2**62, 4], [0, 4]) + "}", bytes(4)), "damaged"),
        (with_header("{" + entry("a", "F99", [1], [0, 4]) + "}", bytes(4)), "damaged"),
        (with_header("{" + A + "," + A + "}", bytes(4)), "duplicate key 'a'"),
        (with_header("{" + A + "," + B + ',"c":NaN}', bytes(8)), "NaN"),
        (with_header(b'{"\xff":1}'), "not UTF-8"),
        (with_header("[1]"), "JSON object"),
        (with_header("[" * 100_000), "JSON"),
        (with_header('{"a":' * 5000 + "1" + "}" * 5000), "JSON nested deeper"),
        (struct.pack("<Q", 2**63) + b"{}", "ends inside its header"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "ends inside its header"),
    ],
    ids=["shape", "overlap", "hole", "tail", "overflow", "type", "twice",
         "nan", "bytes", "list", "deep", "deeper", "big", "huge"],
)  # fmt: skip
def test_damaged_or_hostile_files_are_refused(tmp_path, content, because):
    refused(tmp_path / "model.safetensors", content, because)


def test_a_header_over_the_limit_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 33 << 20))
        file.truncate(64 << 20)
    with pytest.raises(ModelFileError, match="larger than 32 MiB"):
        open_safetensors(path)


TWO = {"a": np.float32([1, 2]), "b": np.float32([[3], [4]])}


def write_shards(folder: Path, weight_map: dict[str, str]) -> None:
    for i, (name, values) in enumerate(TWO.items(), 1):
        (folder / f"model-{i}-of-2.safetensors").write_bytes(safetensors_bytes({name: values}))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


WHOLE_MAP = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}


def test_shards_are_joined_by_their_index(tmp_path):
    write_shards(tmp_path, WHOLE_MAP)
    tensors = open_folder(tmp_path)
    assert {name: tensor.to_float32().tolist() for name, tensor in tensors.items()} == {"a": [1, 2], "b": [[3], [4]]}


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, WHOLE_MAP)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-2-of-2\.safetensors: missing"):
        open_folder(tmp_path)


def test_the_index_decides_between_two_copies(tmp_path):
    write_shards(tmp_path, WHOLE_MAP)
    other = {"b": TWO["b"], "a": np.float32([9, 9])}
    (tmp_path / "model-2-of-2.safetensors").write_bytes(safetensors_bytes(other))
    assert open_folder(tmp_path)["a"].to_float32().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("weight_map", "because"),
    [
        ({"a": "model-2-of-2.safetensors"}, "has no tensor 'a'"),
        ({"a": "../model.safetensors"}, "not the name of a safetensors file"),
        ({"a": "..\\model.safetensors"}, "not the name of a safetensors file"),
        ({"a": "/etc/passwd"}, "not the name of a safetensors file"),
        ({"a": "a\n.safetensors"}, "not the name of a safetensors file"),
        ({"a": "a" * 300 + ".safetensors"}, "not the name of a safetensors file"),
        ({"a": 5}, "must map tensor names"),
        ("a", "must map tensor names"),
        (None, "must map tensor names"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path, weight_map, because):
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelFileError, match=because):
        open_folder(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path):
    write_shards(tmp_path, WHOLE_MAP)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelFileError, match="several weight files"):
        open_folder(tmp_path)


def test_an_index_that_lists_part_of_a_model_is_refused(tmp_path):
    """The shard has all tensors; the index has lost one layer's."""
    config = tiny_config()
    tensors = random_tensors(config)
    write_hf(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    places = dict.fromkeys(tensors, "model-1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert len(open_checkpoint(tmp_path).tensors) == len(tensors)
    rest = {name: file for name, file in places.items() if ".layers.1." not in name}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": rest}))
    with pytest.raises(ModelFileError, match=r"'model\.layers\.1\.input_layernorm\.weight' and 10 more is missing"):
        open_checkpoint(tmp_path)
