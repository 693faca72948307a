"""What the book's figures show, and the captions they quote numbers in. `make_figures.py` makes and records them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from qkv.explain.model_scaling import compute as compute_model
from qkv.explain.trace import Heads, Traced
from qkv.model import reference
from qkv.model.attention import attention, attention_weights, future, softmax
from qkv.model.config import PRESETS, ModelConfig
from qkv.model.cost import cache_bytes_per_position
from qkv.model.reference import Decoder
from qkv.model.rope import Rope, rotate
from qkv.text.tokens.tokenizer import Tokenizer
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.names import resolve

MODEL = "src/qkv/model"
SCALING = "src/qkv/explain/model_scaling.py"

TEXT = (
    "The library opens at nine. Rain has been falling since the morning, and the street in front of it is almost "
    "empty. An old man with a red umbrella waits at the door; he has brought back three books about the sea. Inside, "
    "somebody switches on the lights, one room after another, until every window is yellow. When the door opens at "
    "last, the man shakes the water from his umbrella, says good morning, and asks whether there is a fourth book "
    "about the sea."
)
REPEATED = "The small cat sat on the red mat. The small cat sat on the"
QUESTION = "The capital of France is"

BLUE, ORANGE, GREEN, GRAY = "#3f8fd2", "#e08a3c", "#3fa66b", "#8a8f98"  # mid-tones: legible on white and on black


Drawing = tuple[Any, dict[str, Any]]  # a matplotlib figure, and the numbers that its caption quotes


@dataclass(frozen=True)
class Recipe:
    """How a figure is made, and from what."""

    draw: Callable[[], Drawing]
    shows: tuple[str, ...]  # includes (see sync.py) of the functions whose results it shows


RECIPES: dict[str, Recipe] = {}


def figure(name: str, *shows: str) -> Callable[[Callable[[], Drawing]], Callable[[], Drawing]]:
    """Register a drawing function under the name its PNG has."""

    def register(draw: Callable[[], Drawing]) -> Callable[[], Drawing]:
        RECIPES[name] = Recipe(draw, shows)
        return draw

    return register


# ------------------------------------------------------------------------------------------ the model, looked into


class Recorder(Decoder):
    """A reference decoder that keeps what goes into its norms and what comes out of its matrices, by name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.normed: dict[str, Any] = {}
        self.products: dict[str, Any] = {}

    def _norm(self, x: Any, name: str) -> Any:
        self.normed[name] = x
        return super()._norm(x, name)

    def _linear(self, x: Any, name: str) -> Any:
        self.products[name] = super()._linear(x, name)
        return self.products[name]


class Record(NamedTuple):
    """What was seen while a text went through the model."""

    tokens: list[str]
    calls: list[tuple[Any, Any, Any]]  # each layer's q, k and v as attention gets them
    logits: Any
    normed: dict[str, Any]  # of `Recorder`
    products: dict[str, Any]


@cache
def smollm2() -> tuple[Recorder, Tokenizer]:
    """SmolLM2-135M in float32, and its tokenizer."""
    checkpoint = open_checkpoint(resolve("smollm2"))
    tensors = {name: tensor.to_float32() for name, tensor in checkpoint.tensors.items()}
    return Recorder(checkpoint.config, tensors), Tokenizer.from_gguf(checkpoint.tokenizer, "smollm2")


@cache
def recorded(text: str) -> Record:
    """The text run through the model."""
    model, tokenizer = smollm2()
    ids = tokenizer.encode(text)
    calls: list[tuple[Any, Any, Any]] = []

    def watched(q: Any, k: Any, v: Any) -> Any:
        calls.append((q, k, v))
        return attention(q, k, v)

    reference.attention = watched
    try:
        logits = model(ids)
    finally:
        reference.attention = attention
    tokens = [tokenizer.decode([id]) for id in ids]
    return Record(tokens, calls, logits, dict(model.normed), dict(model.products))


def residual_streams(record: Record) -> list[Any]:
    """The residual stream before each layer and after the last, [T, hidden] each."""
    layers = [name for name in record.normed if name.endswith("input_layernorm")]
    return [record.normed[name] for name in (*layers, "model.norm")]


def rms(x: Any) -> float:
    """√(mean of the squares)."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


# ------------------------------------------------------------------------------------------ the figures


def axes(columns: int = 1, width: float = 7.2, height: float = 2.9) -> tuple[Any, Any]:
    """An empty plot, transparent, in colours that can be read on a light and on a dark page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plain = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY)
    plt.rcParams.update(
        plain
        | {"font.size": 9.5, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
        | {"legend.frameon": False, "grid.color": GRAY, "grid.alpha": 0.25, "lines.linewidth": 2}
    )
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


@figure("norm", f"{MODEL}::rms_norm", f"{MODEL}::Decoder.forward")
def draw_norm() -> Drawing:
    """RMS of the residual stream as each layer's first norm sees it."""
    streams = residual_streams(recorded(TEXT))
    first = [rms(x[0]) for x in streams]
    others = [rms(x[1:]) for x in streams]
    plot, ax = axes()
    ax.semilogy(first, color=ORANGE, label="first token")
    ax.semilogy(others, color=BLUE, label="other tokens")
    ax.axhline(1, color=GREEN, linestyle="--", label="after the norm, before its weight")
    ax.set(xlabel="layer", ylabel="RMS of x")
    ax.legend(loc="upper left", bbox_to_anchor=(0.47, 0.93))
    ax.grid()
    largest = np.sort(np.square(streams[first.index(max(first))][0], dtype=np.float64))[::-1]
    numbers = {
        "start": round(others[0], 2),
        "end": round(others[-1], 1),
        "first": round(max(first)),
        "three": round(float(largest[:3].sum() / largest.sum()), 3),
    }
    return plot, numbers


@figure("qkv", f"{MODEL}::Decoder._attention", f"{MODEL}::rms_norm")
def draw_qkv() -> Drawing:
    """RMS of q, k and v by layer."""
    calls = recorded(TEXT).calls
    sizes = {name: [rms(call[i]) for call in calls] for i, name in enumerate("qkv")}
    plot, ax = axes()
    for name, color in zip("qkv", (BLUE, ORANGE, GREEN), strict=True):
        ax.plot(sizes[name], color=color, label=name)
    ax.set(xlabel="layer", ylabel="RMS of a component", ylim=(0, None))
    ax.legend()
    ax.grid()
    numbers = {f"{name}_{end}": round(sizes[name][at], 2) for name in "qkv" for end, at in (("first", 0), ("last", -1))}
    return plot, numbers


@figure("rope", f"{MODEL}::rotate", f"{MODEL}::Rope", f"{MODEL}::rope_frequencies")
def draw_rope() -> Drawing:
    """Turning of some pairs, and the score of one vector with itself at a distance."""
    d, theta, positions = 128, PRESETS["Qwen/Qwen3-0.6B"].rope_theta, np.arange(256)
    cos, sin = Rope(d, theta).rotation(positions, np.float64)
    x = np.ones((len(positions), 1, d)) / np.sqrt(d)
    turned = rotate(x, cos, sin)[:, 0]
    scores = turned @ turned[0]
    plot, (left, right) = axes(2)
    for pair, color in ((0, BLUE), (8, ORANGE), (16, GREEN), (32, GRAY)):
        left.plot(positions[:128], cos[:128, pair], color=color, label=f"pair {pair}", linewidth=1.4)
    left.set(xlabel="position", title="cos of the angle")
    left.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, fontsize=7.5, columnspacing=1, handlelength=1.2
    )
    right.plot(positions, scores, color=BLUE)
    right.set(xlabel="distance i − j", title="⟨rope(x, i), rope(x, j)⟩, |x| = 1", ylim=(0, 1.03))
    right.grid()
    longest = 2 * np.pi * theta ** ((d - 2) / d)
    numbers = {
        "at_1": round(float(scores[1]), 2),
        "at_100": round(float(scores[100]), 2),
        "millions": round(longest / 1e6, 1),
    }
    return plot, numbers


@figure("scores", f"{MODEL}/attention.py::attention_scores", f"{MODEL}::Decoder._attention")
def draw_scores() -> Drawing:
    """Spread of <q, k> by layer: as the assumption has it, and as it is."""
    calls = recorded(TEXT).calls
    d, group = calls[0][0].shape[2], calls[0][0].shape[1] // calls[0][1].shape[1]
    assumed, spread, mean = [], [], []
    for q, k, _ in calls:
        q, k = q.astype(np.float64), np.repeat(k.astype(np.float64), group, axis=1)
        dots = np.einsum("ihd,jhd->hij", q, k)[:, np.tri(len(q), dtype=bool)]
        assumed.append(np.sqrt(d) * rms(q) * rms(k))
        spread.append(float(dots.std(axis=1).mean()))
        mean.append(float(np.abs(dots.mean(axis=1)).mean()))
    plot, ax = axes()
    ax.plot(assumed, color=GRAY, linestyle="--", label="√d·σ_q·σ_k: spread if components were independent")
    ax.plot(spread, color=BLUE, label="spread within a head")
    ax.plot(mean, color=ORANGE, label="|mean| of a head: 0 if the assumption held")
    ax.set(xlabel="layer", ylabel="⟨q, k⟩", ylim=(0, None))
    ax.legend(fontsize=8)
    ax.grid()
    numbers = {
        "assumed": round(float(np.mean(assumed)), 1),
        "spread": round(float(np.mean(spread)), 1),
        "mean": round(float(np.mean(mean)), 1),
    }
    return plot, numbers


class Both(Recorder, Traced):
    """Keeps what a `Recorder` keeps, and traces."""


@cache
def fresh_qwen3(T: int = 256) -> tuple[list[Heads], list[Any]]:
    """Qwen3-0.6B as training begins: weights of deviation 0.02, norms of 1, T random tokens. Heads and streams."""
    config = replace(PRESETS["Qwen/Qwen3-0.6B"], vocab_size=4096)
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)
        for name, shape in config.parameter_shapes().items()
    }
    model = Both(config, tensors)
    layers = model.trace(rng.integers(0, config.vocab_size, T).tolist())
    return layers, [x for name, x in model.normed.items() if name.endswith("input_layernorm")]


def likeness(x: Any) -> float:
    """The mean cosine between the rows of two different positions."""
    units = x / np.linalg.norm(x, axis=1, keepdims=True)
    T = len(x)
    return float((np.square(units.sum(axis=0, dtype=np.float64)).sum() - T) / (T * (T - 1)))


@figure("depth", f"{SCALING}::compute", f"{SCALING}::_dots_of", f"{MODEL}::Decoder._attention")
def draw_depth() -> Drawing:
    """Var<q, k> / (d·σ_q²·σ_k²) by layer, for random and for trained weights, with and without what positions share."""
    fresh, streams = fresh_qwen3()
    model, tokenizer = smollm2()
    trained = Traced(model.config, model.tensors).trace(tokenizer.encode(TEXT))
    plot, panels = axes(2)
    found = [compute_model(layers).stages[0] for layers in (fresh, trained)]
    for ax, stage, title in zip(panels, found, ("Qwen3-0.6B, random weights", "SmolLM2, trained"), strict=True):
        ax.axhline(1, color=GRAY, linewidth=1, linestyle="--")
        ax.plot(stage.ratio, color=BLUE, label="q and k as they are")
        ax.plot(stage.own, color=ORANGE, label="without their means over the positions")
        ax.set(title=title, xlabel="layer", ylim=(0, None))
        ax.grid()
    panels[0].set(ylabel="Var⟨q,k⟩ / (d·σ_q²·σ_k²)", ylim=(0, 1.7))
    panels[0].legend(fontsize=8, loc="upper right")
    numbers = {
        "first": round(float(found[0].ratio[0]), 2),
        "fourth": round(float(found[0].ratio[4]), 2),
        "last": round(float(found[0].ratio[-1]), 2),
        "own_low": round(float(found[0].own.min()), 2),
        "own_high": round(float(found[0].own.max()), 2),
        "like_first": round(likeness(streams[0]), 2) + 0.0,
        "like_last": round(likeness(streams[-1]), 2),
        "trained": round(float(found[1].ratio.mean()), 2),
        "trained_own": round(float(found[1].own.mean()), 2),
    }
    return plot, numbers


@figure("heads", f"{MODEL}/attention.py::attention_weights", f"{MODEL}::Decoder._attention")
def draw_heads() -> Drawing:
    """Four heads' weights on a sentence that begins again."""
    tokens, calls, *_ = recorded(REPEATED)
    group, T = smollm2()[0].config.heads_per_kv_head, len(tokens)
    chosen = {"broad": (0, 1), "previous": (16, 0), "induction": (18, 6), "first": (18, 8)}
    maps = {
        name: attention_weights(calls[layer][0][:, head], calls[layer][1][:, head // group])
        for name, (layer, head) in chosen.items()
    }
    again = [(i, j + 1) for i in range(T) for j in range(1, i - 1) if tokens[i] == tokens[j] and i - j > 2]
    layer, head = chosen["first"]
    lengths = np.linalg.norm(calls[layer][2][:, head // group], axis=1)
    numbers = {
        "broad": round(float(np.mean([perplexity(row) for row in maps["broad"][-5:]])), 1),
        "previous": round(float(np.mean([maps["previous"][i, i - 1] for i in range(2, T)])), 2),
        "induction": round(float(np.mean([maps["induction"][pair] for pair in again])), 2),
        "first": round(float(maps["first"][1:, 0].mean()), 3),
        "first_value": round(float(lengths[0] / lengths[1:].mean()), 2),
    }
    plot, panels = axes(4, width=9.2, height=2.9)
    for ax, (name, (layer, head)) in zip(panels, chosen.items(), strict=True):
        ax.imshow(np.where(future(T, T), np.nan, maps[name]), cmap="magma", vmin=0, vmax=1)
        ax.set_title(f"layer {layer}, head {head}")
        ax.set_xticks(range(T), [token.strip() for token in tokens], rotation=90, fontsize=7)
        shown = ax is panels[0]
        ax.set_yticks(range(T), [token.strip() for token in tokens] if shown else [""] * T, fontsize=7)
        ax.spines[:].set_visible(False)
    return plot, numbers


@figure("hull", f"{MODEL}/attention.py::attention_head", f"{MODEL}::Decoder._attention")
def draw_hull() -> Drawing:
    """Where output coordinates lie between the extremes of the values they are made of."""
    calls = recorded(TEXT).calls
    group = smollm2()[0].config.heads_per_kv_head
    places, ratios = [], []
    for q, k, v in calls:
        for head in range(q.shape[1]):
            values = v[:, head // group].astype(np.float64)
            o = attention_weights(q[:, head].astype(np.float64), k[:, head // group].astype(np.float64)) @ values
            low, high = np.minimum.accumulate(values), np.maximum.accumulate(values)
            places.append(((o - low) / (high - low + 1e-300))[1:].ravel())
            sizes = np.linalg.norm(values, axis=1)
            ratios.append((np.linalg.norm(o, axis=1) / np.maximum.accumulate(sizes))[1:])
    place, ratio = np.concatenate(places), np.concatenate(ratios)
    plot, (left, right) = axes(2)
    left.hist(place, bins=60, range=(-0.05, 1.05), color=BLUE)
    left.set(xlabel="0: the smallest value seen, 1: the largest", title="each coordinate of o", yticks=[])
    right.hist(ratio, bins=60, range=(0, 1.1), color=ORANGE)
    right.set(xlabel="‖o_i‖ / max ‖v_j‖", title="length of o", yticks=[])
    slack = 1e-9
    numbers = {
        "outputs": len(ratio),
        "outside": int(np.count_nonzero((place < -slack) | (place > 1 + slack))),
        "longest": round(float(ratio.max()), 2),
        "median_ratio": round(float(np.median(ratio)), 2),
    }
    return plot, numbers


@figure("cost", f"{MODEL}::ModelConfig", f"{MODEL}::_qwen3")
def draw_cost() -> Drawing:
    """Work of one layer of Qwen3-0.6B: products with weights, and attention."""
    config = PRESETS["Qwen/Qwen3-0.6B"]
    width = config.num_attention_heads * config.head_dim
    linear = 2 * layer_matrix_weights(config)
    T = np.logspace(1, 5, 81)
    crossing = linear / (4 * width)
    plot, (left, right) = axes(2)
    left.loglog(T, 4 * width * T**2, color=ORANGE, label="attention, 4·H·T²·d")
    left.loglog(T, linear * T, color=BLUE, label="products with weights")
    left.set(xlabel="T", title="prefill of T tokens, FLOP")
    right.loglog(T, 4 * width * T, color=ORANGE)
    right.loglog(T, linear + 0 * T, color=BLUE)
    right.set(xlabel="T", title="decoding one token after T, FLOP")
    left.legend(fontsize=8)
    for ax in (left, right):
        ax.axvline(crossing, color=GRAY, linestyle=":")
        ax.grid()
    numbers = {"linear": linear, "crossing": round(crossing)}
    return plot, numbers


def perplexity(weights: Any) -> float:
    """e^entropy: over how many positions weights are spread, if evenly."""
    return float(np.exp(-np.sum(weights * np.log(np.maximum(weights, 1e-30)))))


def layer_matrix_weights(config: ModelConfig) -> int:
    """Weights of one layer's matrices."""
    shapes = config.parameter_shapes().items()
    return sum(shape[0] * shape[1] for name, shape in shapes if ".layers.0." in name and len(shape) == 2)


@figure("mlp", f"{MODEL}::Decoder._mlp", f"{MODEL}::silu")
def draw_mlp() -> Drawing:
    """How few of the units carry the MLP's inner vector."""
    products = recorded(TEXT).products
    layers = range(smollm2()[0].config.num_hidden_layers)
    shares, ever = [], []
    for layer in layers:
        name = f"model.layers.{layer}.mlp."
        act = reference.silu(products[name + "gate_proj"]) * products[name + "up_proj"]
        squares = np.square(act[1:], dtype=np.float64)  # the first token is a case apart
        order = np.argsort(-squares, axis=1)
        energy = np.take_along_axis(squares, order, axis=1).cumsum(axis=1)
        counts = (energy < 0.9 * energy[:, -1:]).sum(axis=1) + 1
        shares.append(float(np.mean(counts)) / act.shape[1])
        carriers = {int(unit) for row, count in zip(order, counts, strict=True) for unit in row[:count]}
        ever.append(len(carriers) / act.shape[1])
    plot, ax = axes()
    ax.bar(list(layers), [100 * share for share in shares], color=BLUE)
    ax.set(xlabel="layer", ylabel="% of units", ylim=(0, None))
    ax.grid(axis="y")
    numbers = {
        "least": round(100 * min(shares)),
        "most": round(100 * max(shares)),
        "mean": round(100 * float(np.mean(shares))),
        "ever": round(100 * float(np.mean(ever))),
    }
    return plot, numbers


@figure("logits", f"{MODEL}::Decoder.logits", f"{MODEL}::Decoder.forward")
def draw_logits() -> Drawing:
    """The next token as each layer would have it, if it were the last."""
    record = recorded(QUESTION)
    model, tokenizer = smollm2()
    final = int(np.argmax(record.logits[-1]))
    weight, eps = model.tensors["model.norm.weight"], model.config.rms_norm_eps
    streams = [x[-1] for x in residual_streams(record)]
    rows = [model.logits(reference.rms_norm(x, weight, eps)) for x in streams]
    ranks = [int(np.count_nonzero(row > row[final])) + 1 for row in rows]
    plot, ax = axes()
    ax.semilogy(ranks, color=BLUE, marker="o", markersize=3)
    ax.invert_yaxis()
    ax.set(xlabel="layers computed", ylabel=f"rank of “{tokenizer.decode([final])}”")
    ax.grid()
    numbers = {
        "question": QUESTION,
        "token": tokenizer.decode([final]),
        "ranks": ranks,
        "start": ranks[0],
        "top_ten": next(layer for layer in range(len(ranks)) if max(ranks[layer:]) <= 10),
        "settled": next(layer for layer in range(len(ranks)) if max(ranks[layer:]) == 1),
    }
    return plot, numbers


@figure("sampling", f"{MODEL}/attention.py::softmax", f"{MODEL}::Decoder.logits")
def draw_sampling() -> Drawing:
    """Probabilities of the next token at three temperatures."""
    logits = recorded(QUESTION).logits
    tokenizer = smollm2()[1]
    row = logits[-1].astype(np.float64)
    order = np.argsort(-row)[:12]
    plot, ax = axes()
    at = {T: softmax(row / T) for T in (0.5, 1.0, 1.5)}
    for i, (T, color) in enumerate(zip(at, (BLUE, ORANGE, GREEN), strict=True)):
        ax.bar(np.arange(len(order)) + 0.27 * (i - 1), 100 * at[T][order], 0.27, color=color, label=f"temperature {T}")
    ax.set_xticks(range(len(order)), [tokenizer.decode([id]).strip() or "(space)" for id in order], fontsize=8)
    ax.set(ylabel="probability, %")
    ax.legend()
    names = {0.5: "low", 1.0: "one", 1.5: "high"}
    numbers: dict[str, Any] = {names[T]: round(float(at[T].max()), 2) for T in at}
    numbers |= {"question": QUESTION, "tail": round(float(1 - at[1.5][order].sum()), 2)}
    return plot, numbers


@figure("cache", "src/qkv/model/cost.py::cache_bytes_per_position", f"{MODEL}::_qwen3")
def draw_cache() -> Drawing:
    """Cache against weights of Qwen3-0.6B."""
    config = PRESETS["Qwen/Qwen3-0.6B"]
    per_position = {kind: cache_bytes_per_position(config, kind) for kind in ("f16", "int8")}
    weights = config.parameter_count * 4.5 / 8
    T = np.linspace(0, config.max_position_embeddings, 100)
    plot, ax = axes()
    for (kind, size), color in zip(per_position.items(), (BLUE, GREEN), strict=True):
        ax.plot(T, T * size / 1e9, color=color, label=f"{kind} cache")
    ax.axhline(weights / 1e9, color=GRAY, linestyle="--", label="all weights at 4.5 bits")
    ax.set(xlabel="positions", ylabel="GB", xlim=(0, None), ylim=(0, None))
    ax.legend()
    ax.grid()
    numbers = {
        "f16": per_position["f16"],
        "int8": per_position["int8"],
        "equal_f16": round(weights / per_position["f16"]),
        "full": round(per_position["f16"] * config.max_position_embeddings / 1e9, 1),
    }
    return plot, numbers


@figure("outliers", f"{MODEL}::Decoder._mlp", f"{MODEL}::silu")
def draw_outliers() -> Drawing:
    """How far the largest activation of a group stands out."""
    products = recorded(TEXT).products
    names = [f"model.layers.{layer}.mlp." for layer in range(smollm2()[0].config.num_hidden_layers)]
    inputs = [reference.silu(products[name + "gate_proj"]) * products[name + "up_proj"] for name in names]
    groups = np.concatenate([x[1:].reshape(-1, 32) for x in inputs]).astype(np.float64)  # the first token is apart
    sizes = np.sort(np.abs(groups), axis=1)
    ratios = sizes[:, -1] / sizes[:, -2]
    shown = int(np.argsort(ratios)[round(0.99 * len(ratios))])
    plot, (left, right) = axes(2)
    left.bar(range(32), groups[shown] / sizes[shown, -2], color=BLUE)
    left.set(xlabel="number in its group", title="one group; the second largest is 1")
    above = np.linspace(1, 8, 141)
    right.semilogy(above, [100 * float(np.mean(ratios > r)) for r in above], color=ORANGE)
    right.set(xlabel="largest / second largest", title="% of groups beyond that", xlim=(1, 8))
    for ax in (left, right):
        ax.grid()
    numbers = {
        "groups": len(ratios),
        "shown": round(float(ratios[shown]), 1),
        "median": round(float(np.median(ratios)), 2),
        "double": round(100 * float(np.mean(ratios > 2))),
    }
    return plot, numbers


@figure("batch", f"{MODEL}::_qwen3")
def draw_batch() -> Drawing:
    """What a token reads from memory when several sequences share a step."""
    config = PRESETS["Qwen/Qwen3-0.6B"]
    weights = config.parameter_count * 4.5 / 8
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2  # keys and values, f16
    batches = np.arange(1, 33)
    read = {T: (weights / batches + T * position) / 1e6 for T in (128, 2048, 8192)}
    plot, ax = axes()
    for (T, megabytes), color in zip(read.items(), (BLUE, ORANGE, GREEN), strict=True):
        ax.loglog(batches, megabytes, color=color, label=f"{T:,} positions each")
    ax.set(xlabel="sequences in the step", ylabel="MB read for a token")
    ax.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    ax.legend()
    ax.grid()
    numbers = {
        "weights": round(weights / 1e6),
        **{f"one_{T}": round(float(read[T][0])) for T in read},
        **{f"eight_{T}": round(float(read[T][7])) for T in read},
    }
    return plot, numbers


@figure("drafts")
def draw_drafts() -> Drawing:
    """Tokens of a step against the chance of a guess."""
    chance = np.linspace(0, 1, 201)
    expected = {k: sum(chance**i for i in range(k + 1)) for k in (1, 3, 7)}
    plot, ax = axes()
    for (k, tokens), color in zip(expected.items(), (GREEN, BLUE, ORANGE), strict=True):
        ax.plot(chance, tokens, color=color, label=f"{k} guess{'es' * (k > 1)}")
    ax.set(xlabel="chance that a guess is right", ylabel="tokens of a step", xlim=(0, 1), ylim=(1, 8))
    ax.legend()
    ax.grid()
    numbers = {
        f"{name}_{k}": round(float(expected[k][at]), 1) for k in (3, 7) for name, at in (("half", 100), ("most", 180))
    }
    return plot, numbers
