"""`qkv explain`: the chapter on attention, computed while you look."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qkv.cli import options, terminal
from qkv.cli.bars import Bars
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.explain.trace import Heads

SAMPLE = (
    "The capital of France is Paris, a city on the river Seine. Its best known tower was built for a fair in 1889, and "
    "many people wanted it taken down again. They were outvoted: the tower could carry a radio antenna. Today it is "
    "painted every seven years, by hand, with sixty tons of paint."
)
"""What a model reads while its attention is looked at."""

NARROW, WIDE = 80, 120


def explain(
    topic: Annotated[str, Argument(help="scaling, mask, convex, heads or cost.", show_default=False)],
    model: Annotated[
        str | None, Option("--model", "-m", help="Look into this model: hub id, short name, .gguf file or folder.")
    ] = None,
    png: Annotated[Path | None, Option(metavar="FILE", help="Also write a plot to this file.")] = None,
    threads: options.Threads = None,
) -> None:
    """Show what a part of attention does, with numbers computed now.

    \b
    qkv explain scaling              why scores are divided by the root of d
    qkv explain mask                 -inf before the softmax, and what else gives
    qkv explain convex               outputs lie between the values
    qkv explain heads                from x to o_proj, and who shares a key head
    qkv explain cost                 operations, bytes, and times measured here
    qkv explain scaling -m smollm2   also on a model's own q and k, by layer
    qkv explain mask --png mask.png  also as a plot

    --png needs matplotlib: pip install 'qkv[plots]'. Without -m nothing is fetched: scaling, mask and convex use random
    q, k and v, heads and cost the shape of Qwen3-0.6B. With -m the first three run the model on a few lines of text (in
    float32 in NumPy: 4 bytes a parameter); the others need only its shape.
    """
    if topic not in TOPICS:
        raise QkvError(f"unknown topic {topic!r}; qkv explains {', '.join(TOPICS)}")
    options.check_text("--model", model)
    if png is not None:
        from qkv.explain import figures

        figures.check_target(png)
        figure = figures.new_figure()
    views = TOPICS[topic](model, threads)
    width = max(NARROW, min(WIDE, shutil.get_terminal_size((NARROW, 24)).columns))
    if png is not None:
        figure.set_size_inches(13, sum(7.5 if topic == "mask" else 4.3 for _ in views))
        parts = figure.subfigures(len(views), 1, squeeze=False)[:, 0]
        for (module, result, name), part in zip(views, parts, strict=True):
            module.draw(result, name, part)
        figures.save(figure, png)
    text = "\n".join(module.report(result, name, width) for module, result, name in views)
    terminal.write(terminal.for_output(text))


View = tuple[ModuleType, Any, str]
"""A module of `qkv.explain`, what it computed, and the name of what that is about."""


def _scaling(model: str | None, threads: int | None) -> list[View]:
    from qkv.explain import model_scaling, scaling
    from qkv.opened import label

    views: list[View] = [(scaling, scaling.compute(), "random q and k")]
    if model is not None:
        views.append((model_scaling, model_scaling.compute(trace(model)), label(model)))
    return views


def _mask(model: str | None, threads: int | None) -> list[View]:
    from qkv.explain import mask

    if model is None:
        return [(mask, mask.compute(*mask.random_heads()), "random q, k and v")]
    heads, name = _middle(model)
    few = slice(mask.POSITIONS)
    return [(mask, mask.compute(heads.q[few, 0], heads.k[few, 0], heads.v[few, 0]), f"{name}, head 0")]


def _convex(model: str | None, threads: int | None) -> list[View]:
    from qkv.explain import convex

    if model is None:
        return [(convex, convex.compute(*convex.random_heads()), "random q, k and v; q of four sizes")]
    heads, name = _middle(model)
    return [(convex, convex.compute(heads.q, heads.k, heads.v), name)]


def _heads(model: str | None, threads: int | None) -> list[View]:
    from qkv.explain import heads
    from qkv.opened import known_model

    known = known_model(model or options.DEFAULT_MODEL)
    return [(heads, heads.compute(known.config), known.label)]


def _cost(model: str | None, threads: int | None) -> list[View]:
    from qkv.explain import attention_cost
    from qkv.opened import known_model, thread_count

    known = known_model(model or options.DEFAULT_MODEL)
    with Bars() as bars:
        return [(attention_cost, attention_cost.compute(known.config, thread_count(threads), bars), known.label)]


TOPICS = {"scaling": _scaling, "mask": _mask, "convex": _convex, "heads": _heads, "cost": _cost}


def _middle(model: str) -> tuple[Heads, str]:
    """The layer in the middle of a model, and its name."""
    from qkv.opened import label

    layers = trace(model)
    layer = len(layers) // 2
    return layers[layer], f"{label(model)}, layer {layer}"


def trace(model: str) -> list[Heads]:
    """Fetch a model if need be, and run it in NumPy on `SAMPLE`: q, k and v of every layer."""
    from qkv.explain.trace import Traced
    from qkv.opened import open_model
    from qkv.runtime.memory import free_memory

    with Bars() as bars:
        opened = open_model(model, bars)
        ids, stored = opened.tokenizer.prompt(SAMPLE), opened.checkpoint.tensors
        needed, free = 4 * opened.config.parameter_count, free_memory()
        if free is not None and needed > free:
            raise QkvError(
                f"{model} takes {terminal.bytes_text(needed)} in float32, and {terminal.bytes_text(free)} of memory "
                "are free; look into a smaller one, such as smollm2"
            )
        tensors = {}
        for done, (name, tensor) in enumerate(stored.items()):
            bars(f"reading {model}", done, len(stored), "tensors")
            tensors[name] = tensor.to_float32()
        bars(f"reading {model}", len(stored), len(stored), "tensors")
    return Traced(opened.config, tensors).trace(ids)
