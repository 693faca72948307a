"""The one description of a model that everything else reads, and the presets of the Qwen3 sizes.

A `ModelConfig` comes from a Hugging Face `config.json` (`from_hf`), from GGUF metadata (`from_gguf`) or from a
preset's name (`PRESETS`). What the code does not implement is refused by name, never ignored: a scaling rule or a
sliding window that is silently dropped gives fluent, wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from qkv.errors import ModelFileError

MAX_LAYERS = 1024
MAX_SIZE = 1 << 24  # no dimension of a known decoder comes near it; a damaged file's easily does

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Field names are those of Hugging Face configs.

    `head_dim` is explicit: `num_attention_heads * head_dim` need not be `hidden_size`
    (Qwen3-0.6B: 16 * 128 = 2048 against 1024).
    """

    architecture: str  # "qwen3", "qwen2" or "llama"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @property
    def qk_norm(self) -> bool:
        """Whether every q and k head is RMS-normalized before RoPE (Qwen3)."""
        return self.architecture == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias (Qwen2; its configs carry no key that says so)."""
        return self.architecture == "qwen2"

    @property
    def heads_per_kv_head(self) -> int:
        """H / H_kv: query head h reads key/value head h // heads_per_kv_head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def parameter_count(self) -> int:
        """How many weights the model has; a tied table counts once."""
        return sum(_product(shape) for shape in self.parameter_shapes().values())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model computes with, by its Hugging Face name, and its shape (outputs, inputs)."""
        hidden, head_dim = self.hidden_size, self.head_dim
        q_size, kv_size = self.num_attention_heads * head_dim, self.num_key_value_heads * head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}."
            attention = layer + "self_attn."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            shapes[attention + "q_proj.weight"] = (q_size, hidden)
            shapes[attention + "k_proj.weight"] = (kv_size, hidden)
            shapes[attention + "v_proj.weight"] = (kv_size, hidden)
            if self.qkv_bias:
                shapes[attention + "q_proj.bias"] = (q_size,)
                shapes[attention + "k_proj.bias"] = (kv_size,)
                shapes[attention + "v_proj.bias"] = (kv_size,)
            if self.qk_norm:
                shapes[attention + "q_norm.weight"] = (head_dim,)
                shapes[attention + "k_norm.weight"] = (head_dim,)
            shapes[attention + "o_proj.weight"] = (hidden, q_size)
            shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
            shapes[layer + "mlp.gate_proj.weight"] = (self.intermediate_size, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (self.intermediate_size, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, self.intermediate_size)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def check(self, source: str) -> ModelConfig:
        """Return self, or raise `ModelFileError` for a shape no decoder can have."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelFileError(
                f"{source}: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"{source}: head_dim {self.head_dim} is odd; RoPE rotates pairs")
        return self


def from_hf(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a parsed `config.json`. `source` is the file's name, for messages."""
    read = _Reader(config, source)
    family = read.text("model_type")
    if family not in HF_FAMILIES:
        raise ModelFileError(f"{source}: model_type {family!r} is not supported; known: {', '.join(HF_FAMILIES)}")
    architecture = HF_FAMILIES[family]
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFileError(f"{source}: hidden_act {activation!r} is not supported; these decoders use 'silu'")
    if architecture != "qwen2" and config.get("attention_bias"):
        raise ModelFileError(f"{source}: attention_bias is not supported for model_type {family!r}")
    if config.get("mlp_bias"):
        raise ModelFileError(f"{source}: mlp_bias is not supported")
    _refuse_sliding_window(config, family, source)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    # Qwen3's own default is 128 whatever the width; the others derive it from the width.
    default_head_dim = 128 if architecture == "qwen3" else hidden // heads
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        num_hidden_layers=read.size("num_hidden_layers", at_most=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=read.size("num_key_value_heads", default=heads),
        head_dim=read.size("head_dim", default=default_head_dim),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size("max_position_embeddings"),
        rms_norm_eps=read.real("rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(config, source),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
    ).check(source)


def from_gguf(
    metadata: Mapping[str, Any], source: str, *, vocab_size: int, tied: bool
) -> tuple[ModelConfig, list[str]]:
    """Read GGUF metadata; also returns a line for each missing key that got the format's documented default.

    `vocab_size` (rows of the token table) and `tied` (no separate output matrix) come from the file's tensors.
    """
    architecture = _Reader(metadata, source).text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelFileError(f"{source}: architecture {architecture!r} is not supported; known: {known}")
    read = _Reader(metadata, source, prefix=architecture + ".")
    if metadata.get(f"{architecture}.attention.sliding_window"):
        raise ModelFileError(f"{source}: sliding-window attention is not supported")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelFileError(f"{source}: {architecture}.rope.scaling.type {scaling!r} is not supported")
    hidden, heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", default=hidden // heads)
    if read.size("attention.value_length", default=head_dim) != head_dim:
        raise ModelFileError(f"{source}: key and value heads of different sizes are not supported")
    if read.size("rope.dimension_count", default=head_dim) != head_dim:
        raise ModelFileError(f"{source}: {architecture}.rope.dimension_count differs from the head size {head_dim}")
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=read.size("feed_forward_length"),
        num_hidden_layers=read.size("block_count", at_most=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=read.size("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=read.size("context_length"),
        rms_norm_eps=read.real("attention.layer_norm_rms_epsilon"),
        rope_theta=read.real("rope.freq_base", default=10000.0),
        tie_word_embeddings=tied,
    ).check(source)
    return config, read.assumed


HF_FAMILIES = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "mistral": "llama"}
GGUF_ARCHITECTURES = ("qwen3", "qwen2", "llama")


def _refuse_sliding_window(config: Mapping[str, Any], family: str, source: str) -> None:
    """Qwen configs carry a `sliding_window` that counts only with `use_sliding_window`; Mistral's always counts."""
    window = config.get("sliding_window")
    in_use = bool(config.get("use_sliding_window", False)) if family.startswith("qwen") else True
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ModelFileError(f"{source}: layer_types must be a list, got {_short(kinds)}")
    if (window is not None and in_use) or "sliding_attention" in kinds:
        raise ModelFileError(f"{source}: sliding-window attention ({window}) is not supported")


def _rope_theta(config: Mapping[str, Any], source: str) -> float:
    """The base of RoPE, from the old form (`rope_theta` beside `rope_scaling`) or the new (`rope_parameters`)."""
    for block_name in ("rope_parameters", "rope_scaling"):
        block = config.get(block_name) or {}
        if not isinstance(block, Mapping):
            raise ModelFileError(f"{source}: {block_name} must be an object, got {block!r}")
        kind = block.get("rope_type", block.get("type", "default"))
        if kind not in (None, "default"):
            raise ModelFileError(f"{source}: {block_name} of type {kind!r} is not supported")
    nested = config.get("rope_parameters") or {}
    key = "rope_parameters.rope_theta" if "rope_theta" in nested else "rope_theta"
    return _Reader({**config, "rope_parameters.rope_theta": nested.get("rope_theta")}, source).real(
        key, default=10000.0
    )


class _Reader:
    """Typed look-ups that name the file and the key when a value is missing or impossible."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix
        self.assumed: list[str] = []

    def text(self, key: str) -> str:
        value = self._get(key, None)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def size(self, key: str, default: int | None = None, at_most: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise self._wrong(key, value, f"a whole number from 1 to {at_most:,}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(self.prefix + key)
        if not isinstance(value, (bool, type(None))):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def _get(self, key: str, default: Number | None) -> Any:
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self.source}: the key {self.prefix + key!r} is missing")
        self.assumed.append(f"{self.prefix}{key} is missing; using {default}")
        return default

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.prefix + key} must be {wanted}, got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=tied,
    )


PRESETS: dict[str, ModelConfig] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, tied=False),
}
