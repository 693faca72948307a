"""`qkv bench`: how fast a model is on this machine, and how close to what its memory allows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli import options, terminal
from qkv.cli.bars import Bars
from qkv.errors import ParameterError

if TYPE_CHECKING:
    from qkv.measure.bandwidth import Reader
    from qkv.measure.speed import Bursts, Need, Point
    from qkv.model.compiled import PackedWeights
    from qkv.model.config import ModelConfig
    from qkv.opened import Loaded

DEFAULTS = {"decode": (128, 512, 2048), "prefill": (128, 512), "batch": (2, 8)}
OPTIONS = {"decode": "--depths", "prefill": "--prompts", "batch": "--batches"}
MOST_ROUNDS = 1000


@dataclass
class Row:
    """A point: seconds of its steps, one a round, and what a step needs."""

    point: Point
    seconds: list[float]
    need: Need

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.point.tokens / self.step


def bench(
    model: options.Model = options.DEFAULT_MODEL,
    depths: Annotated[
        str | None, typer.Option("--depths", help="Decode after so many tokens (default: 128,512,2048); 0: don't.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="Prefill so many tokens (default: 128,512); 0: don't.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option("--batches", help="Decode so many sequences at 128 (default: 2,8); 0: don't.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="How often each is measured; the median counts.")] = 5,
    weights: options.Weights = None,
    cache: options.Cache = "f16",
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on standard output, nothing else.")] = False,
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
    from qkv.weights.load import check_format

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
        reads, rows = measure(opened.config, loaded.weights, points, cache, count, rounds, bars)
    if as_json:
        terminal.write(json.dumps(as_object(model, loaded, reads, rows, cache, count)) + "\n")
    else:
        terminal.write(terminal.for_output(report(model, loaded, reads, rows, cache, count)))


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
) -> tuple[list[float], list[Row]]:
    """Bytes per second of reading memory, once a round of every point, and the points' rows."""
    from qkv.measure.bandwidth import Reader
    from qkv.measure.speed import Bursts, need
    from qkv.runtime.aside import aside

    reader = Reader(threads, progress=bars)
    reader.tune(progress=bars)
    bursts = Bursts(config, weights, points, cache=cache, threads=threads)
    reads: list[float] = []
    rows = []
    for done, point in enumerate(points):
        bars("measuring", done, len(points), "points")
        seconds = aside(partial(measure_point, reader, bursts, point, rounds, reads))
        rows.append(Row(point, seconds, need(point, config, weights, cache)))
    bars("measuring", len(points), len(points), "points")
    bursts.close()
    reader.close()
    return reads, rows


def measure_point(reader: Reader, bursts: Bursts, point: Point, rounds: int, reads: list[float]) -> list[float]:
    """Seconds of a step, one for each round; `reads` gets the rate of reading memory in the same rounds."""
    bursts.prepare(point)
    seconds = []
    for _ in range(rounds):
        reads.append(reader.bytes / reader.seconds())
        seconds.append(bursts.burst(point) / point.steps)
    return seconds


def report(model: str, loaded: Loaded, reads: list[float], rows: list[Row], cache: str, threads: int) -> str:
    """The table, at most 80 columns wide."""
    from qkv.explain.charts import table
    from qkv.opened import label

    read = median(reads)
    lines = [["", "tokens/s", "ms a step", "MB a step", "GB/s", "of read", "GOP/s"]]
    for row in rows:
        rate = row.need.bytes / row.step
        lines.append(
            [
                _title(row.point),
                f"{row.tokens_per_second:,.{1 if row.tokens_per_second < 100 else 0}f}",
                f"{row.step * 1e3:,.{2 if row.step < 0.1 else 0}f}",
                f"{row.need.bytes / 1e6:,.0f}",
                f"{rate / 1e9:.1f}",
                f"{rate / read:.0%}",
                f"{row.need.operations / row.step / 1e9:,.0f}",
            ]
        )
    head = [
        ("model", f"{label(model)} ({', '.join(sorted(loaded.weights.formats))} weights, {cache} cache)"),
        ("loaded in", f"{loaded.report.seconds:.2f} s"),
        ("memory", f"{read / 1e9:.1f} GB/s read, {terminal.count_text(threads, 'thread')}"),
    ]
    width = max(len(name) for name, _ in head)
    return "".join(f"{name:{width}}  {value}\n" for name, value in head) + "\n" + table(lines)


def as_object(
    model: str, loaded: Loaded, reads: list[float], rows: list[Row], cache: str, threads: int
) -> dict[str, Any]:
    """The same for programs: rates per second, bytes and operations of a step, every round's seconds."""
    read = median(reads)
    return {
        "model": model,
        "path": loaded.report.path,
        "weights": sorted(loaded.weights.formats),
        "cache": cache,
        "threads": threads,
        "load_seconds": loaded.report.seconds,
        "read_bytes_per_second": read,
        "points": [
            {
                "kind": row.point.kind,
                "n": row.point.n,
                "tokens_per_second": row.tokens_per_second,
                "step_seconds": row.seconds,
                "step_bytes": round(row.need.bytes),
                "step_operations": round(row.need.operations),
                "bytes_per_second": row.need.bytes / row.step,
                "operations_per_second": row.need.operations / row.step,
                "fraction_of_read": row.need.bytes / row.step / read,
            }
            for row in rows
        ],
    }


def _title(point: Point) -> str:
    if point.kind == "batch":
        return f"decode {point.n} at {point.depth}"
    return f"decode at {point.n:,}" if point.kind == "decode" else f"prefill {point.n:,}"
