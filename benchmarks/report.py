"""What was measured as rows, and rows as a table for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.extras import Starting
from benchmarks.measure import STRANGERS, Result, best
from benchmarks.points import FRACTION_BARS, bar_for
from qkv.explain.charts import table
from qkv.measure.speed import Need, Point

HOME = "qkv"
CACHES = ("f16", "int8")
WIDTHS = {"point": 12, "cache": 5, "qkv": 6, "ratio": 6, "bar": 12, "MB": 6, "GOP": 7, "GB/s": 5, "GOP/s": 5}


@dataclass
class Row:
    """qkv with one kind of cache at one point, beside each peer at the setting that was fastest for it.

    With an f16 cache peers have theirs in f16, with an int8 one whichever kind makes them fastest.
    """

    model: str
    point: Point
    cache: str
    rate: float  # tokens per second, the median of the rounds
    rounds: list[float]
    peers: dict[str, tuple[float, str]]  # tokens per second, and the setting
    step_bytes: float
    step_operations: float
    read: float | None  # bytes per second, the median of the same rounds
    strangers: float = 0.0  # cores that other programs used during the rounds
    ratios: dict[str, float] = field(init=False)
    bars: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.ratios = {name: self.rate / rate for name, (rate, _) in self.peers.items()}
        asked = {name: bar_for(self.model, self.point, self.cache, name) for name in self.peers}
        self.bars = {name: bar for name, bar in asked.items() if bar is not None}

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.point.tokens / self.rate

    @property
    def fraction(self) -> float | None:
        """Of the read bandwidth."""
        return self.step_bytes / self.seconds / self.read if self.read else None

    @property
    def fraction_bar(self) -> float | None:
        return FRACTION_BARS.get((self.model, self.point)) if self.cache == "f16" else None

    def met(self) -> list[bool]:
        """Whether each bar of this row is met."""
        verdicts = [self.ratios[name] >= bar for name, bar in self.bars.items()]
        if self.fraction is not None and self.fraction_bar is not None:
            verdicts.append(self.fraction >= self.fraction_bar)
        return verdicts

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "point": str(self.point),
            "cache": self.cache,
            "tokens_per_s": _short(self.rate),
            "rounds": [_short(rate) for rate in self.rounds],
            "peers": {name: {"tokens_per_s": _short(rate), "setting": how} for name, (rate, how) in self.peers.items()},
            "ratios": {name: _short(ratio) for name, ratio in self.ratios.items()},
            "bars": self.bars,
            "fraction_of_read": None if self.fraction is None else _short(self.fraction),
            "fraction_bar": self.fraction_bar,
            "met": all(self.met()) if self.met() else None,
            "step_bytes": round(self.step_bytes),
            "step_operations": round(self.step_operations),
            "gb_per_s": _short(self.step_bytes / self.seconds / 1e9),
            "gop_per_s": _short(self.step_operations / self.seconds / 1e9),
            "read_gb_per_s": None if self.read is None else _short(self.read / 1e9),
            "strangers_cores": _short(self.strangers),
        }


def rows_of(model: str, result: Result, needs: dict[str, Need], peers: list[str]) -> list[Row]:
    """One row for each kind of qkv's cache. `needs`: by kind of cache."""
    rows = []
    for cache in CACHES:
        own = best(result.contestants, HOME, {cache})
        if own is None:
            continue
        theirs = {name: best(result.contestants, name, {"f16"} if cache == "f16" else None) for name in peers}
        rows.append(
            Row(
                model,
                result.point,
                cache,
                own.rate,
                own.rates,
                {name: (one.rate, one.variant) for name, one in theirs.items() if one is not None},
                needs[cache].bytes,
                needs[cache].operations,
                median(result.reads) if result.reads else None,
                result.company.share(result.company.strangers),
            )
        )
    return rows


def header(peers: list[str]) -> list[str]:
    columns = ["point", "cache", "qkv"]
    for name in peers:
        columns += [name, "ratio"]
    return [*columns, "bar", "MB", "GOP", "GB/s", "GOP/s", "of read"]


def cells(row: Row, peers: list[str]) -> list[str]:
    """The row of the table."""
    text = [str(row.point), row.cache, _rate(row.rate)]
    for name in peers:
        if name in row.peers:
            rate, setting = row.peers[name]
            text += [f"{_rate(rate)} {_mark(setting)}".rstrip(), f"{row.ratios[name]:.2f}×"]
        else:
            text += ["–", "–"]
    bars = [f"{bar:.1f}× {_verdict(row.ratios[name] >= bar)}" for name, bar in row.bars.items()]
    text.append(", ".join(bars))
    fraction = "–" if row.fraction is None else f"{row.fraction:.2f}"
    if row.fraction is not None and row.fraction_bar is not None:
        fraction += f" of {row.fraction_bar:.2f} {_verdict(row.fraction >= row.fraction_bar)}"
    need = [f"{row.step_bytes / 1e6:,.0f}", f"{row.step_operations / 1e9:,.2f}"]
    gops = row.step_operations / row.seconds / 1e9
    return [*text, *need, f"{row.step_bytes / row.seconds / 1e9:.1f}", f"{gops:,.0f}", fraction]


def notes(result: Result) -> list[str]:
    """What could not be measured and why, and whether the machine was quiet, one line each."""
    lines = [f"{one.engine}, {one.variant}: {one.failure}" for one in result.contestants if one.failure is not None]
    company = result.company
    for cores, who in (
        (company.share(company.strangers), "other programs"),
        (company.share(company.waiting), "engines that had to wait"),
    ):
        if cores > STRANGERS:
            lines.append(f"{result.point}: {who} used {cores:.2f} cores meanwhile; trust nothing of it")
    return lines


def line(texts: list[str], columns: list[str]) -> str:
    """A row of the table; columns are as wide as their titles and their longest texts want."""
    widths = [max(len(title), WIDTHS.get(title, 8)) for title in columns]
    padded = [text.ljust(width) if i < 2 else text.rjust(width) for i, (text, width) in enumerate(zip(texts, widths))]  # noqa: B905
    return "  ".join(padded).rstrip()


def starting_table(rows: list[Starting]) -> str:
    lines = [["", "load s", "first token s", "peak MB"]]
    for row in rows:
        peak = "–" if row.peak is None else f"{row.peak / 1e6:,.0f}"
        lines.append([row.engine, f"{row.load:.2f}", f"{row.first:.2f}", peak])
    return table(lines)


def _verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def _mark(setting: str) -> str:
    """ "f16 flash" -> "f", "q8_0 flash" -> "qf"."""
    return ("q" if setting.startswith("q8_0") else "") + ("f" if setting.endswith("flash") else "")


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
