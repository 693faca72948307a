"""Compiled decoders of tiny models, and what they should compute, for the tests of everything above the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from qkv.engine.session import Session
from qkv.kernels.formats import unpack
from qkv.model.compiled import CompiledDecoder, PackedWeights
from qkv.model.config import ModelConfig
from qkv.model.feed import Feed, PagedCache
from qkv.model.layers import matrix_names
from qkv.model.reference import Decoder
from qkv.weights.load import load_weights
from qkv.weights.tensor import StoredTensor
from tinyfiles import bf16

Tensors = Mapping[str, NDArray[np.float32]]


def stored(tensors: Tensors, kind: str | Callable[[str], str] = "F32") -> dict[str, StoredTensor]:
    """The tensors as a file would hold them: matrices in a type of `BLOCKS`, one for all or one by name."""
    result = {}
    for name, values in tensors.items():
        dtype = "F32" if values.ndim == 1 else kind if isinstance(kind, str) else kind(name)
        rows = values.reshape(-1, values.shape[-1])
        if dtype == "BF16":
            raw: NDArray[Any] = bf16(np.ascontiguousarray(rows))
        else:
            raw = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[dtype])
        result[name] = StoredTensor(name, values.shape, dtype, np.ascontiguousarray(raw).view(np.uint8))
    return result


def mixed_kinds(name: str) -> str:
    """What Q4_1 files look like: 4-bit matrices, and an 8-bit head and table."""
    return "Q8_0" if "embed" in name or "lm_head" in name or "down_proj" in name else "Q4_1"


def packed(config: ModelConfig, tensors: Tensors, weights: str = "f32") -> PackedWeights:
    """The tensors packed as `weights`, which may also be "mixed": int8 and int4m, from a Q4_1 and Q8_0 file."""
    if weights == "mixed":
        return load_weights(config, stored(tensors, mixed_kinds))
    return load_weights(config, stored(tensors), wanted=weights)


def compiled(
    config: ModelConfig,
    weights: PackedWeights,
    *,
    cache: str = "f32",
    threads: int = 2,
    context: int = 256,
    outputs: int = 256,
) -> CompiledDecoder:
    """A decoder with room for the logits of many tokens."""
    return CompiledDecoder(config, weights, cache=cache, context=context, threads=threads, outputs=outputs)


def logits_of(decoder: CompiledDecoder, ids: Sequence[int], chunks: Sequence[int] | None = None) -> NDArray[np.float32]:
    """All logits [T, vocab] of a sequence, computed at once or in chunks of these sizes."""
    session, cache, rows, start = Session(decoder), PagedCache(), [], 0
    for size in chunks or [len(ids)]:
        rows.append(session.step([Feed(cache, ids[start : start + size], "all")]))
        start += size
    assert cache.length == len(ids) == start
    return np.concatenate(rows)


def dequantized(config: ModelConfig, weights: PackedWeights, tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """What the packed weights stand for, exactly; norms and biases are those of `tensors`."""
    values = dict(tensors)
    for name, matrix in zip(matrix_names(config), weights.matrices, strict=True):
        values[name] = unpack(weights.arena, matrix)
    return values


class QuantizedReference(Decoder):
    """The reference, but each product's input is quantized first, as the products of int8 and int4 weights do."""

    def _linear(self, x: NDArray[Any], name: str) -> NDArray[Any]:
        return super()._linear(quantized_activations(x), name)

    def logits(self, hidden: NDArray[Any]) -> NDArray[Any]:
        return super().logits(quantized_activations(hidden))


def quantized_activations(x: NDArray[Any]) -> NDArray[Any]:
    """x [T, inputs] rounded as the products of int8 and int4 weights see it.

    Groups of 32 have a step of max(b / 127, a / 32767), where a ≥ b are the two largest magnitudes.
    """
    T, inputs = x.shape
    groups = np.pad(x, ((0, 0), (0, -inputs % 32))).astype(np.float32).reshape(T, -1, 32)
    second, largest = np.moveaxis(np.sort(np.abs(groups), axis=-1)[..., -2:], -1, 0)
    d = np.maximum(second / np.float32(127), largest / np.float32(32767))[..., None]
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d >= np.float32(2.0**-126))
    return (np.rint(groups * inverse) * d).reshape(T, -1)[:, :inputs].astype(x.dtype)
