"""The files that are measured: where they are, and which points make sense for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qkv.errors import QkvError
from qkv.measure.speed import Point
from qkv.progress import Progress
from qkv.weights.names import resolve


@dataclass(frozen=True)
class BenchModel:
    """A model to measure. `source` is a name for `qkv`, or "random" and the types of a file to make."""

    key: str
    title: str
    deepest: int
    random: str = ""  # the quantization of a random-weight Qwen3-0.6B
    name: str = ""  # or a model that can be fetched


MODELS = [
    BenchModel("q4_0", "Qwen3-0.6B (random weights), Q4_0", 8192, random="Q4_0"),
    BenchModel("q8_0", "Qwen3-0.6B (random weights), Q8_0", 8192, random="Q8_0"),
    BenchModel("q4_k", "Qwen3-0.6B (random weights), Q4_K and Q6_K", 2048, random="Q4_K_M"),
    BenchModel("smollm2", "SmolLM2-135M-Instruct, Q4_1", 4096, name="smollm2"),
]
DEPTHS = [128, 512, 2048, 4096, 8192]
PROMPTS = [128, 512, 2048]
BATCHES = [2, 4, 8, 16]
QUICK = [Point.parse(text) for text in ("prefill:512", "decode:128", "decode:512", "batch:8")]


def default_points(model: BenchModel, quick: bool) -> list[Point]:
    if quick:
        return QUICK
    depths = [depth for depth in DEPTHS if depth <= model.deepest and (depth != 4096 or model.deepest == 4096)]
    return (
        [Point("prefill", n) for n in PROMPTS]
        + [Point("decode", n) for n in depths]
        + [Point("batch", n) for n in BATCHES]
    )


def chosen(texts: list[str]) -> list[tuple[BenchModel, Path | None]]:
    """ "q4_0", "q4_0=FILE" or "FILE", as models and the files to take for them. Raises QkvError."""
    known = {model.key: model for model in MODELS}
    found: list[tuple[BenchModel, Path | None]] = []
    for text in texts:
        key, _, file = text.partition("=")
        path = Path(file or key).expanduser()
        if text in known:
            found.append((known[text], None))
        elif not path.is_file():
            raise QkvError(f"--models {text}: neither one of {', '.join(known)} nor a file")
        elif file and key not in known:
            raise QkvError(f"--models {text}: {key} is none of {', '.join(known)}")
        else:
            found.append((known[key] if file else BenchModel(path.stem, path.stem, 8192), path))
    return found


def file_of(model: BenchModel, progress: Progress) -> Path:
    """The model's file, made or fetched when it is not here yet. Raises QkvError."""
    if model.random:
        from benchmarks.random_model import cached

        return cached(model.random, progress)
    return resolve(model.name, progress=progress)
