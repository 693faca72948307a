"""The one description of a model that everything else reads, and the presets of the Qwen3 sizes.

A `ModelConfig` comes from a Hugging Face `config.json` (`from_hf`), from GGUF metadata (`from_gguf`) or from a
preset's name (`PRESETS`). What the code does not implement is refused by name, never ignored: a scaling rule or a
sliding window that is silently dropped gives fluent, wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from qkv.errors import ModelFileError
from qkv.model.families import ARCHITECTURES, FAMILIES, Family
from qkv.model.keys import Keys, short
from qkv.model.rope import Rope, RopeScaling
from qkv.model.rope_config import rope_from_gguf, rope_from_hf

MAX_LAYERS = 1024


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Field names are those of Hugging Face configs.

    `head_dim` is explicit: `num_attention_heads * head_dim` need not be `hidden_size`
    (Qwen3-0.6B: 16 * 128 = 2048 against 1024).
    """

    architecture: str  # a key of `families.ARCHITECTURES`
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # with the scaling, if there is one
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None

    def rope(self) -> Rope:
        """The rotation of q and k, its frequencies worked out."""
        return Rope(self.head_dim, self.rope_theta, self.rope_scaling)

    @property
    def family(self) -> Family:
        """What sets this architecture apart."""
        return ARCHITECTURES[self.architecture]

    @property
    def qk_norm(self) -> bool:
        """Whether every q and k head is RMS-normalized before RoPE (Qwen3)."""
        return self.family.qk_norm

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias (Qwen2)."""
        return self.family.qkv_bias

    @property
    def heads_per_kv_head(self) -> int:
        """H / H_kv: query head h reads key/value head h // heads_per_kv_head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def parameter_count(self) -> int:
        """How many weights the model has; a tied table counts once."""
        return sum(map(prod, self.parameter_shapes().values()))

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


def from_hf(config: Mapping[str, Any], source: str, notes: list[str] | None = None) -> ModelConfig:
    """Read a parsed `config.json`. `source` is the file's name, for messages.

    `notes` gets a line for each missing key that got the family's documented default.
    """
    keys = Keys(config, source, assumed=notes)
    model_type = keys.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelFileError(f"{source}: model_type {short(model_type)} is not supported; known: {', '.join(FAMILIES)}")
    _refuse_what_is_not_implemented(keys, family)
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    rope = rope_from_hf(keys, keys.size("max_position_embeddings"))
    return ModelConfig(
        architecture=family.architecture,
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        num_hidden_layers=keys.size("num_hidden_layers", at_most=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=keys.size("num_key_value_heads", default=heads),
        head_dim=keys.size("head_dim", default=family.head_dim or max(hidden // heads, 1)),
        vocab_size=keys.size("vocab_size"),
        max_position_embeddings=rope.positions,
        rms_norm_eps=keys.real("rms_norm_eps", default=1e-6),
        rope_theta=rope.theta,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        rope_scaling=rope.scaling,
    ).check(source)


def from_gguf(
    metadata: Mapping[str, Any],
    source: str,
    *,
    vocab_size: int,
    tied: bool,
    rope_divisors: tuple[float, ...] | None = None,
) -> tuple[ModelConfig, list[str]]:
    """Read GGUF metadata; also returns a line for each missing key that got the format's documented default.

    `vocab_size` (rows of the token table), `tied` (no separate output matrix) and `rope_divisors` (the values of
    `rope_freqs.weight`) come from the file's tensors.
    """
    architecture = Keys(metadata, source).text("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelFileError(f"{source}: architecture {short(architecture)} is not supported; known: {known}")
    keys = Keys(metadata, source, prefix=architecture + ".")
    if keys.get("attention.sliding_window"):
        raise ModelFileError(f"{source}: sliding-window attention is not supported")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", default=max(hidden // heads, 1))
    if keys.size("attention.value_length", default=head_dim) != head_dim:
        raise ModelFileError(f"{source}: key and value heads of different sizes are not supported")
    if keys.size("rope.dimension_count", default=head_dim) != head_dim:
        raise ModelFileError(f"{source}: {architecture}.rope.dimension_count differs from the head size {head_dim}")
    if rope_divisors is not None and len(rope_divisors) != head_dim // 2:
        raise ModelFileError(
            f"{source}: rope_freqs.weight has {len(rope_divisors)} values; head size {head_dim} needs {head_dim // 2}"
        )
    rope = rope_from_gguf(keys, keys.size("context_length"), rope_divisors)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=keys.size("feed_forward_length"),
        num_hidden_layers=keys.size("block_count", at_most=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=keys.size("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=rope.positions,
        rms_norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope_theta=rope.theta,
        tie_word_embeddings=tied,
        rope_scaling=rope.scaling,
    ).check(source)
    return config, keys.assumed


def _refuse_what_is_not_implemented(keys: Keys, family: Family) -> None:
    if keys.get("hidden_act") not in (None, "silu"):
        raise ModelFileError(
            f"{keys.source}: hidden_act {short(keys.get('hidden_act'))} is not supported; these decoders use 'silu'"
        )
    if not family.qkv_bias and keys.get("attention_bias"):  # Qwen2 has its biases whatever a config says
        raise ModelFileError(f"{keys.source}: attention_bias is not supported for model_type {family.model_type!r}")
    if keys.get("mlp_bias"):
        raise ModelFileError(f"{keys.source}: mlp_bias is not supported")
    if keys.get("quantization_config"):
        raise ModelFileError(
            f"{keys.source}: quantization_config is not supported; use the unquantized model or a GGUF file of it"
        )
    _refuse_sliding_window(keys, family)


def _refuse_sliding_window(keys: Keys, family: Family) -> None:
    """Refuse a window that is in use, as transformers decides it.

    One that is opt-in counts only with `use_sliding_window`, and where `layer_types` has a say, in the layers it names.
    Any other counts whenever it is there.
    """
    window, kinds = keys.get("sliding_window"), keys.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise keys.wrong("layer_types", "a list")
    for kind in kinds or []:
        if kind != "full_attention":
            raise ModelFileError(f"{keys.source}: layer_types: {short(kind)} is not supported")
    if family.window is not None and "sliding_window" not in keys.values:
        raise ModelFileError(
            f"{keys.source}: sliding_window is missing, which means {family.window} for {family.model_type!r}, and is "
            'not supported; a model without one says "sliding_window": null'
        )
    in_use = not family.window_is_opt_in or (keys.get("use_sliding_window") and not kinds)
    if window is not None and in_use:
        raise ModelFileError(f"{keys.source}: sliding-window attention ({short(window)}) is not supported")


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
