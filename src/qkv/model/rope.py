"""Rotary position embeddings: each pair of a head's numbers is turned by an angle that grows with the position.

    angle(position, i) = position · frequency_i ,  frequency_i = θ^(-2i/d) ,  i = 0 … d/2 - 1

A scaled model slows its low frequencies down, so that positions beyond those it was trained on turn no further than
it has seen. Every step below is rounded to float32 where transformers rounds it, because a frequency's last bit is an
angle's third digit at position 40,000: of the tables' numbers 98 % are transformers' to the bit, and none is more than
two units in the last place away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Frequencies = NDArray[np.float32]


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor`: position p turns as far as p / factor did in training."""

    factor: float

    def __str__(self) -> str:
        return f"linear, factor {self.factor:g}"


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's three bands: pairs that turn often within the original context keep their frequency, pairs that turn
    less than about once are divided by `factor`, and those between pass from one to the other."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __str__(self) -> str:
        return f"llama3, factor {self.factor:g}, first trained on {self.original_max_position_embeddings:,} positions"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): like three bands, with a ramp over i, and cos and sin times `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0  # turns within the original context from which a pair keeps its frequency
    beta_slow: float = 1.0  # turns below which it is divided by `factor`
    truncate: bool = True  # whether the ramp begins and ends at whole pairs

    def __str__(self) -> str:
        return f"yarn, factor {self.factor:g}, first trained on {self.original_max_position_embeddings:,} positions"


@dataclass(frozen=True)
class Divisors:
    """One divisor for each frequency, as GGUF's `rope_freqs.weight` has them (Llama 3.1's bands, worked out)."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"the file's own divisors, {min(self.values):g} to {max(self.values):g}"


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | Divisors


class Rope:
    """The rotation of one model; its frequencies are worked out once."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self.frequencies = rope_frequencies(head_dim, theta, scaling)
        self.attention_factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0

    def rotation(self, positions: NDArray[Any], dtype: DTypeLike) -> tuple[Array, Array]:
        """cos and sin [T, d/2] of the angles of T positions, times the attention factor.

        Angles are float32, as the models were trained with; rounding them further (to bfloat16, say) would move far
        positions onto each other.
        """
        angles = (positions.astype(np.float32)[:, None] * self.frequencies).astype(dtype)
        factor = angles.dtype.type(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate each pair (x_i, x_{i + d/2}) of each head by its position's angle: x [T, heads, d], cos, sin [T, d/2].

    The dot of a rotated q and a rotated k then depends on how far apart their positions are, not on where they are.
    """
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Frequencies:
    """The angle per position of each pair, float32 [d/2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(theta, exponents.astype(np.float64)).astype(np.float32)  # θ^(2i/d); 2π of it is a full turn
    frequencies = 1 / periods
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / np.float32(scaling.factor)
    if isinstance(scaling, Divisors):
        return frequencies / np.array(scaling.values, np.float32)
    if isinstance(scaling, Llama3Scaling):
        return frequencies / llama3_divisors(frequencies, scaling)
    keep = _yarn_keep(head_dim, theta, scaling)
    return 1 / (np.float32(scaling.factor) * periods) * (1 - keep) + frequencies * keep


def llama3_divisors(frequencies: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """What Llama 3.1 divides its frequencies by: 1 … factor, float32 [d/2]; also what GGUF files keep."""
    f32 = np.float32
    positions_of_a_turn = f32(2 * math.pi) * (
        1 / frequencies
    )  # in this order as in PyTorch, where x / y is x · (1 / y)
    turns = f32(scaling.original_max_position_embeddings) * (1 / positions_of_a_turn)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - f32(low)) / f32(high - low), f32(0), f32(1))
    divisors = 1 / ((1 - smooth) / f32(scaling.factor) + smooth)
    return np.where(smooth == 0, f32(scaling.factor), divisors)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """1 + 0.1 · mscale · ln(factor): the paper's √(1/t), by which q and k grow so that far softmaxes stay sharp."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_keep(head_dim: int, theta: float, scaling: YarnScaling) -> Frequencies:
    """How much of each frequency is kept as it is: 1 for the fast pairs, 0 for the slow ones, a ramp between."""

    def pair_that_turns(times: float) -> float:
        """The (fractional) i whose pair turns this often within the original context."""
        turn = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(turn) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = (pairs - np.float32(first)) / np.float32(last - first)
    return 1 - np.clip(ramp, np.float32(0), np.float32(1))
