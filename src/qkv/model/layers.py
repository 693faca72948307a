"""What the weights of a layer are and where they lie: the one table that loading and computing share.

The matrices of a model are numbered: layer after layer, then the token table, then the head (the table again where the
two are tied). Its vectors (norms and biases) lie one behind the other in one float32 array, the last norm at the end.
A record of dtype `LAYER` says where those of a layer are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.model.config import ModelConfig

TABLE = "model.embed_tokens.weight"
NONE = -1
"""Stands for a vector that the family does not have."""

# A field of `LAYER` and the tensor whose place it holds: a matrix's number, a vector's first element. Matrices
# that share an input follow each other (q, k, v; gate, up), and so do the three biases: the field tells the first.
FIELDS = {
    "input_norm": "input_layernorm.weight",
    "qkv_proj": "self_attn.q_proj.weight",
    "qkv_bias": "self_attn.q_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "gate_up_proj": "mlp.gate_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
# index: which layer it is; window: how many of the newest positions it sees, 0 for all.
LAYER = np.dtype([(name, np.int64) for name in ("index", "window", *FIELDS)])


def matrix_names(config: ModelConfig) -> list[str]:
    """The name of every matrix, in the order of their numbers. A tied table has two numbers."""
    shapes = config.parameter_shapes()
    layers = [name for name, shape in shapes.items() if len(shape) == 2 and name not in (TABLE, "lm_head.weight")]
    return [*layers, TABLE, TABLE if config.tie_word_embeddings else "lm_head.weight"]


def vector_sizes(config: ModelConfig) -> dict[str, int]:
    """Every vector, in the order in which they lie, and its elements there: those of a norm are padded to 32."""
    vectors = {name: math.prod(shape) for name, shape in config.parameter_shapes().items() if len(shape) == 1}
    return {name: padded_row(size) if "norm" in name else size for name, size in vectors.items()}


def layer_records(config: ModelConfig) -> NDArray[Any]:
    """A `LAYER` record for each layer, int64 fields: see `FIELDS`."""
    sizes = vector_sizes(config)
    places = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    places |= {name: number for number, name in enumerate(matrix_names(config))}
    records = np.zeros(config.num_hidden_layers, LAYER)
    records["index"] = range(len(records))
    for field, name in FIELDS.items():
        records[field] = [places.get(f"model.layers.{i}.{name}", NONE) for i in range(len(records))]
    return records


def padded_row(size: int) -> int:
    """The elements of a row of `size` floats as kernels have it: padded with zeros to a multiple of 32."""
    return -(-size // 32) * 32
