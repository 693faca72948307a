"""Which format each matrix gets when it is loaded, decided without Numba."""

from __future__ import annotations

from collections.abc import Mapping

from qkv.errors import ParameterError
from qkv.kernels.sizes import packed_bytes
from qkv.model.config import ModelConfig
from qkv.model.layers import matrix_names
from qkv.weights.tensor import StoredTensor

OWN_FORMAT = {"Q4_0": "int4", "Q4_1": "int4m", "Q8_0": "int8", "Q4_K": "int4m"}
"""GGUF types whose quants a kernel reads as they are (of Q4_K the scales are rounded); everything else is converted."""

CHOICES = ("f32", "bf16", "int8", "int4")


def matrix_formats(config: ModelConfig, tensors: Mapping[str, StoredTensor], wanted: str | None) -> dict[str, str]:
    """The format that `load.load_weights` would pack each matrix in, as far as the types say (see there for Q4_K).

    Raises ParameterError for an unknown one.
    """
    check_format(wanted)
    return {name: _format(tensors[name].dtype, wanted) for name in matrix_names(config)}


def packed_size(config: ModelConfig, tensors: Mapping[str, StoredTensor], wanted: str | None) -> int:
    """How many bytes the arena of `load.load_weights` would have, as far as the types of the matrices say."""
    formats = matrix_formats(config, tensors, wanted)
    return sum(packed_bytes(fmt, *tensors[name].shape) for name, fmt in formats.items())


def check_format(wanted: str | None) -> None:
    """Raises ParameterError unless `wanted` is None or one of `CHOICES`."""
    if wanted is not None and wanted not in CHOICES:
        raise ParameterError(f"weights: unknown format {wanted!r}; choose one of {', '.join(CHOICES)}")


def _format(dtype: str, wanted: str | None) -> str:
    own = OWN_FORMAT.get(dtype)
    if wanted is None:
        return own or "int8"
    return "int4m" if wanted == "int4" and own == "int4m" else wanted
