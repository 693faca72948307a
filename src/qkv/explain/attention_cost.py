"""What attention costs against T: counted, measured here, and the machine's two limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.explain.charts import bars, beside, paragraph, si, table
from qkv.explain.figures import COLOURS, GREY
from qkv.measure.attention_timing import measure
from qkv.measure.bandwidth import Clock
from qkv.measure.limits import measure_limits
from qkv.model.config import ModelConfig
from qkv.model.cost import Limits, cache_bytes_per_position, decode_cost, prefill_cost
from qkv.progress import Progress, silent

PROMPTS = [128, 256, 512, 1024, 2048]
CONTEXTS = [512, 1024, 2048, 4096, 8192, 16384]


@dataclass(frozen=True)
class Phase:
    """The attention of one layer at lengths T: one sequence, projections aside, f16 cache."""

    name: str
    lengths: list[int]
    textbook: list[int]  # FLOP
    executed: list[int]
    bytes: list[int]  # of keys and values, each read once
    seconds: list[float]  # measured

    @property
    def exponent(self) -> float:
        """p of the time ~ T^p that fits the measured times best."""
        return float(np.polyfit(np.log(self.lengths), np.log(self.seconds), 1)[0])


@dataclass(frozen=True)
class AttentionCost:
    """Both phases, and the machine."""

    config: ModelConfig
    threads: int
    limits: Limits
    prefill: Phase
    decode: Phase


def compute(
    config: ModelConfig, threads: int, progress: Progress = silent, *, clock: Clock = time.perf_counter
) -> AttentionCost:
    """Count, and measure on this machine. Takes a few seconds, and 0.5 GB for the memory's limit."""
    limits = measure_limits(threads, progress, clock)
    seconds = measure(config, PROMPTS, CONTEXTS, threads, progress, clock)
    prefill = _phase("prefill", config, PROMPTS, seconds[0])
    decode = _phase("decode", config, CONTEXTS, seconds[1])
    return AttentionCost(config, threads, limits, prefill, decode)


def _phase(name: str, config: ModelConfig, lengths: list[int], seconds: list[float]) -> Phase:
    count = prefill_cost if name == "prefill" else decode_cost
    layers = config.num_hidden_layers
    costs = [[part for part in count(config, T) if part.name in ("scores", "values")] for T in lengths]
    return Phase(
        name,
        lengths,
        [sum(part.textbook for part in cost) // layers for cost in costs],
        [sum(part.executed for part in cost) // layers for cost in costs],
        [int(cache_bytes_per_position(config, "f16")) // layers * T for T in lengths],
        seconds,
    )


def report(result: AttentionCost, name: str, width: int) -> str:
    """Text, tables and a plot for a terminal."""
    config, limits = result.config, result.limits
    square = 4 * config.num_attention_heads * config.head_dim
    text = paragraph(
        f"""{name}: H = {config.num_attention_heads} heads of d = {config.head_dim}. For T tokens the scores are
        2·H·T²·d FLOP and the weighted sum of the values as many: 4·H·d·T² = {square:,}·T² a layer, projections aside.
        One more token costs 4·H·d·T = {square:,}·T. The textbook computes the full square; the kernel skips the
        future, about half of it. Times are of one layer's attention in qkv's own kernels, measured now, the best of a
        few runs (threads: {result.threads}). Other programs slow long runs more than short ones.""",
        width,
    )
    most = limits.flop_per_second, limits.bytes_per_second
    for phase in (result.prefill, result.decode):
        rows = [(phase.name, "textbook", "executed", "bytes", "measured", "FLOP/s", "of max", "B/s", "of max")]
        for T, textbook, executed, size, seconds in zip(
            phase.lengths, phase.textbook, phase.executed, phase.bytes, phase.seconds, strict=True
        ):
            counts = si(textbook), si(executed), si(size, "B"), si(seconds, "s")
            rates = executed / seconds, size / seconds
            parts = [f"{100 * rate / limit:.0f} %" for rate, limit in zip(rates, most, strict=True)]
            rows.append((f"T = {T}", *counts, si(rates[0]), parts[0], si(rates[1]), parts[1]))
        text += f"{table(rows)}measured time ~ T^{phase.exponent:.2f}\n\n"
    text += "measured seconds, bars on a logarithmic scale\n"
    text += beside([(phase.name, _times(phase, width // 2 - 2)) for phase in (result.prefill, result.decode)], width)
    return text + paragraph(
        f"""The limits of this machine, measured now: {si(limits.bytes_per_second, "B/s")} from memory and
        {si(limits.flop_per_second, "FLOP/s")} in float32. Prefill does many operations with each byte: its limit is
        the second. Decode reads the whole cache for one query: its limit is the first, unless a cache of the processor
        holds what it reads; then it can be faster than memory.""",
        width,
    )


def _times(phase: Phase, width: int) -> list[str]:
    labels, text = [f"T = {T}" for T in phase.lengths], [si(seconds, "s") for seconds in phase.seconds]
    return bars(labels, phase.seconds, width, text=text, log=True).splitlines()


def draw(result: AttentionCost, name: str, figure: Any) -> None:
    """Times against T with both limits, and operations against T."""
    times, counts = figure.subplots(1, 2)
    flop, size = result.limits.flop_per_second, result.limits.bytes_per_second
    for phase, colour, work, rate, limit in (
        (result.prefill, COLOURS[0], result.prefill.executed, flop, f"{flop / 1e9:.0f} GFLOP/s"),
        (result.decode, COLOURS[1], result.decode.bytes, size, f"{size / 1e9:.1f} GB/s"),
    ):
        least = [amount / rate for amount in work]
        times.loglog(phase.lengths, phase.seconds, "o", color=colour, label=f"{phase.name}: T^{phase.exponent:.2f}")
        times.loglog(phase.lengths, least, "--", color=colour, linewidth=1, label=f"{phase.name} at {limit}")
        counts.loglog(phase.lengths, phase.textbook, "-", color=GREY, linewidth=1)
        counts.loglog(phase.lengths, phase.executed, "o", color=colour, markersize=4, label=f"{phase.name}, executed")
    counts.plot([], [], "-", color=GREY, linewidth=1, label="textbook: 4·H·d·T² and 4·H·d·T")
    times.set(title=f"{name}: seconds of one layer's attention", xlabel="T")
    counts.set(title="FLOP of one layer's attention", xlabel="T")
    for axes in (times, counts):
        lengths = sorted({*result.prefill.lengths, *result.decode.lengths})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(T) for T in lengths], fontsize=8)
        axes.legend(fontsize=8)
