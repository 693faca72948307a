"""`qkv explain`: the chapter on attention, computed while you look."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qkv.cli import options, terminal
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


@dataclass(frozen=True)
class View:
    """What a topic shows: text for the terminal, and plots, one above the other."""

    text: str
    draw: list[Callable[[Any], None]]
    height: float = 4.3  # inches of each


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
    view = TOPICS[topic](model, _width(), threads)
    if png is not None:
        figure.set_size_inches(13, view.height * len(view.draw))
        for draw, part in zip(view.draw, figure.subfigures(len(view.draw), 1, squeeze=False)[:, 0], strict=True):
            draw(part)
        figures.save(figure, png)
    terminal.write(terminal.for_output(view.text))


def _scaling(model: str | None, width: int, threads: int | None) -> View:
    from qkv.explain import scaling
    from qkv.opened import label

    result = scaling.compute()
    view = View(scaling.report(result, width), [lambda figure: scaling.draw(result, figure)])
    if model is None:
        return view
    found = scaling.compute_model(trace(model))
    text = f"{view.text}\n{scaling.report_model(found, label(model), width)}"
    return View(text, [*view.draw, lambda figure: scaling.draw_model(found, label(model), figure)])


def _mask(model: str | None, width: int, threads: int | None) -> View:
    from qkv.explain import mask
    from qkv.opened import label

    if model is None:
        (q, k, v), source = mask.random_heads(), "random q, k and v"
    else:
        layer, heads = _middle(trace(model))
        few = mask.POSITIONS
        q, k, v = heads.q[:few, 0], heads.k[:few, 0], heads.v[:few, 0]
        source = f"{label(model)}, layer {layer}, head 0"
    cases = mask.compute(q, k, v)
    return View(mask.report(cases, source, width), [lambda figure: mask.draw(cases, figure)], height=7.5)


def _convex(model: str | None, width: int, threads: int | None) -> View:
    from qkv.explain import convex
    from qkv.opened import label

    if model is None:
        (q, k, v), source = convex.random_heads(), "random q, k and v; q of four sizes"
    else:
        layer, heads = _middle(trace(model))
        (q, k, v), source = (heads.q, heads.k, heads.v), f"{label(model)}, layer {layer}"
    result = convex.compute(q, k, v)
    return View(convex.report(result, source, width), [lambda figure: convex.draw(result, figure)])


def _heads(model: str | None, width: int, threads: int | None) -> View:
    from qkv.explain import heads
    from qkv.opened import known_model

    known = known_model(model or options.DEFAULT_MODEL)
    result = heads.compute(known.config)
    return View(heads.report(result, known.label, width), [lambda figure: heads.draw(result, known.label, figure)])


def _cost(model: str | None, width: int, threads: int | None) -> View:
    from qkv.cli.bars import Bars
    from qkv.explain import attention_cost
    from qkv.opened import known_model, thread_count

    known = known_model(model or options.DEFAULT_MODEL)
    with Bars() as bars:
        result = attention_cost.compute(known.config, thread_count(threads), bars)
    return View(
        attention_cost.report(result, known.label, width),
        [lambda figure: attention_cost.draw(result, known.label, figure)],
    )


TOPICS: dict[str, Callable[[str | None, int, int | None], View]] = {
    "scaling": _scaling,
    "mask": _mask,
    "convex": _convex,
    "heads": _heads,
    "cost": _cost,
}


def _middle(layers: list[Heads]) -> tuple[int, Heads]:
    """The layer in the middle, and its number."""
    return len(layers) // 2, layers[len(layers) // 2]


def trace(model: str) -> list[Heads]:
    """Fetch a model if need be, and run it in NumPy on `SAMPLE`: q, k and v of every layer."""
    from qkv.cli.bars import Bars
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


def _width() -> int:
    return max(NARROW, min(WIDE, shutil.get_terminal_size((NARROW, 24)).columns))
