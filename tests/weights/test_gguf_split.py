"""GGUF models in several files, written by the `gguf` package."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest

from qkv.errors import ModelFileError
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.gguf import open_gguf_model
from tiny import random_tensors, tiny_config
from tinyfiles import write_gguf


@pytest.fixture
def parts(tmp_path):
    config = tiny_config(rms_norm_eps=2.0**-20)
    write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), tensors_per_file=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"tiny-{i:05d}-of-00004.gguf" for i in range(1, 5)]
    return files


def test_every_part_leads_to_the_whole_model(parts):
    config, tensors = tiny_config(rms_norm_eps=2.0**-20), random_tensors(tiny_config())
    for path in [*parts, parts[0].parent]:
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == config
        assert checkpoint.path == parts[0]
        assert not any("not used" in note for note in checkpoint.notes)
        for name, tensor in checkpoint.tensors.items():
            assert np.array_equal(tensor.to_float32(), tensors[name])


def test_a_missing_part_is_named(parts):
    parts[2].unlink()
    for path in (parts[0], parts[3], parts[0].parent):
        with pytest.raises(ModelFileError, match=r"tiny-00003-of-00004\.gguf: missing; the model is in 4 files"):
            open_checkpoint(path)
    parts[0].unlink()
    with pytest.raises(ModelFileError, match=r"tiny-00001-of-00004\.gguf"):
        open_checkpoint(parts[1])


def test_a_part_in_the_wrong_place_is_refused(parts):
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelFileError, match="is not part 3 of 4"):
        open_checkpoint(parts[0])


def test_a_part_under_another_name_is_refused(parts):
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ModelFileError, match=r"must be called name-00001-of-00004\.gguf"):
        open_gguf_model(renamed)
    two = parts[1].rename(parts[1].with_name("x-00001-of-00002.gguf"))
    with pytest.raises(ModelFileError, match=r"must be called"):
        open_gguf_model(two)


def test_a_tensor_in_two_parts_or_a_wrong_total_is_refused(tmp_path):
    def part(number: int, names: list[str], total: int) -> None:
        writer = gguf.GGUFWriter(str(tmp_path / f"m-{number:05d}-of-00002.gguf"), "qwen3")
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", total)
        for name in names:
            writer.add_tensor(name, np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    part(1, ["a", "b"], 3)
    part(2, ["c"], 3)
    assert list(open_gguf_model(tmp_path / "m-00002-of-00002.gguf").tensors) == ["a", "b", "c"]
    part(2, ["b"], 3)
    with pytest.raises(ModelFileError, match=r"00002-of-00002\.gguf: b is also in an earlier part"):
        open_gguf_model(tmp_path / "m-00001-of-00002.gguf")
    part(2, ["c", "d"], 3)
    with pytest.raises(ModelFileError, match="the 2 parts hold 4 tensors, not 3"):
        open_gguf_model(tmp_path / "m-00001-of-00002.gguf")


def test_two_sets_in_a_folder_are_not_guessed_between(parts):
    for file in parts:
        shutil.copy(file, file.with_name(file.name.replace("tiny", "other")))
    with pytest.raises(ModelFileError, match="holds several GGUF files"):
        open_checkpoint(parts[0].parent)


def test_a_whole_file_may_have_a_parts_name(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "x-00002-of-00009.gguf", config, random_tensors(config))
    with pytest.raises(ModelFileError, match="x-00001-of-00009"):
        open_checkpoint(path)  # as far as the name says, the rest is elsewhere
