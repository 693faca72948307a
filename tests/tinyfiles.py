"""Writes tiny models as the files people have: a Hugging Face folder, a GGUF file, a wheel.

The safetensors writer needs NumPy alone, so that it is no mirror of the code under test.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from qkv.model.config import ModelConfig

Tensors = Mapping[str, NDArray[np.float32]]


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What config.json says about the model."""
    return {
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "eos_token_id": 1,
    }


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32 (rounded towards zero)."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


STORE = {
    "F32": lambda values: values.astype("<f4"),
    "F16": lambda values: values.astype("<f2"),
    "BF16": bf16,
}


def safetensors_bytes(tensors: Tensors, dtype: str | Mapping[str, str] = "F32") -> bytes:
    """A safetensors file; `dtype` is one of STORE for all, or one for each name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, position = [], 0
    for name, values in tensors.items():
        kind = dtype if isinstance(dtype, str) else dtype[name]
        part = STORE[kind](np.ascontiguousarray(values)).tobytes()
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [position, position + len(part)]}
        parts.append(part)
        position += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write_hf(folder: Path, config: ModelConfig, tensors: Tensors, dtype: str | Mapping[str, str] = "F32") -> Path:
    """A folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    return folder


GGUF_PARTS = [
    ("model.layers.", "blk."),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
]


def llama_permuted(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's conversion does to the rows of a llama's q and k projections."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Tensors,
    kind: str = "F32",
    extra: Tensors | None = None,
    chat_template: str | None = None,
    keys: Mapping[str, str | int | float] | None = None,
    tensors_per_file: int = 0,
    vocabulary: Sequence[str] = (),
    merges: Sequence[str] = (),
    blocks: Mapping[str, tuple[str, NDArray[np.uint8]]] | None = None,
) -> Path:
    """A GGUF file by the `gguf` package; matrices in the format `kind`, vectors in float32.

    `keys` are more of the architecture's own ("rope.scaling.type"); with `tensors_per_file` the file is split, and the
    first part's path is returned. With a byte-level `vocabulary` and its `merges` the file has a usable tokenizer.
    `blocks` are matrices as they are to be stored: type and bytes [rows, bytes of a row].
    """
    writer = gguf.GGUFWriter(str(path), config.architecture, split_max_tensors=tensors_per_file)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (keys or {}).items():
        add[type(value)](f"{config.architecture}.{key}", value)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    tokens = vocabulary or [f"t{i}" for i in range(config.vocab_size - 20)]
    writer.add_token_list(list(tokens))
    writer.add_token_types([3 if text.startswith("<|") else 1 for text in tokens])
    if vocabulary:
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(list(merges))
    writer.add_eos_token_id(1)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, stored in tensors.items():
        values = stored
        given = (blocks or {}).get(name)
        if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = llama_permuted(values, heads)
        for old, new in GGUF_PARTS:
            name = name.replace(old, new)
        if given is not None:
            writer.add_tensor(name, given[1], raw_dtype=gguf.GGMLQuantizationType[given[0]])
        elif values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_file else path


def write_wheel(folder: Path, project: str, version: str, files: Mapping[str, bytes]) -> Path:
    """A wheel that pip accepts, with the given files in it."""
    dist = f"{project.replace('-', '_')}-{version}"
    info = f"{dist}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={hashlib.sha256(data).hexdigest()},{len(data)}\n" for name, data in files.items())
    path = folder / f"{dist}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path
