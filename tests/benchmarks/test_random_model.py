"""Files of random weights: read by qkv, with types, sizes and spread as they should be (`gguf` decodes them)."""

from __future__ import annotations

import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest

from benchmarks import random_model
from benchmarks.random_model import CONFIG, STD, random_blocks, tensors, type_of, write
from qkv.errors import CacheError, QkvError
from qkv.weights.checkpoint import open_checkpoint
from tiny import tiny_config

SMALL = tiny_config(
    hidden_size=256,
    num_attention_heads=8,
    intermediate_size=512,
    num_hidden_layers=8,
    vocab_size=600,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("kind", random_model.KINDS)
def test_qkv_and_gguf_read_the_file(tmp_path, kind):
    path = tmp_path / "x.gguf"
    write(path, kind, SMALL)
    checkpoint = open_checkpoint(path)
    assert replace(checkpoint.config, rms_norm_eps=SMALL.rms_norm_eps) == SMALL  # the file has it in float32
    assert np.float32(checkpoint.config.rms_norm_eps) == np.float32(SMALL.rms_norm_eps)
    reader = gguf.GGUFReader(path)
    assert [(tensor.name, tuple(reversed(tensor.shape.tolist()))) for tensor in reader.tensors] == list(tensors(SMALL))
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        if values.ndim == 2:
            assert tensor.tensor_type.name == type_of(kind, tensor.name, SMALL.num_hidden_layers)
            assert values.std() == pytest.approx(STD, rel=0.1)
            assert abs(values.mean()) < STD / 5  # the codes of Q4_0 are -8…7
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


def test_the_types_of_q4_k_m_are_llama_cpps():
    more = [layer for layer in range(28) if type_of("Q4_K_M", f"blk.{layer}.attn_v.weight", 28) == "Q6_K"]
    assert more == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    for layer in range(28):
        same = type_of("Q4_K_M", f"blk.{layer}.attn_v.weight", 28)
        assert type_of("Q4_K_M", f"blk.{layer}.ffn_down.weight", 28) == same
        for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
            assert type_of("Q4_K_M", f"blk.{layer}.{name}.weight", 28) == "Q4_K"
    assert type_of("Q4_K_M", "token_embd.weight", 28) == "Q6_K"


def test_the_shape_is_qwen3s():
    shapes = dict(tensors(CONFIG))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == CONFIG.parameter_count
    assert shapes["token_embd.weight"] == (151936, 1024)


def test_the_same_seed_gives_the_same_file(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, "Q8_0", SMALL, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_blocks_of_a_quantizer_have_no_lowest_code():
    blocks = random_blocks("Q8_0", (64, 256), np.random.default_rng(0))
    assert (blocks.reshape(-1, 34)[:, 2:].view(np.int8) > -128).all()


def test_the_cache_is_used_and_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QKV_CACHE", str(tmp_path))
    monkeypatch.setattr(random_model, "CONFIG", SMALL)
    monkeypatch.setattr(sys, "argv", ["random_model", "Q4_0"])
    assert random_model.main() == 0
    made = capsys.readouterr().out
    (path,) = (tmp_path / "bench").iterdir()
    assert str(path) in made
    monkeypatch.setattr(random_model, "write", lambda *_: pytest.fail("it was there"))
    assert random_model.main() == 0
    monkeypatch.undo()
    with pytest.raises(QkvError, match="there is no Q3; choose one of Q4_0, Q8_0, Q4_K_M"):
        write(tmp_path / "y.gguf", "Q3", SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"y.gguf cannot be written"):
        write(tmp_path / "file" / "y.gguf", "Q4_0", SMALL)
