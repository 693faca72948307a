"""Every family, plain and with scaled RoPE: the reference and the compiled step against transformers, and the same
weights as safetensors and as GGUF against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_reference import hf_model

from decoders import compiled, logits_of
from qkv.errors import ModelFileError
from qkv.model import families
from qkv.model.config import ModelConfig, from_hf
from qkv.model.reference import Decoder
from qkv.model.rope import LinearScaling, Llama3Scaling, YarnScaling, llama3_divisors, rope_frequencies
from qkv.weights.checkpoint import Checkpoint, open_checkpoint
from qkv.weights.load import load_weights
from tiny import random_tensors, tiny_config
from tinyfiles import hf_config, write_gguf, write_hf

LENGTH = 150
"""More than twice the original length of the scaled models below, so that most positions lie beyond it."""

LLAMA = tiny_config(architecture="llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, rope_theta=1e4)
FAMILIES = {  # model type, shape
    "qwen3": ("qwen3", tiny_config()),
    "qwen3-tied": ("qwen3", tiny_config(tie_word_embeddings=True)),
    "qwen2": ("qwen2", tiny_config(architecture="qwen2")),
    "qwen2-tied": ("qwen2", tiny_config(architecture="qwen2", tie_word_embeddings=True, head_dim=16)),
    "llama": ("llama", LLAMA),
    "smollm2": ("llama", replace(LLAMA, head_dim=16, num_key_value_heads=2, tie_word_embeddings=True)),
    "mistral": ("mistral", replace(LLAMA, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALED = {  # model type, shape, the block in config.json
    "llama-linear": ("llama", LLAMA, {"rope_type": "linear", "factor": 4.0}),
    "llama-llama3": ("llama", LLAMA, LLAMA3 | {"original_max_position_embeddings": 64}),
    "qwen3-yarn": ("qwen3", tiny_config(rope_theta=1e4), YARN | {"original_max_position_embeddings": 64}),
    "qwen2-yarn": (
        "qwen2",
        tiny_config(architecture="qwen2", rope_theta=1e4),
        YARN | {"original_max_position_embeddings": 32, "truncate": False, "beta_fast": 16.0, "attention_factor": 1.3},
    ),
    "mistral-yarn": (
        "mistral",
        LLAMA,
        YARN | {"original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.3},
    ),
}


def ids_of(config: ModelConfig, length: int) -> list[int]:
    return np.random.default_rng(1).integers(0, config.vocab_size, length).tolist()


def folder(
    path: Path, family: str, config: ModelConfig, rope: dict[str, Any] | None = None, *, old: bool = False
) -> Path:
    """The model as a Hugging Face folder, with its RoPE in the new form of config.json or in the old."""
    write_hf(path, config, random_tensors(config))
    values = json.loads((path / "config.json").read_text()) | {"model_type": family}
    theta = values.pop("rope_theta")
    block = rope or {"rope_type": "default"}
    if old:
        values |= {
            "rope_theta": theta,
            "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in block.items()},
        }
    else:
        values["rope_parameters"] = {"rope_theta": theta, **block}
    if family == "mistral":
        values["sliding_window"] = None
    (path / "config.json").write_text(json.dumps(values))
    return path


def reference_logits(checkpoint: Checkpoint, ids: list[int], dtype: type = np.float32) -> np.ndarray:
    tensors = {name: tensor.to_float32() for name, tensor in checkpoint.tensors.items()}
    return Decoder(checkpoint.config, tensors, dtype)(ids)


def compiled_logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    """In float32 throughout."""
    decoder = compiled(checkpoint.config, load_weights(checkpoint.config, checkpoint.tensors, wanted="f32"))
    try:
        return logits_of(decoder, ids)
    finally:
        decoder.close()


def transformers_logits(family: str, config: ModelConfig, ids: list[int], rope: dict[str, Any]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.no_grad():
        return hf_model(config, random_tensors(config), family, **rope)(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.oracle
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_transformers(tmp_path, name):
    family, config = FAMILIES[name]
    ids = ids_of(config, 48)
    expected = transformers_logits(family, config, ids, {})
    checkpoint = open_checkpoint(folder(tmp_path, family, config))
    assert checkpoint.config == config
    assert np.abs(reference_logits(checkpoint, ids) - expected).max() < 1e-4
    assert np.abs(compiled_logits(checkpoint, ids) - expected).max() < 1e-4
    assert np.abs(expected).max() > 1  # the bound means something


@pytest.mark.oracle
def test_norm_weights_near_zero_are_taken_as_they_are(tmp_path):
    """Some families store w - 1; none of these does, however small its weights are."""
    torch = pytest.importorskip("torch")
    _, config = FAMILIES["qwen3"]
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight", "input_layernorm.weight")):
            tensors[name] = (tensors[name] - 1) * np.float32(0.1) + np.float32(0.01)
    ids = ids_of(config, 48)
    with torch.no_grad():
        expected = hf_model(config, tensors)(torch.tensor([ids])).logits[0].numpy()
    checkpoint = open_checkpoint(write_hf(tmp_path, config, tensors))
    assert np.abs(reference_logits(checkpoint, ids) - expected).max() < 1e-4
    assert np.abs(compiled_logits(checkpoint, ids) - expected).max() < 1e-4


@pytest.mark.oracle
@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_rope_equals_transformers_beyond_the_original_length(tmp_path, name, old):
    family, config, rope = SCALED[name]
    ids = ids_of(config, LENGTH)
    expected = transformers_logits(family, config, ids, rope)
    checkpoint = open_checkpoint(folder(tmp_path, family, config, rope, old=old))
    assert np.abs(reference_logits(checkpoint, ids) - expected).max() < 1e-4
    assert np.abs(compiled_logits(checkpoint, ids) - expected).max() < 1e-4
    plain = transformers_logits(family, config, ids, {})
    assert np.abs(plain - expected)[LENGTH // 2 :].max() > 0.1  # the scaling matters


def test_compiled_and_reference_agree_on_scaled_rope(tmp_path):
    """The light suite's own check; the tests above need transformers."""
    for name, (family, config, rope) in SCALED.items():
        checkpoint = open_checkpoint(folder(tmp_path / name, family, config, rope))
        ids = ids_of(config, LENGTH)
        exact = reference_logits(checkpoint, ids, np.float64)
        assert np.abs(compiled_logits(checkpoint, ids) - exact).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen2", "llama", "smollm2"])
def test_safetensors_and_gguf_give_the_same_logits(tmp_path, name):
    """To the bit; the llama kind's q and k rows are stored in another order."""
    family, config = FAMILIES[name]
    config = replace(config, rms_norm_eps=2.0**-20)  # GGUF keeps it in float32
    same_logits(
        folder(tmp_path / "hf", family, config), write_gguf(tmp_path / "x.gguf", config, random_tensors(config))
    )


def test_a_new_family_is_one_record(tmp_path, monkeypatch):
    """One that no model has: with norms and biases. Both kinds of files are read, and both decoders agree on it."""
    new = families.Family("newest", "new", qk_norm=True, qkv_bias=True)
    monkeypatch.setitem(families.FAMILIES, "newest", new)
    monkeypatch.setitem(families.ARCHITECTURES, "new", new)
    config = tiny_config(architecture="new", rms_norm_eps=2.0**-20)
    hf = folder(tmp_path / "hf", "newest", config)
    same_logits(hf, write_gguf(tmp_path / "x.gguf", config, random_tensors(config)))
    checkpoint, ids = open_checkpoint(hf), ids_of(config, 48)
    assert checkpoint.config == config
    exact = reference_logits(checkpoint, ids, np.float64)
    assert np.abs(compiled_logits(checkpoint, ids) - exact).max() < 1e-4
    for part in ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"):
        stored = checkpoint.tensors[f"model.layers.0.self_attn.{part}"]
        zeros = {stored.name: replace(stored, data=0 * stored.data)}
        without = replace(checkpoint, tensors=checkpoint.tensors | zeros)
        assert np.abs(reference_logits(without, ids, np.float64) - exact).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama-linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("llama-linear", {"rope.scaling.factor": 4.0}),  # linear is what llama.cpp takes a bare factor for
        ("llama-linear", {"rope.scale_linear": 4.0}),  # the old name
        (
            "qwen3-yarn",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        ),
    ],
)
def test_scaled_safetensors_and_gguf_give_the_same_logits(tmp_path, name, keys):
    family, config, rope = SCALED[name]
    config = replace(config, rms_norm_eps=2.0**-20)
    gguf = write_gguf(tmp_path / "x.gguf", config, random_tensors(config), keys=keys)
    same_logits(folder(tmp_path / "hf", family, config, rope), gguf)


def test_llama3_as_a_rule_and_as_a_gguf_tensor_give_the_same_logits(tmp_path):
    family, config, rope = SCALED["llama-llama3"]
    config = replace(config, rms_norm_eps=2.0**-20)
    # What llama.cpp's conversion writes, here in float64.
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = 64 * frequencies / (2 * np.pi)
    smooth = np.clip((turns - 1) / (4 - 1), 0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert 1 == divisors.min() < divisors.max() == 8
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    mine = llama3_divisors(rope_frequencies(config.head_dim, config.rope_theta), scaling)
    np.testing.assert_allclose(mine, divisors, rtol=1e-6)
    gguf = write_gguf(tmp_path / "x.gguf", config, random_tensors(config), extra={"rope_freqs.weight": mine})
    same_logits(folder(tmp_path / "hf", family, config, rope), gguf)


def same_logits(one: Path, other: Path) -> None:
    first, second = open_checkpoint(one), open_checkpoint(other)
    ids = ids_of(first.config, LENGTH)
    assert np.array_equal(reference_logits(first, ids), reference_logits(second, ids))
    assert np.array_equal(compiled_logits(first, ids), compiled_logits(second, ids))


def test_what_the_files_say_about_scaling(tmp_path):
    """The parsed values, the same for both forms of config.json; the limit is the scaled one."""
    expected = {
        "llama-linear": (LinearScaling(4.0), 4 * 512),
        "llama-llama3": (Llama3Scaling(8.0, 1.0, 4.0, 64), 512),
        "qwen3-yarn": (YarnScaling(4.0, 64, 1 + 0.1 * np.log(4)), 512),
        "qwen2-yarn": (YarnScaling(4.0, 32, 1.3, 16.0, 1.0, False), 512),
    }
    for name, (scaling, positions) in expected.items():
        family, config, rope = SCALED[name]
        for old in (False, True):
            read = open_checkpoint(folder(tmp_path / f"{name}{old}", family, config, rope, old=old)).config
            assert (read.rope_scaling, read.max_position_embeddings) == (scaling, positions)
            assert hash(read) == hash(replace(read))


def read(family: str, **changes: Any) -> ModelConfig:
    values = {**hf_config(FAMILIES[family][1]), "model_type": FAMILIES[family][0], **changes}
    return from_hf({key: value for key, value in values.items() if value != "missing"}, "config.json")


@pytest.mark.parametrize(
    ("family", "changes", "because"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is not supported for model_type 'llama'"),
        ("llama", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("llama", {"sliding_window": 64}, "sliding-window attention (64) is not supported"),
        ("qwen3", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}, "sliding-window attention (64)"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is not supported"),
        ("mistral", {"sliding_window": 4096}, "sliding-window attention (4096)"),
        # transformers' Mistral does not look at layer_types, and takes 4096 where the key is missing.
        ("mistral", {"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, "sliding-window attention (4096)"),
        ("mistral", {"sliding_window": "missing"}, "sliding_window is missing, which means 4096"),
    ],
)
def test_what_a_family_may_have_but_qkv_does_not_is_refused_by_name(family, changes, because):
    with pytest.raises(ModelFileError) as caught:
        read(family, **changes)
    assert because in str(caught.value)


def test_windows_that_are_not_in_use():
    assert read("mistral", sliding_window=None) == FAMILIES["mistral"][1]
    assert read("qwen2", sliding_window=64, use_sliding_window=False) == FAMILIES["qwen2"][1]
    full = {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 64}
    assert read("qwen3", **full) == FAMILIES["qwen3"][1]
