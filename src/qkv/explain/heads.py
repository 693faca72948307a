"""Heads: the shapes from x to o_proj, who shares a key/value head, and what hidden/H instead of head_dim would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.explain.charts import paragraph, table
from qkv.explain.figures import COLOURS, GREY
from qkv.model.config import ModelConfig
from qkv.model.cost import cache_bytes_per_position


@dataclass(frozen=True)
class Step:
    """One line of the way from x to x + attention."""

    name: str
    does: str
    shape: tuple[str, ...]  # for T tokens


@dataclass(frozen=True)
class Sizes:
    """What follows from a head's size."""

    head_dim: int
    q_size: int  # H·d
    kv_size: int  # H_kv·d
    parameters: int  # of q, k, v and o_proj in all layers
    cache_bytes: int  # of one position, f16
    scale: float  # 1/√d


@dataclass(frozen=True)
class HeadShapes:
    """How a model's heads are arranged."""

    config: ModelConfig
    steps: list[Step]
    groups: list[list[int]]  # the query heads of each key/value head
    right: Sizes
    wrong: Sizes | None  # with head_dim = hidden/H; None where that is head_dim, or not a whole number


def compute(config: ModelConfig) -> HeadShapes:
    """From the config alone."""
    hidden, heads, kv_heads, d = (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    steps = [
        Step("x", "the residual stream, normed", ("T", f"{hidden}")),
        Step("q_proj", f"H·d = {heads}·{d}", ("T", f"{heads * d}")),
        Step("k_proj, v_proj", f"H_kv·d = {kv_heads}·{d} each", ("T", f"{kv_heads * d}")),
        Step("q", "cut into heads", ("T", f"{heads}", f"{d}")),
        Step("k, v", "cut into heads", ("T", f"{kv_heads}", f"{d}")),
        *([Step("norm", "RMSNorm of each head of q and k", ("T", "heads", f"{d}"))] if config.qk_norm else []),
        Step("RoPE", "turns q and k by their positions", ("T", "heads", f"{d}")),
        Step("scores", f"<q, k>/√{d}, for each query head", (f"{heads}", "T", "T")),
        Step("o", "Σ weights · v, for each query head", ("T", f"{heads}", f"{d}")),
        Step("concatenated", f"H·d = {heads}·{d}", ("T", f"{heads * d}")),
        Step("o_proj", f"{heads * d} → {hidden}", ("T", f"{hidden}")),
    ]
    share = config.heads_per_kv_head
    groups = [list(range(g * share, (g + 1) * share)) for g in range(kv_heads)]
    wrong = _sizes(config, hidden // heads) if hidden % heads == 0 and hidden // heads != d else None
    return HeadShapes(config, steps, groups, _sizes(config, d), wrong)


def _sizes(config: ModelConfig, d: int) -> Sizes:
    q_size, kv_size = config.num_attention_heads * d, config.num_key_value_heads * d
    parameters = config.num_hidden_layers * 2 * config.hidden_size * (q_size + kv_size)
    cache_bytes = round(cache_bytes_per_position(config, "f16") * d / config.head_dim)
    return Sizes(d, q_size, kv_size, parameters, cache_bytes, d**-0.5)


def report(result: HeadShapes, name: str, width: int) -> str:
    """Text, tables and the sharing of heads for a terminal."""
    config, right = result.config, result.right
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    relation = "≠" if right.q_size != config.hidden_size else "="
    text = paragraph(
        f"""{name} has H = {heads} query heads of d = {d} numbers, and H_kv = {kv_heads} key/value heads. The size of a
        head is a number of its own (head_dim): H·d = {right.q_size} {relation}
        hidden = {config.hidden_size}. Each head attends by itself; their outputs, one after the other, go through
        o_proj: {config.hidden_size} → {heads}·{d} = {right.q_size} → {config.hidden_size}.""",
        width,
    )
    rows = [("", "what it does", "shape for T tokens")]
    rows += [(step.name, step.does, f"[{', '.join(step.shape)}]") for step in result.steps]
    text += table(rows, left=3) + "\n"
    text += paragraph(
        f"""Query head h reads key/value head h // (H/H_kv) = h // {config.heads_per_kv_head}: neighbours share, and the
        KV cache holds {kv_heads} heads instead of {heads}, {right.cache_bytes:,} bytes a token in f16 instead of
        {right.cache_bytes * heads // kv_heads:,}.""",
        width,
    )
    text += _sharing(result.groups, width) + "\n"
    return text + _wrong(result, width)


def _sharing(groups: list[list[int]], width: int) -> str:
    """Boxes of query heads over the key/value head they share, as many beside each other as fit."""
    size = len(f"{groups[-1][-1]}")
    boxes = []
    for g, group in enumerate(groups):
        queries = " ".join(f"q{h:<{size}}" for h in group)
        inner = max(len(queries), len(f"k{g} v{g}"))
        boxes.append((queries.center(inner), "└" + "─" * (inner - 2) + "┘", f"k{g} v{g}".center(inner)))
    per_line = max(1, (width + 2) // (len(boxes[0][0]) + 3))
    text = ""
    for first in range(0, len(boxes), per_line):
        lines = zip(*boxes[first : first + per_line], strict=True)
        text += "".join("   ".join(parts).rstrip() + "\n" for parts in lines)
    return text


def _wrong(result: HeadShapes, width: int) -> str:
    """What a head of hidden/H numbers would change."""
    config, right, wrong = result.config, result.right, result.wrong
    ratio = config.hidden_size / config.num_attention_heads
    division = f"hidden/H = {config.hidden_size}/{config.num_attention_heads} = {ratio:g}"
    if wrong is None:
        same = "the size of its heads" if ratio == config.head_dim else "not even a whole number"
        return paragraph(f"{division}: {same} here.", width)
    text = paragraph(f"Many models have d = hidden/H. Here d = {division} would be a decoder of another shape.", width)
    rows = [
        ("", f"head_dim = {right.head_dim}", f"hidden/H = {wrong.head_dim}"),
        ("q_proj's outputs, o_proj's inputs", f"{right.q_size:,}", f"{wrong.q_size:,}"),
        ("k_proj's and v_proj's outputs", f"{right.kv_size:,}", f"{wrong.kv_size:,}"),
        ("parameters of q, k, v, o", f"{right.parameters:,}", f"{wrong.parameters:,}"),
        ("KV cache, bytes a token (f16)", f"{right.cache_bytes:,}", f"{wrong.cache_bytes:,}"),
        ("scale 1/√d", f"{right.scale:.4f}", f"{wrong.scale:.4f}"),
    ]
    text += table(rows) + "\n"
    return text + paragraph(
        f"""A loader that checks shapes refuses it, since q_proj has {right.q_size:,} rows. Another would cut each head
        of {right.head_dim} into {right.head_dim / wrong.head_dim:g}, and its scale alone would make scores
        {wrong.scale / right.scale:.3f} times too large.""",
        width,
    )


def draw(result: HeadShapes, name: str, figure: Any) -> None:
    """Bars of the widths from x to o_proj, and lines from query heads to key/value heads."""
    widths, sharing = figure.subplots(1, 2)
    config, right = result.config, result.right
    names = ["o_proj", "o, concatenated", "v", "k", "q", "x"]
    sizes = [config.hidden_size, right.q_size, right.kv_size, right.kv_size, right.q_size, config.hidden_size]
    drawn = widths.barh(names, sizes, color=[GREY, COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[0], GREY])
    widths.bar_label(drawn, [f"{size:,}" for size in sizes], padding=3)
    widths.set(title=f"{name}: numbers a token has at each step", xlim=(0, 1.15 * max(sizes)))
    for g, group in enumerate(result.groups):
        middle = sum(group) / len(group)
        for h in group:
            sharing.plot([h, middle], [1, 0], color=COLOURS[g % 6], linewidth=1)
            sharing.text(h, 1.03, f"q{h}", ha="center", va="bottom", fontsize=7, rotation=90)
        sharing.plot(group, [1] * len(group), "o", color=COLOURS[g % 6], markersize=4)
        sharing.plot([middle], [0], "s", color=COLOURS[g % 6])
        sharing.text(middle, -0.06, f"k{g} v{g}", ha="center", va="top", fontsize=7, rotation=90)
    sharing.set(title="who reads which key/value head", ylim=(-0.35, 1.25))
    sharing.set_axis_off()
