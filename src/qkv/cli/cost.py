"""`qkv cost`: what prefill and decode cost, part by part, from the shape of a model alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from qkv.cli import options, terminal
from qkv.cli.bars import Bars
from qkv.errors import ParameterError
from qkv.explain.charts import si, table

if TYPE_CHECKING:
    from qkv.model.config import ModelConfig
    from qkv.model.cost import Limits, Part, Weights


def cost(
    model: options.Model = options.DEFAULT_MODEL,
    context: Annotated[int, Option(help="T: tokens of the prompt, and where the new one is.")] = 1024,
    batch: Annotated[int, Option(help="B: sequences computed together.")] = 1,
    weights: options.Weights = None,
    cache: options.Cache = "f16",
    gbps: Annotated[
        float | None, Option(help="Memory bandwidth in GB/s (default: measured here, in a second).")
    ] = None,
    gflops: Annotated[float | None, Option(help="Operations in GFLOP/s (default: measured here).")] = None,
    threads: options.Threads = None,
) -> None:
    """Count what a model costs, part by part: FLOPs, bytes, and the least time they take.

    \b
    qkv cost --context 4096
    qkv cost -m qwen3:8b --weights int4 --context 8192 --batch 4
    qkv cost -m Qwen/Qwen3-0.6B --gbps 50 --gflops 1000

    Needs no weights, and no network for the Qwen3 sizes. "Textbook" is the full square of scores and the logits of
    every token, "executed" is what qkv's kernels do. A part takes as long as its bytes or its operations, whichever
    is longer; --gflops is also taken for the 8-bit products of int8 and int4 weights. --weights can be int4m here too,
    which Q4_1 and Q4_K of a GGUF file become.
    """
    from qkv.model.cost import decode_cost, prefill_cost
    from qkv.opened import known_model
    from qkv.weights.choices import CHOICES

    known = known_model(model)
    formats: Weights
    config, formats = known.config, weights or "int8"
    if known.files is not None and weights in (None, *CHOICES):  # as they would be loaded
        formats = known.files.formats(weights)
    names = formats if isinstance(formats, str) else " + ".join(sorted({*formats.values()}))
    prefill = prefill_cost(config, context, batch, weights=formats, cache=cache)
    decode = decode_cost(config, context, batch, weights=formats, cache=cache)
    limits, source = machine_limits(gbps, gflops, threads)
    many = f" of each of {batch:,} sequences" if batch > 1 else ""
    rows = _header(known.label, config, context, batch, cache)
    rows.append(("limits", f"{limits_text(limits)} ({source})"))
    text = table(rows, left=2, rule=False)
    text += (
        f"\nPrefill of {terminal.count_text(context, 'token')}{many}, weights {names}\n{parts_table(prefill, limits)}"
    )
    text += f"\nDecode of one token{many}, the one at position {context:,}\n" + parts_table(decode, limits)
    terminal.write(terminal.for_output(text))


def machine_limits(gbps: float | None, gflops: float | None, threads: int | None) -> tuple[Limits, str]:
    """The limits that were given, measured now where they were not, and where they come from."""
    from qkv.model.cost import Limits

    for name, value in (("--gbps", gbps), ("--gflops", gflops)):
        if value is not None and not 0 < value < 1e12:
            raise ParameterError(f"{name} must be a positive number, got {value:g}")
    given = {"bytes_per_second": gbps, "flop_per_second": gflops, "flop_per_second_int8": gflops}
    rates = {name: value * 1e9 for name, value in given.items() if value is not None}
    if len(rates) == len(given):
        return Limits(**rates), "as given"
    from qkv.measure.limits import measure_limits  # compiles kernels
    from qkv.opened import thread_count

    count = thread_count(threads)
    with Bars() as bars:
        limits = measure_limits(count, bars)
    source = f"measured, {terminal.count_text(count, 'thread')}"
    if rates:
        source = f"{'FLOP/s' if gbps is None else 'GB/s'} as given, the rest {source}"
    return replace(limits, **rates), source


def limits_text(limits: Limits) -> str:
    """ "23.1 GB/s, 187 GFLOP/s, int8 721 GFLOP/s"."""
    rates = f"{si(limits.bytes_per_second, 'B/s')}, {si(limits.flop_per_second, 'FLOP/s')}"
    if limits.flop_per_second_int8 == limits.flop_per_second:
        return rates
    return f"{rates}, int8 {si(limits.flop_per_second_int8, 'FLOP/s')}"


def parts_table(parts: list[Part], limits: Limits) -> str:
    """A line for each part of the model, and their sum."""
    from qkv.model.cost import total

    rows = [("part", "parameters", "textbook", "executed", "bytes", "FLOP/B", "time", "limit")]
    least = [part.seconds(limits) for part in parts]
    bounds = ["memory" if memory > compute else "compute" for memory, compute in least]
    times = [*map(max, least), sum(map(max, least))]
    for part, seconds, bound in zip([*parts, total(parts)], times, [*bounds, ""], strict=True):
        counts = f"{part.parameters:,}", si(part.textbook), si(part.executed), si(part.bytes, "B")
        intensity = f"{part.intensity:,.{0 if part.intensity >= 10 else 2}f}"
        rows.append((part.name, *counts, intensity, si(seconds, "s"), bound))
    return table(rows)


def _header(label: str, config: ModelConfig, context: int, batch: int, cache: str) -> list[tuple[str, str]]:
    from qkv.model.cost import cache_bytes_per_position

    table_size = config.vocab_size * config.hidden_size
    per_token = round(cache_bytes_per_position(config, cache))
    held = terminal.count_text(context, "position") + (f", {batch:,} sequences" if batch > 1 else "")
    square = 4 * config.num_attention_heads * config.head_dim
    rows = [
        ("model", label),
        ("parameters", f"{config.parameter_count:,}"),
        ("token table", f"{table_size:,}{', also the head' if config.tie_word_embeddings else ''}"),
        (
            f"KV cache, {cache}",
            f"{per_token:,} bytes a token, {terminal.bytes_text(per_token * context * batch)} for {held}",
        ),
        ("attention", f"textbook: 4·H·d·T² = {square:,}·T² FLOP a layer, 4·H·d·T a new token"),
    ]
    if context > config.max_position_embeddings:
        rows.append(("note", f"the model was made for at most {config.max_position_embeddings:,} positions"))
    return rows
