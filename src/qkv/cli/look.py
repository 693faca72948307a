"""`qkv look`: what the heads of a model do with a text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from qkv.cli import options, terminal
from qkv.cli.run import read_prompt

NARROW, WIDE = 80, 160


@options.grouped
def look(
    model: options.ModelOptions,
    prompt: Annotated[str | None, Argument(help="What the model reads.", show_default=False)] = None,
    layer: Annotated[int | None, Option(help="Show a head of this layer (default: of the strongest link).")] = None,
    head: Annotated[int | None, Option(help="Show this head (default: of the strongest link).")] = None,
    generate: Annotated[int, Option(help="Also answer with up to so many tokens, and look at those.")] = 0,
    chat: Annotated[bool, Option("--chat", help="The text is a message to the model, in its chat template.")] = False,
    html: Annotated[Path | None, Option(metavar="FILE", help="Also write a page to explore all heads.")] = None,
    png: Annotated[Path | None, Option(metavar="FILE", help="Also plot the head's weights.")] = None,
    npz: Annotated[Path | None, Option(metavar="FILE", help="Also write the numbers, for NumPy.")] = None,
) -> None:
    """Show what a model's heads do with a text.

    \b
    qkv look -m smollm2 "The cat sat. The cat"
    qkv look -m smollm2 --layer 18 --head 6 --png head.png "a b c d a b c"
    qkv look -m smollm2 --chat --generate 20 "Name three colours."

    All layers × heads by what they mostly do; one head's weights between tokens; what the last token takes most from.
    The engine computes what it always computes, and its numbers are copied. --png needs matplotlib: pip install
    'qkv[plots]'. --npz has ids, tokens, statistics, and of the shown head q, k, v, z and its weights (pattern).
    """
    from qkv.explain import figures
    from qkv.look import html as look_html
    from qkv.look import names, report

    text = read_prompt(prompt)
    for path in (html, png, npz):
        if path is not None:
            figures.check_target(path)
    figure = None if png is None else figures.new_figure()
    with model.open() as llm:
        for name, number, count in (
            ("--layer", layer, llm.config.num_hidden_layers),
            ("--head", head, llm.config.num_attention_heads),
        ):
            names.in_range(name, number or 0, count)
        asked: Any = [{"role": "user", "content": text}] if chat else text
        seen = llm.look(asked, generate=generate)
    shown = report.choose(seen, layer, head)
    width = max(NARROW, min(WIDE, shutil.get_terminal_size((NARROW, 24)).columns))
    parts = [report.heads(seen), report.heat_map(seen, *shown, width), report.links(seen)]
    if html is not None:
        figures.write_whole(html, lambda file: file.write(look_html.page(seen, *shown).encode()))
    if png is not None:
        report.draw(seen, *shown, figure)
        figures.save(figure, png)
    if npz is not None:
        figures.write_whole(npz, lambda file: report.write_arrays(seen, *shown, file))
    terminal.write(terminal.for_output("\n".join(parts)))
