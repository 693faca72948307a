"""Make the book's figures from SmolLM2, and record what their captions quote.

    python docs/make_figures.py            all of them (needs qkv[plots] and SmolLM2)
    python docs/make_figures.py heads      only these

Beside the PNGs, figures/figures.json holds for each figure its numbers, which its caption (figures/captions.json)
quotes, and hashes of the PNG and of everything it was made from: the drawing function and the functions of the model
that it shows. When one of those changes, `tests/test_book.py` asks for the figure to be made again. Then run
`python docs/sync.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from typing import Any

import drawings
import sync
from drawings import RECIPES

DRAWINGS = "docs/drawings.py"
HELPERS = ("recorded", "Recorder", "residual_streams", "smollm2")
EXTRA = {"depth": ("fresh_qwen3", "likeness", "Both")}


def source_hash(name: str) -> str:
    """A hash of everything figure `name` is made from, blind to docstrings and comments on lines of their own."""
    recipe = RECIPES[name]
    drawn = [f"{DRAWINGS}::{part}" for part in (recipe.draw.__name__, *HELPERS, *EXTRA.get(name, ()))]
    sources = [sync.definition(what) for what in (*drawn, *recipe.shows)]
    code = "\n".join([drawings.TEXT, drawings.REPEATED, drawings.QUESTION, *sources])
    code = re.sub(r'^\s*""".*?"""\n', "", code, flags=re.DOTALL | re.MULTILINE)
    lines = [line.rstrip() for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def png(plot: Any) -> bytes:
    """The plot as a small PNG: transparent, 64 colours."""
    from PIL import Image

    buffer = io.BytesIO()
    plot.savefig(buffer, dpi=130, transparent=True)
    buffer.seek(0)
    small = Image.open(buffer).convert("RGBA").quantize(64, method=Image.Quantize.FASTOCTREE)
    result = io.BytesIO()
    small.save(result, "PNG", optimize=True)
    return result.getvalue()


def main() -> None:
    unknown = set(sys.argv[1:]) - set(RECIPES)
    if unknown:
        sys.exit(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    records = json.loads(sync.FIGURES.read_text(encoding="utf-8")) if sync.FIGURES.exists() else {}
    for name in sys.argv[1:] or RECIPES:
        plot, numbers = RECIPES[name].draw()
        data = png(plot)
        (sync.FIGURES.parent / f"{name}.png").write_bytes(data)
        records[name] = {
            "source": source_hash(name),
            "png": hashlib.sha256(data).hexdigest()[:16],
            "numbers": numbers,
        }
        print(f"{name}: {len(data) / 1000:.0f} kB, {numbers}")
    text = json.dumps({name: records[name] for name in RECIPES if name in records}, indent=1, ensure_ascii=False)
    sync.FIGURES.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
