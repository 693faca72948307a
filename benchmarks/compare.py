"""qkv beside other engines on the same cores and files, in one run in which they take turns.

Prints a line for each point as it is done: tokens per second of qkv and of each peer at its fastest setting (f: flash
attention, q: quantized cache), the ratio, whether the bar for it is met, what a step needs, and which fraction that is
of the read bandwidth measured in the same rounds. Then a plot, and one JSON line last. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import extras, machine, models, plot, points, readme, report
from benchmarks.measure import Memory, Rounds, opened
from benchmarks.peers import KINDS, Peer, find_peers
from benchmarks.workers import Launch, Worker, WorkerError
from qkv.cli.bars import Bars
from qkv.errors import ParameterError, QkvError
from qkv.measure.speed import Point, need_of_bytes
from qkv.runtime.cores import available_cores
from qkv.runtime.team import MAX_THREADS
from qkv.weights.checkpoint import open_checkpoint

SECTIONS = ("speed", "start", "overhead", "portable")
READING = Launch("memory", sys.executable, "benchmarks.worker_memory")
START_ROUNDS = 3
EXAMPLES = """\
examples:
  python -m benchmarks.compare --llama-python ~/llama/bin/python
  python -m benchmarks.compare --quick --models q4_0
  python -m benchmarks.compare --models smollm2 --points decode:128 prefill:512 batch:8 --rounds 7
  python -m benchmarks.compare --models q4_0=my-qwen3-q4_0.gguf --points decode:128 --only speed
  python -m benchmarks.compare --quick --models q4_0 --also-qkv ../qkv-before/src
"""


@dataclass
class Report:
    """Everything that was measured."""

    about: dict[str, Any]
    threads: int
    peers: list[Peer]
    rows: list[report.Row] = field(default_factory=list)
    starting: dict[str, list[extras.Starting]] = field(default_factory=dict)
    checks: list[extras.Check] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "compare",
            "machine": self.about,
            "threads": self.threads,
            "peers": {peer.name: peer.version or None for peer in self.peers},
            "rows": [row.as_json() for row in self.rows],
            "starting": {model: [row.as_json() for row in rows] for model, rows in self.starting.items()},
            "checks": [check.as_json() for check in self.checks],
            "failures": self.failures,
        }

    def verdicts(self) -> list[bool]:
        """Of all bars."""
        return [met for row in self.rows for met in row.met()] + [check.met for check in self.checks]


def options(arguments: list[str]) -> argparse.Namespace:
    keys = [model.key for model in models.MODELS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=keys, metavar="M", help=f"{', '.join(keys)}; KEY=FILE.gguf; or a file")
    add("--points", nargs="+", type=_point, metavar="P", help="decode:DEPTH, prefill:TOKENS, batch:SEQUENCES")
    add("--bars", action="store_true", help="the points that have a bar, and no others")
    add("--quick", action="store_true", help="four points to a depth of 512, three rounds, nothing but speed")
    add("--rounds", type=_count, metavar="N", help="turns of every engine at every point (default 5)")
    add("--threads", type=_count, default=available_cores(), metavar="N", help="default: %(default)s, the cores here")
    add("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}")
    for kind in KINDS:
        add(kind.option, metavar="PYTHON", help=f"a Python that has {kind.package} (or set {kind.variable})")
    add("--also-qkv", metavar="SRC", help="the src folder of another checkout: measured beside this one")
    add("--out", type=Path, default=Path("build/bench"), metavar="FOLDER", help="for the plot (default: %(default)s)")
    add("--write-readme", action="store_true", help="put this run's results into the table of both READMEs")
    chosen = parser.parse_args(arguments)
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 5)
    chosen.only = chosen.only or (["speed"] if chosen.quick else list(SECTIONS))
    if chosen.threads > MAX_THREADS:
        parser.error(f"argument --threads: must be at most {MAX_THREADS}")
    if chosen.also_qkv and not (Path(chosen.also_qkv) / "qkv").is_dir():
        parser.error(f"argument --also-qkv: there is no qkv in {chosen.also_qkv}")
    return chosen


def _point(text: str) -> Point:
    try:
        return Point.parse(text)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return int(text)


def compare(chosen: argparse.Namespace, found: Report, bars: Bars) -> None:
    """Measure everything that was asked for into `found`, printing as it goes. Raises QkvError, WorkerError."""
    launches = [peer.launch for peer in found.peers if peer.launch is not None]
    if chosen.also_qkv:
        source = Path(chosen.also_qkv).resolve()
        # The other checkout's own worker, where it has one, knows the other source's names.
        root = source.parent if (source.parent / "benchmarks").is_dir() else extras.HOME.root
        environment = {"PYTHONPATH": str(source)}
        launches.append(Launch("qkv, other", sys.executable, extras.HOME.module, environment, root))
    launches.insert(0, extras.HOME)
    for number, (model, file) in enumerate(models.chosen(chosen.models)):
        path = (file or models.file_of(model, bars)).resolve()
        say(f"\n{model.title} ({path.name}, {path.stat().st_size / 1e6:,.0f} MB)")
        if "speed" in chosen.only:
            barred = [point for point in models.default_points(model, False) if points.has_bar(model.key, point)]
            wanted = chosen.points or (barred if chosen.bars else models.default_points(model, chosen.quick))
            speed(model, path, wanted, launches, chosen, found, bars)
        if "start" in chosen.only:
            bars(f"{model.key}: starting", 0, None, "starts")
            rows, failures = extras.starting(launches, path, chosen.threads, START_ROUNDS)
            found.starting[model.key] = rows
            found.failures += [f"{model.key}, starting {name}: {reason}" for name, reason in failures.items()]
            say("\n" + report.starting_table(rows), end="")
        if number == 0:
            found.checks += checks(path, chosen, bars)


def checks(path: Path, chosen: argparse.Namespace, bars: Bars) -> list[extras.Check]:
    """The bars that are no ratio to a peer, on the first model."""
    found = []
    if "overhead" in chosen.only:
        bars("overhead of a step", 0, None, "steps")
        found.append(extras.overhead(path, chosen.threads))
    if "portable" in chosen.only:
        bars("portable code", 0, None, "points")
        found += extras.portable(path, chosen.threads, chosen.rounds)
    for check in found:
        say(check.line())
    return found


def speed(
    model: models.BenchModel,
    path: Path,
    points: list[Point],
    launches: list[Launch],
    chosen: argparse.Namespace,
    found: Report,
    bars: Bars,
) -> None:
    """Start everyone, let them take turns, print a line for each point as it is done."""
    config = open_checkpoint(path).config
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(launch))) for launch in launches]
        reader = stack.enter_context(closing(Worker(READING)))
        bars(f"{model.key}: loading", 0, None, "engines")
        failures: dict[str, str] = {}
        said = opened(workers, str(path), chosen.threads, points, failures)
        if report.HOME in failures:
            raise QkvError(f"qkv cannot measure {path}: {failures[report.HOME]}")
        for name, reason in failures.items():
            found.failures.append(f"{model.key}, {name}: {reason}")
            say(f"{name} is left out: {reason}")
        memory = Memory(reader, float(reader.ask("open", threads=chosen.threads)["bytes"]))
        workers = [worker for worker in workers if worker.name in said]
        names = [worker.name for worker in workers if worker.name != report.HOME]
        own = said[report.HOME]
        columns = report.header(names)
        say(report.line(columns, columns))
        for result in Rounds(workers, said, chosen.rounds, memory=memory).measure(points, bars, model.key):
            needs = {
                cache: need_of_bytes(result.point, config, own["weight_bytes"], own["head_bytes"], cache)
                for cache in report.CACHES
            }
            rows = report.rows_of(model.key, result, needs, names)
            found.rows += rows
            for text in [report.line(report.cells(row, names), columns) for row in rows] + report.notes(result):
                say(text)


def conclude(found: Report, chosen: argparse.Namespace) -> None:
    """What is left when everything is measured, or as much of it as there was time for."""
    verdicts = found.verdicts()
    if verdicts:
        say(f"\n{sum(verdicts)} of {len(verdicts)} bars met")
    if found.rows:
        say(plot.save(found.rows, chosen.out))
    if chosen.write_readme:
        say(readme.update(found.rows, found.about, found.threads, found.peers))
    say(json.dumps(found.as_json()))


def say(text: str, end: str = "\n") -> None:
    """Print at once, also into a pipe."""
    print(text, end=end, flush=True)


def main(arguments: list[str] | None = None) -> int:
    chosen = options(sys.argv[1:] if arguments is None else arguments)
    try:
        peers = find_peers({kind.option: getattr(chosen, kind.option[2:].replace("-", "_")) for kind in KINDS})
        found = Report(machine.machine(), chosen.threads, peers)
        say(machine.text(found.about) + f"{chosen.threads} threads, medians of {chosen.rounds} rounds")
        for peer in peers:
            say(f"{peer.name}: {peer.version}" if peer.launch else f"{peer.name}: absent. To add it: {peer.hint}")
        try:
            with Bars() as bars:
                compare(chosen, found, bars)
        except KeyboardInterrupt:
            conclude(found, chosen)
            return 130
        conclude(found, chosen)
    except (QkvError, WorkerError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
