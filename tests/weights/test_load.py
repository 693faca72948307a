"""From files to packed weights: every number where it belongs, in the format asked for, or one clear error."""

from __future__ import annotations

import dataclasses
import threading
from itertools import pairwise

import gguf
import numpy as np
import pytest

from decoders import QuantizedReference, compiled, dequantized, logits_of, mixed_kinds, packed, stored
from ggufblocks import q4_k_bound, random_blocks
from qkv.errors import ModelFileError, ParameterError
from qkv.kernels.formats import unpack
from qkv.kernels.sizes import format_name, packed_bytes
from qkv.model.layers import matrix_names
from qkv.model.reference import Decoder
from qkv.weights import choices, load
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import load_weights
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
    assert weights.formats == {choices.OWN_FORMAT[kind]}
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


# ------------------------------------------------------------------------------------------ Q4_K

BROAD = tiny_config(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=301
)


def q4_k_kinds(name: str) -> str:
    """What llama.cpp's Q4_K_M files look like: Q6_K for the table and some of the v and down projections."""
    return "Q6_K" if "embed" in name or "layers.0.self_attn.v_proj" in name or "layers.1.mlp.down" in name else "Q4_K"


def q4_k_file(path, config=BROAD, kinds=q4_k_kinds, change=None, **options):
    """A GGUF file of random blocks, opened. `change` edits them: {name: (kind, bytes)}."""
    tensors = random_tensors(config)
    shapes = [(name, values.shape) for name, values in tensors.items() if values.ndim == 2]
    blocks = {name: (kinds(name), random_blocks(kinds(name), *shape, seed=i)) for i, (name, shape) in enumerate(shapes)}
    if change is not None:
        change(blocks)
    return open_checkpoint(write_gguf(path, config, tensors, blocks=blocks, **options))


def assert_rounded_scales(values, tensor):
    """Nothing but the rounding of the scales is between these and the file's numbers."""
    error = np.abs(values.astype(np.float64) - tensor.to_float32())
    assert (error <= q4_k_bound(tensor.rows())).all(), tensor.name


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("parts", [0, 5])
def test_q4_k_stays_at_four_bits(tmp_path, architecture, parts):
    """From one file and from a split one; a llama's rows of q and k are stored in another order."""
    config = dataclasses.replace(BROAD, architecture=architecture)
    file = q4_k_file(tmp_path / "model.gguf", config, tensors_per_file=parts)
    weights = load_weights(file.config, file.tensors, threads=2)
    assert weights.formats == {*choices.matrix_formats(file.config, file.tensors, None).values()} == {"int4m", "int8"}
    assert weights.arena.nbytes == choices.packed_size(file.config, file.tensors, None)
    assert weights.notes == ()
    names = dict(zip(matrix_names(config), weights.matrices, strict=True))
    for name, values in unpacked(config, weights).items():
        tensor = file.tensors[name]
        assert (tensor.dtype, format_name(names[name])) in {("Q4_K", "int4m"), ("Q6_K", "int8")}
        if tensor.dtype == "Q4_K":
            assert_rounded_scales(values, tensor)


def float32(file):
    """All numbers of a file, exactly."""
    return {name: tensor.to_float32() for name, tensor in file.tensors.items()}


def assert_computes_its_weights(file, weights):
    """Logits to float32's last bits, against the packed numbers and inputs rounded alike; but for sequences in which
    an input that both round lies within an ulp of a half (see test_compiled.py; a wider model has more of them)."""
    reference = QuantizedReference(file.config, dequantized(file.config, weights, float32(file)))
    decoder = compiled(file.config, weights)
    sequences = np.random.default_rng(3).integers(0, file.config.vocab_size, (40, 3)).tolist()
    differences = [np.abs(logits_of(decoder, ids) - reference(ids)).max() for ids in sequences]
    decoder.close()
    assert np.mean(np.array(differences) < 1e-4) >= 0.6
    assert max(differences) < 0.2


def test_fused_products_mix_q4_k_with_int8(tmp_path):
    """Layer 0 has int4m for q and k, int8 for v. Against the file's own numbers, the rounding of inputs counts most."""
    file = q4_k_file(tmp_path / "model.gguf")
    weights = load_weights(file.config, file.tensors)
    kinds = {name: format_name(matrix) for name, matrix in zip(matrix_names(BROAD), weights.matrices, strict=True)}
    assert [kinds[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"] == ["int4m", "int4m", "int8"]
    assert_computes_its_weights(file, weights)
    ids = np.random.default_rng(1).integers(0, BROAD.vocab_size, 48).tolist()
    expected = Decoder(BROAD, float32(file), np.float64)(ids)
    difference = logits_of(compiled(file.config, weights), ids) - expected
    assert np.abs(difference).max() < 0.6
    assert np.sqrt(np.mean(difference**2) / np.mean(expected**2)) < 0.05


def test_a_model_of_q4_k_alone(tmp_path):
    """Its table too, which a tied model reads row by row and as the head. Rounding the scales changes each
    term of a weight by at most 2^-11 of it, and the logits, behind 15 products, by a few times that (0.0013)."""
    config = dataclasses.replace(BROAD, tie_word_embeddings=True)
    file = q4_k_file(tmp_path / "model.gguf", config, lambda name: "Q4_K")
    weights = load_weights(file.config, file.tensors)
    assert weights.formats == {"int4m"}
    assert weights.bytes_per_token == weights.arena.nbytes
    assert_computes_its_weights(file, weights)
    ids = np.random.default_rng(2).integers(0, BROAD.vocab_size, 48).tolist()
    expected = Decoder(config, float32(file), np.float64)(ids)
    difference = Decoder(config, dequantized(config, weights, float32(file)), np.float64)(ids) - expected
    assert 0 < np.sqrt(np.mean(difference**2) / np.mean(expected**2)) < 2.0**-9


@pytest.mark.parametrize(
    ("wanted", "formats"), [("int8", {"int8"}), ("int4", {"int4", "int4m"}), ("bf16", {"bf16"}), ("f32", {"f32"})]
)
def test_q4_k_in_the_format_asked_for(tmp_path, wanted, formats):
    """As for Q4_1, int4 keeps what has 4 bits already."""
    file = q4_k_file(tmp_path / "model.gguf")
    weights = load_weights(file.config, file.tensors, wanted=wanted)
    assert weights.formats == formats
    for name, values in unpacked(BROAD, weights).items():
        exact = file.tensors[name].to_float32()
        if wanted == "f32":
            np.testing.assert_array_equal(values, exact, err_msg=name)
        elif wanted == "int4" and file.tensors[name].dtype == "Q4_K":
            assert_rounded_scales(values, file.tensors[name])


@pytest.mark.parametrize("wanted", [None, "int4"])
def test_a_scale_beyond_half_precision_makes_the_matrix_int8(tmp_path, wanted):
    large = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"]

    def enlarge(blocks):
        for name in large:
            first = blocks[name][1][-1]  # of the last row
            first[:2] = np.float16([1100]).view(np.uint8)
            first[4:8] = 63

    file = q4_k_file(tmp_path / "model.gguf", change=enlarge)
    calls = []
    weights = load_weights(file.config, file.tensors, wanted=wanted, progress=lambda *call: calls.append(call))
    assert calls[-1][1] == calls[-1][2]
    assert weights.notes == (f"Q4_K scales too large for half precision made these matrices int8: {', '.join(large)}",)
    assert "int8" in weights.formats
    for name, matrix in zip(matrix_names(BROAD), weights.matrices, strict=True):
        if file.tensors[name].dtype == "Q4_K":
            assert format_name(matrix) == ("int8" if name in large else "int4m")
    for name in large:
        exact = file.tensors[name].to_float32()
        step = np.abs(exact.reshape(len(exact), -1, 32)).max(axis=-1) / 127
        error = np.abs(unpacked(BROAD, weights)[name] - exact).reshape(len(exact), -1, 32).max(axis=-1)
        assert (error <= step * 0.57).all(), name


def test_damaged_q4_k_scales_are_reported_by_name(tmp_path):
    name = "model.layers.1.mlp.gate_proj.weight"

    def damage(blocks):
        blocks[name][1][7, 2:4] = np.float16([np.inf]).view(np.uint8)

    file = q4_k_file(tmp_path / "model.gguf", change=damage)
    with pytest.raises(ModelFileError, match=f"^{name}: .*not finite"):
        load_weights(file.config, file.tensors)


@pytest.mark.parametrize("threads", [1, 5])
def test_threads_and_slices_change_no_byte_of_q4_k(tmp_path, threads, monkeypatch):
    file = q4_k_file(tmp_path / "model.gguf", dataclasses.replace(BROAD, architecture="llama"))
    alone = load_weights(file.config, file.tensors)
    monkeypatch.setattr(load, "SLICE", 5000)
    sliced = load_weights(file.config, file.tensors, threads=threads)
    np.testing.assert_array_equal(alone.arena, sliced.arena)


def test_a_model_whose_hidden_size_is_no_multiple_of_256(tmp_path):
    """Like Qwen2.5-0.5B with 896: only down_proj can be Q4_K, its rows being as long as the MLP is wide."""
    config = tiny_config(hidden_size=96, intermediate_size=512, head_dim=16)

    def kinds(name):
        return "Q4_K" if "down_proj" in name else "Q8_0"

    file = q4_k_file(tmp_path / "model.gguf", config, kinds)
    weights = load_weights(file.config, file.tensors)
    for name, matrix in zip(matrix_names(config), weights.matrices, strict=True):
        assert format_name(matrix) == ("int4m" if "down_proj" in name else "int8")
    assert_computes_its_weights(file, weights)


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
