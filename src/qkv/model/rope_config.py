"""How a model's files describe its RoPE: a block of config.json (old and new form), or keys of GGUF metadata.

What is not understood is refused by name: a scaling rule that is dropped gives text that is fluent and wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkv.errors import ModelFileError
from qkv.model.keys import MAX_SIZE, Keys, label
from qkv.model.rope import Divisors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, yarn_attention_factor

# The keys a block of each type may have; any other that is not null changes the rotation in a way qkv does not know.
COMMON = {"rope_theta", "type", "rope_type", "partial_rotary_factor"}
ORIGINAL = "original_max_position_embeddings"
BLOCK_KEYS = {
    "default": COMMON,
    "linear": COMMON | {"factor", ORIGINAL},
    "llama3": COMMON | {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": COMMON
    | {"factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"finetuned"},  # says how the model was made, nothing about what it computes
}
MAX_FACTOR = 1e4


@dataclass(frozen=True)
class RopeConfig:
    """What the files say: the base, the scaling, and how many positions the scaled model takes."""

    theta: float
    scaling: RopeScaling | None
    positions: int


def rope_from_hf(config: Keys, positions: int) -> RopeConfig:
    """Read `rope_theta` beside `rope_scaling` (old), or `rope_parameters` (new). `positions` is the config's own
    `max_position_embeddings`."""
    block = _block(config)
    if block.get("partial_rotary_factor") not in (None, 1):
        raise block.refused("partial_rotary_factor")
    if config.get("partial_rotary_factor") not in (None, 1):
        raise config.refused("partial_rotary_factor")
    theta_at = config if block.get("rope_theta") is None else block
    theta = theta_at.real("rope_theta", default=10000.0, at_least=2)
    kind_key = "type" if block.get("rope_type") is None else "rope_type"
    kind = block.get(kind_key)
    if kind is None:
        kind = "default"
    if not isinstance(kind, str) or kind not in BLOCK_KEYS:
        raise block.refused(kind_key)
    for key in block.values:
        name = key.removeprefix(block.prefix)
        if name not in BLOCK_KEYS[kind] and block.get(name) is not None:
            raise ModelFileError(f"{block.source}: {label(key)} is not supported for RoPE of type {kind!r}")
    if kind == "default":
        return RopeConfig(theta, None, positions)
    factor = block.real("factor", at_least=1, at_most=MAX_FACTOR)
    if kind == "linear":
        original = positions if block.get(ORIGINAL) is None else block.size(ORIGINAL)
        return RopeConfig(theta, LinearScaling(factor), _scaled_positions(block, positions, factor, original))
    # Some configs keep the original length outside the block; like transformers, that one counts first.
    original = (config if config.get(ORIGINAL) is not None else block).size(ORIGINAL, default=positions)
    if kind == "llama3":
        low, high = block.real("low_freq_factor"), block.real("high_freq_factor")
        if low >= high:
            raise block.wrong("high_freq_factor", f"larger than low_freq_factor ({low:g})")
        return RopeConfig(theta, Llama3Scaling(factor, low, high, original), positions)
    return RopeConfig(theta, _hf_yarn(block, factor, original), _scaled_positions(block, positions, factor, original))


def _hf_yarn(block: Keys, factor: float, original: int) -> YarnScaling:
    if block.get("attention_factor") is not None:
        attention_factor = block.real("attention_factor", at_most=100)
    elif block.get("mscale") and block.get("mscale_all_dim"):  # DeepSeek's form; 0 is as good as absent
        scales = [yarn_attention_factor(factor, block.real(key, at_most=100)) for key in ("mscale", "mscale_all_dim")]
        attention_factor = scales[0] / scales[1]
    else:
        attention_factor = yarn_attention_factor(factor)
    return _yarn(
        block,
        factor,
        original,
        attention_factor,
        fast="beta_fast",
        slow="beta_slow",
        truncate=block.flag("truncate", True),
    )


def _yarn(
    keys: Keys, factor: float, original: int, attention_factor: float, *, fast: str, slow: str, truncate: bool = True
) -> YarnScaling:
    beta_fast = keys.real(fast, at_most=1e6) if keys.get(fast) is not None else YarnScaling.beta_fast
    beta_slow = keys.real(slow, at_most=1e6) if keys.get(slow) is not None else YarnScaling.beta_slow
    if beta_slow >= beta_fast:
        raise keys.wrong(fast, f"larger than {slow} ({beta_slow:g})")
    return YarnScaling(factor, original, attention_factor, beta_fast, beta_slow, truncate)


def _scaled_positions(keys: Keys, positions: int, factor: float, original: int) -> int:
    """The length the scaling reaches. Configs may give `max_position_embeddings` before or after scaling."""
    result = max(positions, int(factor * original))
    if result > MAX_SIZE:
        raise ModelFileError(
            f"{keys.source}: RoPE scaling of {original:,} positions by {factor:g} makes more than {MAX_SIZE:,}"
        )
    return result


def _block(config: Keys) -> Keys:
    """The one block that describes RoPE, with its name as the prefix."""
    blocks: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        block = config.get(name)
        if block is not None and not isinstance(block, Mapping):
            raise config.wrong(name, "an object")
        if block:
            blocks[name] = block
    if len(blocks) == 2 and _scaling(blocks["rope_parameters"]) != _scaling(blocks["rope_scaling"]):
        raise ModelFileError(f"{config.source}: rope_parameters and rope_scaling disagree; keep the one that is right")
    name, block = next(iter(blocks.items()), ("rope_parameters", {}))
    return config.inside(name, block)


def _scaling(block: Mapping[str, Any]) -> dict[str, Any]:
    """What a block says about scaling, whichever of the two forms it has."""
    kind = block.get("rope_type", block.get("type")) or "default"
    rest = {key: value for key, value in block.items() if value is not None and key not in ("type", "rope_theta")}
    return {**rest, "rope_type": kind}


def rope_from_gguf(keys: Keys, positions: int, divisors: tuple[float, ...] | None) -> RopeConfig:
    """Read `{arch}.rope.*`; `divisors` are the values of `rope_freqs.weight`, `positions` the file's context_length."""
    theta = keys.real("rope.freq_base", default=10000.0, at_least=2)
    factor_key = "rope.scaling.factor" if keys.get("rope.scaling.factor") is not None else "rope.scale_linear"
    scaled = bool(keys.get(factor_key))  # 0 stands for "not scaled"
    kind = keys.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default
        kind = "linear" if scaled else "none"
    if kind not in ("none", "linear", "yarn"):
        raise keys.refused("rope.scaling.type")
    if keys.get("rope.scaling.yarn_log_multiplier"):
        raise keys.refused("rope.scaling.yarn_log_multiplier")
    if divisors is not None:
        if kind != "none":
            raise ModelFileError(f"{keys.source}: rope_freqs.weight beside RoPE scaling {kind!r} is not supported")
        return RopeConfig(theta, Divisors(divisors), positions)
    attention_factor = 1.0
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if keys.get(key) is not None:
            attention_factor *= keys.real(key, at_most=100)
    if attention_factor != 1 and kind != "yarn":
        raise ModelFileError(f"{keys.source}: an attention factor for RoPE scaling {kind!r} is not supported")
    if kind == "none" or not scaled:
        return RopeConfig(theta, None, positions)
    factor = keys.real(factor_key, at_least=1, at_most=MAX_FACTOR)
    original = keys.size("rope.scaling.original_context_length", default=positions)
    reach = _scaled_positions(keys, positions, factor, original)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(factor), reach)
    if keys.get("rope.scaling.yarn_ext_factor") not in (None, -1, 1):  # -1: llama.cpp chooses, which is 1 for YaRN
        raise keys.refused("rope.scaling.yarn_ext_factor")
    return RopeConfig(
        theta,
        _yarn(
            keys,
            factor,
            original,
            attention_factor * yarn_attention_factor(factor),
            fast="rope.scaling.yarn_beta_fast",
            slow="rope.scaling.yarn_beta_slow",
        ),
        reach,
    )
