"""`qkv bench`: how fast a model is on this machine, and how close to what its memory allows."""

from __future__ import annotations

import json
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from qkv.cli import options, terminal
from qkv.cli.bars import Bars
from qkv.errors import ParameterError
from qkv.explain.charts import table

if TYPE_CHECKING:
    from qkv.measure.bandwidth import Reader
    from qkv.measure.speed import Bursts, Point
    from qkv.model.compiled import PackedWeights
    from qkv.model.config import ModelConfig

DEFAULTS = {"decode": (128, 512, 2048), "prefill": (128, 512), "batch": (2, 8)}
OPTIONS = {"decode": "--depths", "prefill": "--prompts", "batch": "--batches"}
MOST_ROUNDS = 1000


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    depths: Annotated[str | None, Option(help="Decode after so many tokens (default: 128,512,2048); 0: don't.")] = None,
    prompts: Annotated[str | None, Option(help="Prefill so many tokens (default: 128,512); 0: don't.")] = None,
    batches: Annotated[str | None, Option(help="Decode so many sequences at 128 (default: 2,8); 0: don't.")] = None,
    rounds: Annotated[int, Option(help="How often each is measured; the median counts.")] = 5,
    weights: options.Weights = None,
    cache: options.Cache = "f16",
    threads: options.Threads = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how fast a model runs here, and how close that is to what this machine's memory allows.

    \b
    qkv bench
    qkv bench -m smollm2 --depths 128,4096 --prompts 512 --batches 0
    qkv bench -m model.gguf --cache int8 --threads 4 --json

    Decoding reads all weights and the cache for every token, so GB/s is what limits it; "of read" is the fraction of
    the fastest reading that memory gave in the same rounds; a model that fits into the processor's cache can be above
    100%. GOP/s is what limits prompts. Do nothing else on the machine meanwhile.
    """
    from qkv.kernels.sizes import CACHE_KINDS
    from qkv.opened import open_model, thread_count
    from qkv.weights.choices import check_format

    count = thread_count(threads)
    check_format(weights)
    if cache not in CACHE_KINDS:
        raise ParameterError(f"cache must be one of {', '.join(CACHE_KINDS)}, got {cache!r}")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ParameterError(f"--rounds must be from 1 to {MOST_ROUNDS}, got {rounds}")
    wanted = {
        kind: numbers(OPTIONS[kind], text) for kind, text in zip(OPTIONS, (depths, prompts, batches), strict=True)
    }
    with Bars(quiet=quiet) as bars:
        opened = open_model(model, bars)
        points = points_for(opened.config, wanted)
        loaded = opened.load(weights, threads=count, progress=bars)
        read, measured = measure(opened.config, loaded.weights, points, cache, count, rounds, bars)
    result = {
        "model": model,
        "path": loaded.report.path,
        "weights": sorted(loaded.weights.formats),
        "cache": cache,
        "threads": count,
        "load_seconds": loaded.report.seconds,
        "read_bytes_per_second": read,
        "points": measured,
    }
    terminal.write(json.dumps(result) + "\n" if as_json else terminal.for_output(as_text(result)))


def numbers(option: str, text: str | None) -> list[int] | None:
    """ "128,512" → [128, 512], "0" → [], None → None. Raises ParameterError that names the option."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ParameterError(f"{option} must be whole numbers with commas between, like 128,512; got {text!r}")
    return [int(part) for part in parts if int(part)]


def points_for(config: ModelConfig, wanted: dict[str, list[int] | None]) -> list[Point]:
    """The points that were asked for, and the default ones that fit into the model's context. Raises ParameterError."""
    from qkv.measure.speed import HEADROOM, MOST_SEQUENCES, Point, in_order

    points = []
    longest = config.max_position_embeddings - HEADROOM
    for kind, given in wanted.items():
        most = MOST_SEQUENCES if kind == "batch" else longest
        for number in DEFAULTS[kind] if given is None else given:
            if number <= most:
                points.append(Point(kind, number))
            elif given is not None:
                raise ParameterError(f"{OPTIONS[kind]} can be at most {most:,} here, got {number:,}")
    if not points:
        raise ParameterError("--depths, --prompts and --batches leave nothing to measure")
    return in_order(points)


def measure(
    config: ModelConfig,
    weights: PackedWeights,
    points: list[Point],
    cache: str,
    threads: int,
    rounds: int,
    bars: Bars,
) -> tuple[float, list[dict[str, Any]]]:
    """Bytes per second of reading memory, and what each point took (seconds, one a round) and needed.

    Memory is read once a round of every point; the median counts.
    """
    from qkv.measure.bandwidth import Reader
    from qkv.measure.speed import Bursts, need
    from qkv.runtime.aside import aside

    reader = Reader(threads, progress=bars)
    reader.tune(progress=bars)
    bursts = Bursts(config, weights, points, cache=cache, threads=threads)
    reads: list[float] = []
    measured: list[dict[str, Any]] = []
    for done, point in enumerate(points):
        bars("measuring", done, len(points), "points")
        seconds = aside(partial(measure_point, reader, bursts, point, rounds, reads))
        step, needed = median(seconds), need(point, config, weights, cache)
        measured.append(
            {
                "kind": point.kind,
                "n": point.n,
                "tokens_per_second": point.tokens / step,
                "step_seconds": seconds,
                "step_bytes": round(needed.bytes),
                "step_operations": round(needed.operations),
                "bytes_per_second": needed.bytes / step,
                "operations_per_second": needed.operations / step,
            }
        )
    bars("measuring", len(points), len(points), "points")
    bursts.close()
    reader.close()
    read = median(reads)
    return read, [point | {"fraction_of_read": point["bytes_per_second"] / read} for point in measured]


def measure_point(reader: Reader, bursts: Bursts, point: Point, rounds: int, reads: list[float]) -> list[float]:
    """Seconds of a step, one for each round; `reads` gets the rate of reading memory in the same rounds."""
    bursts.prepare(point)
    seconds = []
    for _ in range(rounds):
        reads.append(reader.bytes / reader.seconds())
        seconds.append(bursts.burst(point) / point.steps)
    return seconds


def as_text(result: dict[str, Any]) -> str:
    """The table, at most 80 columns wide."""
    from qkv.measure.speed import BATCH_DEPTH
    from qkv.opened import label

    titles = {"prefill": "prefill {:,}", "decode": "decode at {:,}", "batch": f"decode {{}} at {BATCH_DEPTH}"}
    rows = [["", "tokens/s", "ms a step", "MB a step", "GB/s", "of read", "GOP/s"]]
    for point in result["points"]:
        speed, step = point["tokens_per_second"], median(point["step_seconds"])
        rows.append(
            [
                titles[point["kind"]].format(point["n"]),
                f"{speed:,.{1 if speed < 100 else 0}f}",
                f"{step * 1e3:,.{2 if step < 0.1 else 0}f}",
                f"{point['step_bytes'] / 1e6:,.0f}",
                f"{point['bytes_per_second'] / 1e9:.1f}",
                f"{point['fraction_of_read']:.0%}",
                f"{point['operations_per_second'] / 1e9:,.0f}",
            ]
        )
    formats, threads = ", ".join(result["weights"]), terminal.count_text(result["threads"], "thread")
    return (
        f"model      {label(result['model'])} ({formats} weights, {result['cache']} cache)\n"
        f"loaded in  {result['load_seconds']:.2f} s\n"
        f"memory     {result['read_bytes_per_second'] / 1e9:.1f} GB/s read, {threads}\n\n" + table(rows)
    )
