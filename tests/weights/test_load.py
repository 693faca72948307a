"""From files to packed weights: every number where it belongs, in the format asked for, or one clear error."""

from __future__ import annotations

import threading
from itertools import pairwise

import gguf
import numpy as np
import pytest

from decoders import compiled, dequantized, logits_of, mixed_kinds, packed, stored
from qkv.errors import ModelFileError, ParameterError
from qkv.kernels.formats import format_name, packed_bytes, unpack
from qkv.model.reference import Decoder
from qkv.weights import load
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import load_weights, matrix_names
from tiny import random_tensors, tiny_config
from tinyfiles import STORE, write_gguf, write_hf

CONFIG = tiny_config(hidden_size=64, vocab_size=333)
TENSORS = random_tensors(CONFIG)
ODD = tiny_config(hidden_size=48, intermediate_size=90, head_dim=16, vocab_size=71)


def unpacked(config, weights):
    names = matrix_names(config)
    return {name: unpack(weights.arena, matrix) for name, matrix in zip(names, weights.matrices, strict=True)}


@pytest.mark.parametrize("config", [CONFIG, ODD, tiny_config(tie_word_embeddings=True)], ids=["even", "odd", "tied"])
def test_float32_is_kept_exactly(config):
    tensors = random_tensors(config)
    for name, values in unpacked(config, packed(config, tensors, "f32")).items():
        np.testing.assert_array_equal(values, tensors[name], err_msg=name)


@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_halves_are_widened_exactly(config, dtype):
    tensors = random_tensors(config)
    weights = load_weights(config, stored(tensors, dtype), wanted="f32")
    for name, values in unpacked(config, weights).items():
        half = STORE[dtype](tensors[name])
        wide = half.astype(np.float32) if dtype == "F16" else (half.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(values, wide, err_msg=name)


def test_bfloat16_files_stay_bfloat16():
    weights = load_weights(CONFIG, stored(TENSORS, "BF16"), wanted="bf16")
    for name, values in unpacked(CONFIG, weights).items():
        bits = TENSORS[name].view(np.uint32) & 0xFFFF0000
        np.testing.assert_array_equal(values, bits.view(np.float32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_keep_their_own_values(kind):
    """None keeps what a kernel reads as it is: the values are those of the gguf package, to the bit."""
    files = stored(TENSORS, kind)
    weights = load_weights(CONFIG, files)
    assert weights.formats == {load.OWN_FORMAT[kind]}
    for name, values in unpacked(CONFIG, weights).items():
        expected = gguf.quants.dequantize(files[name].data, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(values, expected, err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_0", "Q5_1"])
def test_other_types_become_int8(kind):
    """Half a step of the group's largest number over 127, and the rounding of the scale to a half."""
    files = stored(TENSORS, kind)
    weights = load_weights(CONFIG, files)
    assert weights.formats == {"int8"}
    for name, values in unpacked(CONFIG, weights).items():
        exact = files[name].to_float32()
        step = np.abs(exact.reshape(len(exact), -1, 32)).max(axis=-1) / 127
        error = np.abs(values - exact).reshape(len(exact), -1, 32).max(axis=-1)
        assert (error <= step * 0.57).all(), name


@pytest.mark.parametrize("wanted", ["f32", "bf16", "int8", "int4"])
def test_the_format_asked_for_is_given(wanted):
    weights = packed(CONFIG, TENSORS, wanted)
    assert weights.formats == {wanted}
    assert {format_name(matrix) for matrix in weights.matrices} == {wanted}
    total = sum(packed_bytes(wanted, *TENSORS[name].shape) for name in set(matrix_names(CONFIG)))
    assert weights.arena.nbytes == total


def test_int4_keeps_what_is_already_four_bits():
    weights = load_weights(CONFIG, stored(TENSORS, mixed_kinds), wanted="int4")
    assert weights.formats == {"int4", "int4m"}


def test_a_mixed_file_keeps_each_matrix_as_it_is():
    weights = packed(CONFIG, TENSORS, "mixed")
    names = dict(zip(matrix_names(CONFIG), weights.matrices, strict=True))
    for name, matrix in names.items():
        assert format_name(matrix) == ("int8" if mixed_kinds(name) == "Q8_0" else "int4m")


def test_matrices_do_not_overlap():
    weights = packed(CONFIG, TENSORS, "mixed")
    spans = []
    for matrix in weights.matrices:
        size = packed_bytes(format_name(matrix), int(matrix["rows"]), int(matrix["columns"]))
        spans.append((int(matrix["quants"]), int(matrix["quants"]) + size))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert (spans[0][0], spans[-1][1]) == (0, weights.arena.nbytes)


def test_a_tied_table_is_there_once():
    config = tiny_config(tie_word_embeddings=True)
    weights = packed(config, random_tensors(config), "int8")
    assert weights.matrices[-1] == weights.matrices[-2]


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_and_slices_change_no_byte(threads, monkeypatch):
    alone = load_weights(CONFIG, stored(TENSORS), wanted="int4")
    monkeypatch.setattr(load, "SLICE", 1000)
    shared = load_weights(CONFIG, stored(TENSORS), wanted="int4", threads=threads)
    np.testing.assert_array_equal(alone.arena, shared.arena)


def test_progress_counts_every_byte_once():
    calls = []
    files = stored(TENSORS)
    load_weights(CONFIG, files, wanted="int8", threads=3, progress=lambda *call: calls.append(call))
    total = sum(files[name].data.nbytes for name in set(matrix_names(CONFIG)))
    assert calls[0][:3] == ("loading", 0, total)
    assert calls[-1][:3] == ("loading", total, total)
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)


@pytest.mark.parametrize("wanted", ["int3", "F32", "", 4, "int4m"])
def test_an_unknown_format_is_named(wanted):
    with pytest.raises(ParameterError, match=r"^weights: unknown format .*f32, bf16, int8, int4"):
        load_weights(CONFIG, stored(TENSORS), wanted=wanted)


@pytest.mark.parametrize("wanted", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_reported_by_name(wanted, value):
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.layers.0.self_attn.k_norm.weight"):
        tensors = {key: values.copy() for key, values in TENSORS.items()}
        tensors[name].reshape(-1)[-1] = value
        with pytest.raises(ModelFileError, match=name):
            load_weights(CONFIG, stored(tensors), wanted=wanted, threads=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("qkv-load")]


def test_damaged_scales_of_gguf_blocks_are_reported_by_name():
    files = stored(TENSORS, "Q8_0")
    name = "model.layers.0.mlp.up_proj.weight"
    files[name].data[3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(ModelFileError, match=name):
        load_weights(CONFIG, files)


# ------------------------------------------------------------------------------------------ from files


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_safetensors_and_gguf_give_the_same_bytes_and_logits(tmp_path, architecture, tied):
    """A GGUF file of a llama has the rows of q and k in another order."""
    config = tiny_config(architecture=architecture, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = open_checkpoint(write_hf(tmp_path / "hf", config, tensors))
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors))
    one, other = (load_weights(ck.config, ck.tensors, wanted="f32") for ck in (folder, file))
    np.testing.assert_array_equal(one.arena, other.arena)
    np.testing.assert_array_equal(one.vectors, other.vectors)
    ids = list(range(5, 45))
    logits = logits_of(compiled(file.config, other), ids)
    assert np.abs(logits - Decoder(config, tensors)(ids)).max() < 1e-4


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_quantized_llama_is_its_own_reference(tmp_path, kind):
    config = tiny_config(architecture="llama")
    tensors = random_tensors(config)
    file = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors, kind))
    weights = load_weights(file.config, file.tensors)
    values = dequantized(file.config, weights, tensors)
    for name, tensor in file.tensors.items():
        np.testing.assert_array_equal(values[name], tensor.to_float32(), err_msg=name)
