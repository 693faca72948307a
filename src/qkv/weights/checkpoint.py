"""One view of a model, whatever files it came in: its config, its tensors by Hugging Face name, its texts and ids.

Every tensor the config needs is there with the right shape, or there is an error that names it; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.errors import ModelFileError
from qkv.model.config import ModelConfig, from_gguf, from_hf
from qkv.model.families import FAMILIES
from qkv.model.keys import label
from qkv.weights.gguf import GGUFFile, all_parts, open_gguf_model
from qkv.weights.jsonfile import read_json
from qkv.weights.mapped import check_file, read_limited
from qkv.weights.safetensors import open_folder
from qkv.weights.tensor import BLOCKS, StoredTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEMPLATE_LIMIT = 4 << 20

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class Checkpoint:
    """A model's files, checked and ready to be read."""

    path: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]  # exactly the names of config.parameter_shapes()
    tokenizer: Path | Mapping[str, Any] | None  # tokenizer.json, or the GGUF metadata; None: the folder has none
    tokenizer_config: Mapping[str, Any] | None
    chat_template: str | None
    generation_config: Mapping[str, Any]
    end_ids: tuple[int, ...]  # of config.json and generation_config.json; the tokenizer knows more (Opened.end_ids)
    notes: list[str]  # what the user should know: defaults that were assumed, tensors that are not used


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file (any part of a split one), a folder with `config.json` and safetensors, or a folder with one
    `.gguf` model.

    Raises `ModelFileError`, one line that names the file and what is missing or wrong. Reads headers only.
    """
    if path.is_dir():
        if (path / "config.json").exists() and any(path.glob("*.safetensors*")):
            return _open_hf(path)
        path = _only_gguf(path)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder")
    return _open_gguf(open_gguf_model(path))


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelFileError(f"{folder}: not a model folder; it needs config.json and *.safetensors, or one .gguf file")
    if not set(files) <= set(all_parts(files[0])):
        names = ", ".join(file.name for file in files[:8])
        raise ModelFileError(f"{folder}: holds several GGUF files; name one of {names}")
    return files[0]


def _open_hf(folder: Path) -> Checkpoint:
    stored = open_folder(folder)
    notes: list[str] = []
    raw_config = read_json(folder / "config.json")
    raw_config |= _missing_head_dim(raw_config, stored, notes)
    config = from_hf(raw_config, str(folder / "config.json"), notes)
    config = _settle_tie(config, stored, str(folder), notes)
    tensors = _select(config, stored, str(folder), notes)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        check_file(tokenizer)
    else:
        notes.append(f"{folder}: no tokenizer.json, so only token ids can be used")
    generation = _optional_json(folder / "generation_config.json") or {}
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    end_ids = [
        *_ids(generation, "eos_token_id", folder / "generation_config.json"),
        *_ids(raw_config, "eos_token_id", folder / "config.json"),
    ]
    return Checkpoint(
        path=folder,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        tokenizer_config=tokenizer_config,
        chat_template=_hf_chat_template(folder, tokenizer_config or {}),
        generation_config=generation,
        end_ids=tuple(dict.fromkeys(end_ids)),
        notes=notes,
    )


def _missing_head_dim(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], notes: list[str]
) -> dict[str, int]:
    """A family with a head size of its own may leave `head_dim` out; the q projection's rows say what it is."""
    heads, q = config.get("num_attention_heads"), stored.get("model.layers.0.self_attn.q_proj.weight")
    with_own_head_dim = [name for name, family in FAMILIES.items() if family.head_dim is not None]
    if config.get("model_type") not in with_own_head_dim or config.get("head_dim") is not None or q is None:
        return {}
    if not isinstance(heads, int) or heads < 1 or len(q.shape) != 2 or q.shape[0] % heads:
        return {}  # the checks that follow name what is wrong
    notes.append(f"head_dim is missing; {q.shape[0] // heads} taken from the shape of q_proj")
    return {"head_dim": q.shape[0] // heads}


def _settle_tie(config: ModelConfig, stored: dict[str, StoredTensor], source: str, notes: list[str]) -> ModelConfig:
    """A tied model whose file has an output matrix all the same: an equal copy is ignored, another one is used."""
    if not config.tie_word_embeddings or HEAD not in stored:
        return config
    head, table = stored[HEAD], stored.get(EMBEDDING)
    if table is None or (_is_known(head) and _is_known(table) and head.same_values(table)):
        del stored[HEAD]
        return config
    notes.append(f"{source}: tie_word_embeddings is true, but {HEAD} differs from the embeddings; it is used")
    return replace(config, tie_word_embeddings=False)


def _is_known(tensor: StoredTensor) -> bool:
    return tensor.dtype in BLOCKS and tensor.data.size > 0


def _select(
    config: ModelConfig, stored: Mapping[str, StoredTensor], source: str, notes: list[str]
) -> dict[str, StoredTensor]:
    """The tensors the model computes with, each with the shape the config asks for."""
    shapes = config.parameter_shapes()
    missing = [name for name in shapes if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(f"{source}: the tensor {missing[0]!r}{more} is missing; the model is incomplete")
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise ModelFileError(f"{source}: {name} has shape {tensor.shape}; the config asks for {shape}")
        if tensor.dtype not in BLOCKS:
            raise ModelFileError(f"{source}: {name} has type {tensor.dtype}, which is not supported")
    extra = [name for name in stored if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
    for name in extra:
        if name.endswith(".bias") and name.removesuffix("bias") + "weight" in shapes:
            raise ModelFileError(f"{source}: {name} is a bias the {config.architecture} family does not have")
    if extra:
        names = ", ".join(map(label, extra[:3])) + (", …" if len(extra) > 3 else "")
        notes.append(f"{source}: {len(extra)} tensor(s) not used: {names}")
    return {name: stored[name] for name in shapes}


def _open_gguf(file: GGUFFile) -> Checkpoint:
    source, metadata = str(file.path), file.metadata
    tensors = dict(file.tensors)
    divisors = _rope_divisors(tensors.pop("rope_freqs.weight", None), source)
    table = tensors.get(gguf_name(EMBEDDING))
    if table is None:
        raise ModelFileError(f"{source}: the tensor 'token_embd.weight' is missing; the model is incomplete")
    head = tensors.get(gguf_name(HEAD))
    tied = head is None or head.same_values(table)
    config, notes = from_gguf(metadata, source, vocab_size=table.shape[0], tied=tied, rope_divisors=divisors)
    stored = _hf_named(config, tensors)
    if tied:
        stored.pop(gguf_name(HEAD), None)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > config.vocab_size:
        raise ModelFileError(f"{source}: {len(tokens):,} tokens, but the table has {config.vocab_size:,} rows")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ModelFileError(f"{source}: tokenizer.chat_template must be a string")
    return Checkpoint(
        path=file.path,
        config=config,
        tensors=_select(config, stored, source, notes),
        tokenizer=metadata,
        tokenizer_config=None,
        chat_template=template,
        generation_config={},
        end_ids=(),
        notes=notes,
    )


def _rope_divisors(tensor: StoredTensor | None, source: str) -> tuple[float, ...] | None:
    """The values of `rope_freqs.weight`, which Llama 3.1 and later have: what each RoPE frequency is divided by."""
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1024:
        raise ModelFileError(f"{source}: rope_freqs.weight must be a vector of F32, got {tensor.dtype} {tensor.shape}")
    values = tensor.to_float32()
    if not np.all((values > 0) & np.isfinite(values)):
        raise ModelFileError(f"{source}: rope_freqs.weight holds a number that is not positive; the file is damaged")
    return tuple(values.tolist())


def _hf_named(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The file's tensors by Hugging Face name (others keep theirs), q and k rows in Hugging Face order."""
    rest = dict(tensors)
    result: dict[str, StoredTensor] = {}
    shapes = config.parameter_shapes()
    biases = [name.removesuffix("weight") + "bias" for name in shapes if name.endswith("weight")]  # to be noticed
    for name in dict.fromkeys([*shapes, *biases]):
        tensor = rest.pop(gguf_name(name), None)
        if tensor is not None:
            result[name] = replace(tensor, name=name, row_order=_row_order(config, name, tensor))
    return result | rest


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    part, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
    return f"blk.{layer[1]}.{GGUF_NAMES[layer[2]]}.{kind}" if layer else f"{GGUF_NAMES[part]}.{kind}"


def _row_order(config: ModelConfig, name: str, tensor: StoredTensor) -> npt.NDArray[np.intp] | None:
    """Where row i of a q or k projection is stored in a GGUF file, for families whose rows are reordered there.

    llama.cpp rotates neighbouring pairs (2j, 2j+1) where Hugging Face rotates (j, j + d/2), and its conversion of
    these families reorders the rows of every head to match: stored row 2j + p holds row p * d/2 + j.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.removesuffix(".weight").rpartition(".")[2]
    if not config.family.gguf_pairs_neighbours or projection not in heads:
        return None
    if tensor.shape != config.parameter_shapes()[name]:
        return None  # refused right after, by its shape
    stored = np.arange(tensor.shape[0]).reshape(heads[projection], config.head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _ids(values: Mapping[str, Any], key: str, path: Path) -> list[int]:
    """A token id, a list of them, or nothing."""
    value = values.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in found):
        raise ModelFileError(f"{path}: {key} must be a token id or a list of them")
    return found


def _optional_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _hf_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, else `chat_template.json`, else tokenizer_config.json's text (or its "default" text)."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        try:
            return read_limited(separate, TEMPLATE_LIMIT).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{separate}: not UTF-8 text (byte {error.start})") from error
    in_json = _optional_json(folder / "chat_template.json") or {}
    template = in_json.get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise ModelFileError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string")
    return template
