"""Random-weight models in the shape of Qwen3-0.6B: for speed, what the numbers are does not matter.

    python -m benchmarks.random_model Q4_0 Q8_0 Q4_K_M

Writes GGUF files (0.34, 0.64 and 0.39 GB) into `bench` in qkv's cache folder, where `compare` looks for them. The
vocabulary is made up: `<0>`, `<1>`, …; it has the size of Qwen3's, so all engines load it, and nobody can read the
text. Q4_K_M has the types that llama.cpp's files of that name have: Q6_K for the token table and for half of the value
and down projections, Q4_K for the rest; its blocks are random bytes with chosen scales.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from qkv.cli.bars import Bars
from qkv.errors import CacheError, QkvError
from qkv.model.config import PRESETS, ModelConfig
from qkv.progress import Progress, silent
from qkv.settings import cache_dir

CONFIG = PRESETS["Qwen/Qwen3-0.6B"]
KINDS = ("Q4_0", "Q8_0", "Q4_K_M")
STD = 0.02
VERSION = 1  # of what this file writes: another number makes new files
BYTES = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}  # weights and bytes of a block
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}  # as GGUF counts them


def folder() -> Path:
    return cache_dir() / "bench"


def cached(kind: str, progress: Progress = silent) -> Path:
    """The file of that kind in the cache, made when it is not there. Raises QkvError."""
    path = folder() / f"qwen3-0.6b-random-{kind}-v{VERSION}.gguf"
    if not path.exists():
        write(path, kind, CONFIG, progress)
    return path


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """GGUF names and shapes (outputs first)."""
    hidden, mlp, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(config.num_hidden_layers):
        shapes = {
            "attn_norm": (hidden,),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_q_norm": (d,),
            "attn_k_norm": (d,),
            "attn_output": (hidden, q),
            "ffn_norm": (hidden,),
            "ffn_gate": (mlp, hidden),
            "ffn_up": (mlp, hidden),
            "ffn_down": (hidden, mlp),
        }
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", shape


def type_of(kind: str, name: str, layers: int) -> str:
    """The type of a matrix."""
    if kind != "Q4_K_M":
        return kind
    if name == "token_embd.weight":
        return "Q6_K"
    layer, eighth = int(name.split(".")[1]), layers // 8
    # llama.cpp's rule for "more bits": the first and last eighth of the layers, and every third between.
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of blocks [rows, bytes]: random codes under scales that give weights a deviation of about `STD`."""
    weights, size = BYTES[kind]
    rows, columns = shape
    count = rows * columns // weights
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    spread = rng.uniform(0.8, 1.2, count)

    def half(at: int, values: NDArray[Any]) -> None:
        blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(count, 2)

    if kind == "Q4_0":  # codes 0…15 minus 8
        half(0, STD / 4.6 * spread)
    elif kind == "Q8_0":  # codes -128…127; -128 is never written by a quantizer
        blocks[:, 2:] = np.where(blocks[:, 2:] == 128, 129, blocks[:, 2:])
        half(0, STD / 73.6 * spread)
    elif kind == "Q4_K":  # d·scale·code - dmin·minimum, scale and minimum 0…63 and 31.5 on average
        half(0, STD / 258 * spread)
        half(2, STD / 258 * 7.5 * spread)
    else:  # Q6_K: d·scale·(code - 32), scale -128…127
        half(208, STD / 1370 * spread)
    return blocks.reshape(rows, columns // weights * size)


def write(path: Path, kind: str, config: ModelConfig, progress: Progress = silent, seed: int = 0) -> None:
    """Write a model. Raises QkvError."""
    if kind not in KINDS:
        raise QkvError(f"there is no {kind}; choose one of {', '.join(KINDS)}")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(part, kind, config, progress, np.random.default_rng(seed))
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from None


def _write(path: Path, kind: str, config: ModelConfig, progress: Progress, rng: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name(f"Qwen3-0.6B, random weights, {kind}")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(2)
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
    _add_vocabulary(writer, config.vocab_size)
    every = list(tensors(config))
    for name, shape in every:
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            quantization = gguf.GGMLQuantizationType[type_of(kind, name, config.num_hidden_layers)]
            weights, size = BYTES[quantization.name]
            row = shape[1] // weights * size
            writer.add_tensor_info(name, (shape[0], row), np.dtype(np.uint8), shape[0] * row, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (name, shape) in enumerate(every):
        progress(f"making {path.name.split('.gguf')[0]}", done, len(every), "tensors")
        if len(shape) == 1:
            writer.write_tensor_data(rng.normal(1, 0.1, shape).astype(np.float32))
        else:
            writer.write_tensor_data(random_blocks(type_of(kind, name, config.num_hidden_layers), shape, rng))
    progress(f"making {path.name.split('.gguf')[0]}", len(every), len(every), "tensors")
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """The least that engines want of a byte-level vocabulary: the 256 bytes, some merges, an end."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(code) for code in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    merged, ends = ["ab", "cd"], ["<|endoftext|>", "<|im_end|>"]
    made_up = [f"<{i}>" for i in range(size - len(letters) - len(merged) - len(ends))]
    tokens = [*letters, *merged, *made_up, *ends]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ends else 1 for token in tokens])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 2)
    writer.add_pad_token_id(size - 2)
    writer.add_add_bos_token(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", metavar="KIND", help=", ".join(KINDS))
    options = parser.parse_args()
    made = []
    try:
        with Bars() as bars:
            for kind in options.kinds:
                path = cached(kind, bars)
                made.append({"kind": kind, "file": str(path), "bytes": path.stat().st_size})
    except QkvError as error:
        print(f"random_model: {error}", file=sys.stderr)
        return 2
    for each in made:
        print(f"{each['kind']:8}{each['bytes'] / 1e6:8.0f} MB  {each['file']}")
    print(json.dumps({"benchmark": "random_model", "files": made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
