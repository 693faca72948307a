"""One model in several kinds of files gives one checkpoint; what is incomplete or contradictory is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from qkv.errors import ModelFileError
from qkv.model.config import ModelConfig
from qkv.model.rope import Divisors
from qkv.weights.checkpoint import Checkpoint, open_checkpoint
from tiny import random_tensors, tiny_config
from tinyfiles import hf_config, safetensors_bytes, write_gguf, write_hf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FAMILIES = [
    tiny_config(),
    tiny_config(tie_word_embeddings=True),
    tiny_config(architecture="qwen2"),
    tiny_config(architecture="llama"),
]
IDS = ["qwen3", "qwen3-tied", "qwen2", "llama"]


def assert_holds(checkpoint: Checkpoint, config: ModelConfig, tensors: dict[str, np.ndarray]) -> None:
    assert checkpoint.config == config
    assert list(checkpoint.tensors) == list(config.parameter_shapes())
    for name, tensor in checkpoint.tensors.items():
        assert tensor.name == name
        assert tensor.shape == tensors[name].shape
        assert np.array_equal(tensor.to_float32(), tensors[name])


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values.update(changes)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("config", FAMILIES, ids=IDS)
def test_a_folder_holds_the_model(tmp_path, config):
    tensors = random_tensors(config)
    assert_holds(open_checkpoint(write_hf(tmp_path, config, tensors)), config, tensors)


@pytest.mark.parametrize("config", FAMILIES, ids=IDS)
def test_a_gguf_file_holds_the_same_model(tmp_path, config):
    config = replace(config, rms_norm_eps=2.0**-20)  # GGUF keeps it in float32
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, tensors)
    assert_holds(open_checkpoint(path), config, tensors)
    assert_holds(open_checkpoint(tmp_path), config, tensors)  # a folder with one .gguf file


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantized_llama_rows_are_in_hugging_face_order(tmp_path, kind):
    config = tiny_config(architecture="llama")
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, tensors, kind))
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 1:
            continue
        quantized = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType[kind])
        assert tensor.dtype == kind
        assert np.array_equal(tensor.rows(), quantized), name


@pytest.mark.oracle
def test_smollm2_equals_transformers_own_reading(smollm2):
    """All 272 tensors, the q and k rows that llama.cpp reorders among them."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = open_checkpoint(smollm2)
    assert len(checkpoint.tensors) == 272
    for name, tensor in checkpoint.tensors.items():
        assert np.array_equal(tensor.to_float32(), np.asarray(expected[name])), name


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_that_transformers_saved(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = hf_config(tiny_config()) | {"bos_token_id": None}
    del values["model_type"]
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values)).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="100KB")  # several shards and an index
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == tiny_config()
    state = model.state_dict()
    for name, tensor in checkpoint.tensors.items():
        assert np.array_equal(tensor.to_float32(), state[name].float().numpy())


# The shape of the model, and what the files say about it


def test_the_head_size_may_come_from_the_q_projection(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    edit(tmp_path / "config.json", head_dim=None)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.head_dim == 32
    assert any("head_dim" in note for note in checkpoint.notes)


def test_a_tied_model_without_a_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_hf(tmp_path, config, random_tensors(config)))
    assert checkpoint.config.tie_word_embeddings
    assert HEAD not in checkpoint.tensors


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_tied_model_with_an_equal_head_ignores_it(tmp_path, dtype):
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.float16).astype(np.float32)
    tensors[EMBEDDING].view(np.uint32)[...] &= 0xFFFF0000  # exact in bfloat16
    kinds = dict.fromkeys(tensors, "F32") | {HEAD: dtype}
    checkpoint = open_checkpoint(write_hf(tmp_path, config, {**tensors, HEAD: tensors[EMBEDDING]}, kinds))
    assert_holds(checkpoint, config, tensors)
    assert not any(HEAD in note for note in checkpoint.notes)


def test_a_tied_model_with_another_head_uses_it(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(replace(config, tie_word_embeddings=False))
    checkpoint = open_checkpoint(write_hf(tmp_path, config, tensors))
    assert_holds(checkpoint, replace(config, tie_word_embeddings=False), tensors)
    assert any("tie_word_embeddings" in note for note in checkpoint.notes)


def test_a_gguf_file_with_a_copy_of_the_table_is_tied(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, {**tensors, HEAD: tensors[EMBEDDING]})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.tie_word_embeddings
    assert not any("not used" in note for note in checkpoint.notes)


@pytest.mark.parametrize("config", FAMILIES[:1] + FAMILIES[2:], ids=IDS[:1] + IDS[2:])
def test_every_missing_tensor_is_named(tmp_path, config):
    tensors = random_tensors(config)
    write_hf(tmp_path, config, tensors)
    for name in tensors:
        rest = {other: values for other, values in tensors.items() if other != name}
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(rest))
        with pytest.raises(ModelFileError, match=f"'{name}' is missing"):
            open_checkpoint(tmp_path)


def test_missing_tensors_are_counted(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, replace(config, num_hidden_layers=3), random_tensors(config))
    with pytest.raises(ModelFileError, match=r"model\.layers\.2\.\S+ and 10 more is missing"):
        open_checkpoint(tmp_path)


def test_a_missing_gguf_tensor_is_named(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    for name in (EMBEDDING, "model.layers.1.self_attn.k_norm.weight"):
        rest = {other: values for other, values in tensors.items() if other != name}
        path = write_gguf(tmp_path / "part.gguf", config, rest)
        with pytest.raises(ModelFileError, match="is missing"):
            open_checkpoint(path)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 321), ("head_dim", 16), ("hidden_size", 32)])
def test_a_wrong_shape_is_named(tmp_path, key, value):
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    edit(tmp_path / "config.json", **{key: value})
    with pytest.raises(ModelFileError, match=r"has shape \(.*\); the config asks for \("):
        open_checkpoint(tmp_path)


def test_layer_types_that_are_no_list(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    edit(tmp_path / "config.json", layer_types=5)
    with pytest.raises(ModelFileError, match="layer_types"):
        open_checkpoint(tmp_path)


def test_extra_tensors_are_noted_and_extra_biases_refused(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    write_hf(tmp_path, config, {**tensors, "model.visual": np.zeros(4, np.float32)})
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, config, tensors)
    assert any("1 tensor(s) not used: model.visual" in note for note in checkpoint.notes)
    write_hf(tmp_path, config, {**tensors, "a\nb\x1b[31m": np.zeros(4, np.float32)})
    assert any(r"not used: 'a\nb\x1b[31m'" in note for note in open_checkpoint(tmp_path).notes)
    write_hf(tmp_path, config, {**tensors, "model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)})
    with pytest.raises(ModelFileError, match=r"o_proj\.bias is a bias"):
        open_checkpoint(tmp_path)


def test_extra_gguf_tensors(tmp_path):
    config = tiny_config()
    extra = {"blk.9.odd": np.zeros(4, np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", config, random_tensors(config), extra=extra))
    assert any("blk.9.odd" in note for note in checkpoint.notes)
    extra = {"blk.0.attn_output.bias": np.zeros(64, np.float32)}
    with pytest.raises(ModelFileError, match="is a bias"):
        open_checkpoint(write_gguf(tmp_path / "b.gguf", config, random_tensors(config), extra=extra))


@pytest.mark.parametrize(
    ("divisors", "because"),
    [
        (np.ones(8, np.float32), "has 8 values; head size 32 needs 16"),
        (np.ones((4, 4), np.float32), "must be a vector of F32"),
        (np.ones(16, np.float16), "must be a vector of F32"),
        (np.zeros(16, np.float32), "not positive"),
        (np.full(16, np.nan, np.float32), "not positive"),
    ],
)
def test_rope_divisors_that_cannot_be(tmp_path, divisors, because):
    config = tiny_config(architecture="llama")
    extra = {"rope_freqs.weight": divisors}
    with pytest.raises(ModelFileError, match=rf"rope_freqs\.weight.*{because}"):
        open_checkpoint(write_gguf(tmp_path / "c.gguf", config, random_tensors(config), extra=extra))


def test_rope_divisors_are_the_configs(tmp_path):
    config = tiny_config(architecture="llama", rms_norm_eps=2.0**-20)
    extra = {"rope_freqs.weight": np.arange(1, 17, dtype=np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "c.gguf", config, random_tensors(config), extra=extra))
    scaled = replace(config, rope_scaling=Divisors(tuple(float(i) for i in range(1, 17))))
    assert_holds(checkpoint, scaled, random_tensors(config))
    assert not any("not used" in note for note in checkpoint.notes)


def test_a_type_the_reader_does_not_decode_is_named(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    content = safetensors_bytes(tensors).replace(b'"F32"', b'"I32"', 1)  # the embeddings, listed first
    write_hf(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=f"{EMBEDDING} has type I32"):
        open_checkpoint(tmp_path)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(ModelFileError, match="not a model folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelFileError, match=r"name one of a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelFileError, match="no such file"):
        open_checkpoint(tmp_path / "none")


# Texts and ids


def test_end_ids_of_both_configs(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    assert open_checkpoint(tmp_path).end_ids == (1,)
    edit(tmp_path / "generation_config.json", eos_token_id=[5, 3])
    assert open_checkpoint(tmp_path).end_ids == (5, 3, 1)
    edit(tmp_path / "config.json", eos_token_id=None)
    assert open_checkpoint(tmp_path).end_ids == (5, 3)
    for wrong in ("x", [1, "2"], True, 1.5, {}):
        edit(tmp_path / "config.json", eos_token_id=wrong)
        with pytest.raises(ModelFileError, match=r"config\.json: eos_token_id must be a token id"):
            open_checkpoint(tmp_path)


def test_smollm2s_texts_and_ids(smollm2):
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.tokenizer["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert checkpoint.chat_template is not None
    assert "<|im_start|>" in checkpoint.chat_template
    assert checkpoint.generation_config == {}
    assert checkpoint.config.rope_theta == 100_000


def test_where_the_chat_template_comes_from(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    assert open_checkpoint(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(tmp_path / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(tmp_path).chat_template == "D"
    edit(tmp_path / "tokenizer_config.json", chat_template="S")
    assert open_checkpoint(tmp_path).chat_template == "S"
    (tmp_path / "chat_template.jinja").write_text("é{{ x }}\n", encoding="utf-8")
    assert open_checkpoint(tmp_path).chat_template == "é{{ x }}\n"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: not UTF-8"):
        open_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    edit(tmp_path / "tokenizer_config.json", chat_template=5)
    with pytest.raises(ModelFileError, match="chat_template must be a string"):
        open_checkpoint(tmp_path)


def test_a_gguf_files_chat_template_and_tokenizer(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), chat_template="{{ x }}")
    checkpoint = open_checkpoint(path)
    assert checkpoint.chat_template == "{{ x }}"
    assert len(checkpoint.tokenizer["tokenizer.ggml.tokens"]) == 300


def test_the_tokenizer_is_a_path_or_missing_with_a_note(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_tensors(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tokenizer is None
    assert any("tokenizer.json" in note for note in checkpoint.notes)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_checkpoint(tmp_path).tokenizer == tmp_path / "tokenizer.json"
